"""Files of earlier runs: which of them `collect` may still show."""

import json
import os
from dataclasses import replace

import pandas as pd
import pytest

from dsv4.judge import collect as collect_module
from dsv4.judge.collect import collect, published, unjudged
from dsv4.judge.collect import main as collect_main
from dsv4.judge.compare import COLUMNS
from dsv4.judge.conftest import Audit
from dsv4.judge.gate import blocker, header, write_json
from dsv4.judge.measure import Notes, write
from dsv4.judge.residual import judge
from dsv4.ladder import Ladder
from dsv4.prompts import with_taps

REQUESTED = "B5_all"


@pytest.fixture
def old(tmp_path):
    """A run in which every rung and leaf passed, those on request too, one after the other."""
    audit = Audit(tmp_path / "run")
    second = 0
    for rung in audit.config.ladder:
        files = [audit.results / "metrics" / f"{rung.id}.parquet"]
        files += [
            audit.results / "variants" / rung.id / f"{name}.h5" for name in with_taps(audit.config.prompts)
        ]
        write(files[0], pd.DataFrame(columns=list(COLUMNS)), Notes())
        for path in files[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        files.append(audit.results / "gates" / f"{rung.id}.json")
        write_json(files[-1], header(rung) | {"status": "pass", "reasons": ["well"]})
        for path in files:
            second += 1
            os.utime(path, (second, second))
    return audit


def states(audit, target=None):
    return {
        verdict["id"]: verdict["status"]
        for verdict in collect(audit.results, audit.config, target)["variants"]
    }


def test_a_whole_run_is_shown_whole(old):
    assert set(states(old).values()) == {"pass"}


@pytest.mark.parametrize("state", ["fail", "cannot_measure", "blocked", None])
def test_nothing_above_a_rung_that_did_not_pass_is_shown(old, state):
    """Of every rung and leaf in turn: what stands on it has an old pass and old measurements."""
    for low in old.config.ladder:
        path = old.results / "gates" / f"{low.id}.json"
        before, second = path.read_text(), path.stat().st_mtime
        path.unlink() if state is None else write_json(path, header(low) | {"status": state})
        for rung in old.config.ladder:
            above = low in old.config.ladder.lineage(rung.id)[:-1]
            gone = above or (rung == low and state is None)
            assert (published(old.results, old.config, rung) is None) == gone, (low.id, rung.id)
            if gone:
                assert unjudged(old.results, old.config, rung)["status"] != "pass"
        path.write_text(before)
        os.utime(path, (second, second))


def test_a_leaf_on_a_leaf_waits_for_it(old):
    rungs = {
        "bottom": {"spine": True},
        "leaf": {"parent": "bottom", "set": {"q_format": "fp8"}},
        "tip": {"parent": "leaf", "set": {"rope_format": "fp8"}},
    }
    config = replace(old.config, ladder=Ladder(rungs))
    for name, state in (("bottom", "pass"), ("leaf", "fail"), ("tip", "pass")):
        write_json(old.results / "gates" / f"{name}.json", {"id": name, "status": state})
    assert blocker(old.results, config, config.ladder["tip"]) == ("leaf", "fail")
    assert not published(old.results, config, config.ladder["tip"])


@pytest.mark.parametrize(
    "newer",
    ["metrics/B5_all.parquet", "variants/B5_all/chat.h5", "gates/B0_unfused.json", "gates/B4_head.json"],
)
def test_a_verdict_on_request_goes_when_something_below_it_is_renewed(old, newer):
    os.utime(old.results / newer)
    assert states(old)[REQUESTED] == "not_run"
    assert states(old)["B4_head"] == "pass"
    assert states(old, REQUESTED)[REQUESTED] == "pass"  # then it was asked for, and Snakemake renewed it


def test_a_verdict_on_request_goes_when_its_dumps_do_or_its_change_is_another(old):
    (old.results / "variants" / REQUESTED / "chat.h5").unlink()
    assert states(old)[REQUESTED] == "not_run"
    other = json.loads((old.results / "gates" / "B5_last_half.json").read_text())
    path = old.results / "gates" / "B5_last_half.json"
    time = path.stat().st_mtime
    write_json(path, other | {"change": {"residual": ["bf16", "fp32"]}})
    os.utime(path, (time, time))
    assert states(old)["B5_last_half"] == "not_run"
    assert states(old)["B5_first_half"] == "pass"


def test_measurements_of_what_is_not_shown_are_left_out_and_no_claim_rests_on_them(old, monkeypatch):
    old.references().variant("B0_unfused")
    frame, notes = old.measured("B0_unfused")
    for rung in old.config.ladder:
        write(old.results / "metrics" / f"{rung.id}.parquet", frame.assign(variant=rung.id), notes)
    write_json(old.results / "gates" / "P4.json", header(old.config.ladder["P4"]) | {"status": "fail"})
    monkeypatch.setattr(collect_module, "load", lambda path: old.config)
    monkeypatch.setattr("sys.argv", ["collect", "--results", str(old.results)])
    assert collect_main() == 0
    found = pd.read_parquet(old.results / "metrics.parquet")
    assert set(found["variant"]) == {"B0_unfused", "P4", "P4_scalar_gsa"}
    claims = {row["id"]: row for row in json.loads((old.results / "claims.json").read_text())}
    assert claims["rope_bf16"]["reason"] == "not measured in this run: B1, B1_rope_fp8"


def test_a_residual_is_judged_small_by_measurements_that_count(old):
    for rung in old.config.ladder:
        large = Notes(exercised={"one": {"residual_absmax": [9.0 if rung.id == "B0_unfused" else 300.0]}})
        write(old.results / "metrics" / f"{rung.id}.parquet", pd.DataFrame(columns=list(COLUMNS)), large)
    (old.results / "gates" / f"{REQUESTED}.json").unlink()
    assert judge(old.results, old.config)["verdict"] == "not_run"
    write_json(old.results / "gates" / "B0_unfused.json", {"id": "B0_unfused", "status": "fail"})
    assert judge(old.results, old.config)["verdict"] == "not_exercised"
