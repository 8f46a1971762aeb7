"""Commits in the configuration: rungs that name one, and which branch is judged."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.commits import history
from dsv4.commits.branch import default_rung
from dsv4.commits.rung import write_commit_variant
from dsv4.config import ConfigError, load, with_options
from dsv4.dump import DumpReader
from dsv4.judge.claims_by_field import claimed
from dsv4.judge.measure import measure
from dsv4.ladder import Ladder, LadderError
from dsv4.plan import flatten
from dsv4.run.aba import confirm
from dsv4.run.setup import prepare
from dsv4.run.variant import write_variant
from dsv4.taps import STAGES

ROOT = Path(__file__).resolve().parents[2]
BOTTOM = {"set": {"norm_quant": "fused"}}


def test_a_rung_may_name_a_commit_and_what_stands_on_it_runs_it_too():
    ladder = Ladder(
        {
            "A": BOTTOM,
            "B": {"parent": "A", "commit": "my-branch"},
            "C": {"parent": "B", "set": {"mhc_quant": "fused"}},
            "D": {"parent": "C", "set": {"q_a_norm": "fused"}, "commit": "my-branch~1"},
        }
    )
    assert [rung.commit for rung in ladder] == [None, "my-branch", "my-branch", "my-branch~1"]
    changes = [dict(rung.change) for rung in ladder]
    assert changes[1] == {"commit": ("own model", "my-branch")}
    assert changes[2:] == [{"mhc_quant": ("unfused", "fused")}, {"q_a_norm": ("unfused", "fused")}]
    assert claimed(["commit"]) == set(STAGES)
    assert ladder["B"].plan == ladder["A"].plan


@pytest.mark.parametrize(
    ("rung", "says"),
    [
        (
            {"parent": "A", "commit": "x", "set": {"mhc_quant": "fused", "q_a_norm": "fused"}},
            "changes mhc_quant",
        ),
        ({"parent": "A", "commit": "x", "engine": "e"}, "not on both"),
        ({"parent": "A"}, "changes nothing against A"),
    ],
)
def test_what_a_rung_with_a_commit_may_not_be(rung, says):
    with pytest.raises(LadderError, match=says):
        Ladder({"A": BOTTOM, "B": rung}, ["e"])


def test_options_of_the_command_line_go_before_the_file():
    config = load(ROOT / "config.yaml")
    assert default_rung(config) == "B4_head"  # the topmost of the spine that is not on request
    found = with_options(
        config, {"base": "main", "head": 12345678, "rung": "B1", "repo": "/r", "tap": "topk"}
    )
    assert (found.commits.head, found.commits.repo) == ("12345678", Path("/r"))
    assert default_rung(found) == "B1"
    assert found.commits.words == ["--base", "main", "--head", "12345678", "--repo", "/r", "--rung", "B1"]
    assert config.commits.words == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 1}, "--config seed: is not read"),
        ({"rung": "B9"}, "--config rung=B9: no such rung"),
        ({"head": 12e5}, "--config head=1200000.0: Snakemake read a number;"),
    ],
)
def test_other_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        with_options(load(ROOT / "config.yaml"), options)


@pytest.mark.xdist_group("commits")
def test_a_rung_runs_its_commits_own_code_and_is_reverted_and_applied_again(small):
    rungs = {
        "P4": BOTTOM,
        "Mine": {"parent": "P4", "commit": "main~4"},
        "Crash": {"parent": "P4", "commit": "main"},
    }
    setup = prepare(small.config.path, small.results)
    setup = replace(setup, config=replace(small.config, ladder=Ladder(rungs)))
    assert history.resolve(small.repository.folder, "main~4") == small.shas["good"]
    for rung in ("Mine", "Crash"):
        write_commit_variant(setup, setup.config.ladder[rung])
    with DumpReader(small.results / "variants/Mine/one.h5", {"variant": "Mine", "kind": "variant"}) as dump:
        assert (dump.attrs["commit"], dump.attrs["dirty"]) == (small.shas["good"], False)
        assert dump.attrs["plan"] == flatten(setup.config.ladder["P4"].plan)
    with DumpReader(small.results / "variants/Crash/two.h5", {"variant": "Crash"}) as dump:
        assert dump.attrs["error"].startswith("main does not run: ImportError: cannot import name 'Fp5Key'")
    frame, notes = measure(small.results, setup.config.ladder, "Crash", ["one", "two"])
    assert (len(frame), notes.error[:17]) == (0, "main does not run")
    write_variant(setup, setup.config.ladder["P4"])
    found = confirm(setup, "Mine", "one", 0, "router_scores")
    assert found["confirmed"], found
    assert found["distance"][0] != found["distance"][1]  # the commit's own code ran, and the audit's
