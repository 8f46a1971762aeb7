"""A foreign reference agrees with ours, differs, or says nothing; and the last rule listens to it."""

import json

import numpy as np
import pytest

from dsv4.commits import audit, history
from dsv4.commits.enforce import main as enforce_commits
from dsv4.config import ConfigError
from dsv4.engine import job
from dsv4.engine.conftest import CPP_MISSING, ROOT, STORES
from dsv4.engine.cross_check import cross_check
from dsv4.engine.spec import ONE_BF16, EngineError, parse_reference
from dsv4.engine.test_answer import MISSING, at, echo, rewrite
from dsv4.engine.test_spec import configured
from dsv4.files import write_json
from dsv4.judge.enforce import main as enforce
from dsv4.judge.reference_check import FILE, Verdict, read_check

pytestmark = pytest.mark.xdist_group("engine")

OURS = [name for name in MISSING if name not in (*STORES, "comp_store", "comp_bytes", "index_k_store")]


def checked(setup, change=None, missing=OURS, **more):
    foreign = parse_reference({"command": ["echo"], "missing": missing} | more)
    return cross_check(setup, foreign, lambda engine, job: echo(job, 0, change))


def test_our_own_values_agree_to_the_bit(tiny):
    found = checked(tiny)
    assert found["verdict"] == Verdict.AGREES
    assert {line["rel_l2"] for line in found["taps"]} == {0.0}
    assert {line["layer"] for line in found["taps"]} == {0, 1, 2, 3, "model"}
    assert found["text"].startswith("reference: ours (trained); the foreign one agrees at ")


@pytest.mark.parametrize(
    ("gain", "verdict"), [(1 + ONE_BF16 / 2, Verdict.AGREES), (1 + 2 * ONE_BF16, Verdict.DIFFERS)]
)
def test_the_bound_decides_and_names_the_first_op(tiny, gain, verdict):
    found = checked(tiny, at(2, "attn_proj", lambda x: x * np.float32(gain)))
    assert found["verdict"] == verdict
    assert "layer 2, attn_proj (attn_proj): relative L2 " in found["text"]


def test_other_choices_are_shown_and_values_that_are_not_finite_differ(tiny):
    found = checked(tiny, at(1, "expert_ids", lambda ids: (ids + 1) % 8))
    assert found["verdict"] == Verdict.AGREES
    (line,) = (line for line in found["taps"] if (line["layer"], line["tap"]) == (1, "expert_ids"))
    assert line["rel_l2"] == 1.0
    found = checked(tiny, at(0, "q", lambda q: q * np.float32(np.nan)))
    assert found["verdict"] == Verdict.DIFFERS
    assert "layer 0, q (q_b): not finite in the same places" in found["text"]


def test_what_it_does_not_give_must_be_declared(tiny):
    def drop(layer, taps):
        if layer == 3:
            del taps["lse"]

    found = checked(tiny, drop)
    assert found["verdict"] == Verdict.CANNOT_MEASURE
    assert "did not give isolated/one/3/lse, isolated/two/3/lse and 2 taps in all" in found["text"]
    assert (
        checked(tiny, drop, missing=[*OURS, "lse"])["verdict"] == Verdict.CANNOT_MEASURE
    )  # given in other layers
    assert checked(tiny, drop, missing=[*OURS, "*/3/lse"])["verdict"] == Verdict.AGREES


@pytest.mark.parametrize("fault", ["", "sink"])
def test_a_compiled_layer_is_compared_with_plain(tiny, window_layer, fault):
    missing = [name for name in CPP_MISSING if name not in STORES]
    command = [str(window_layer), *(["--fault", fault] if fault else [])]
    found = cross_check(tiny, parse_reference({"command": command, "missing": missing, "of": "plain"}))
    assert found["verdict"] == (Verdict.DIFFERS if fault else Verdict.AGREES)
    assert found["device"] == "cpu, double, compiled loops"
    if fault:
        assert "first in layer 0, attn_out (attend): relative L2 0." in found["text"]
    else:
        assert max(line["rel_l2"] for line in found["taps"]) < 1e-5


def test_a_finished_dump_is_compared_and_that_of_another_job_is_not(tiny, tmp_path, monkeypatch):
    """The job is written by the command, answered elsewhere, and comes back as a folder."""
    monkeypatch.setattr(job, "prepare", lambda config, results: tiny)
    monkeypatch.chdir(ROOT)
    words = ["--config", "config.yaml", "--results", str(tiny.results), "--out", str(tmp_path / "job")]
    job.main([*words, "--variant", "reference"])
    echo(tmp_path / "job")
    given = parse_reference({"dump": str(tmp_path / "job"), "missing": OURS})
    assert cross_check(tiny, given)["verdict"] == Verdict.AGREES
    rewrite(job="of another reference")(tmp_path / "job/out/rank0")
    found = cross_check(tiny, given)
    assert found["verdict"] == Verdict.CANNOT_MEASURE
    assert "the dump answers another job: run it again" in found["text"]


def test_one_that_crashes_says_nothing(tiny):
    found = cross_check(tiny, parse_reference({"command": ["false"]}))
    assert found["verdict"] == Verdict.CANNOT_MEASURE
    assert "engine reference ended with exit status 1" in found["text"]


def test_the_bound_may_only_be_tightened(tmp_path):
    assert parse_reference({"command": ["x"], "bound": 1e-5}).bound == 1e-5
    with pytest.raises(EngineError, match=r"bound = 0\.01 is looser than 0\.00390625"):
        parse_reference({"command": ["x"], "bound": 0.01})
    with pytest.raises(ConfigError, match="reference: give either `command`"):
        configured(tmp_path, {"mine": {"command": ["x"]}}, {"engine": "mine"}, reference={"of": "plain"})


@pytest.mark.parametrize("verdict", [None, *Verdict])
def test_an_audit_whose_reference_is_in_doubt_fails(tmp_path, capsys, verdict):
    gates = {"variants": [{"id": "B0", "spine": True, "status": "pass"}]}
    check = {"verdict": verdict, "text": "reference: ours; it differs"}
    (tmp_path / "gates.json").write_text(json.dumps(gates | {"reference": check}))
    sound = verdict in (None, Verdict.AGREES)
    assert enforce(["--results", str(tmp_path)]) == (0 if sound else 1)
    assert ("failed: reference: ours; it differs" in capsys.readouterr().err) == (not sound)


@pytest.mark.parametrize("verdict", [None, *Verdict])
def test_commits_whose_reference_is_in_doubt_fail(tmp_path, capsys, verdict):
    check = {"verdict": verdict, "text": "reference: ours; it differs"}
    commits = [{"id": "a", "subject": "One", "status": "pass", "reasons": [""]}]
    (tmp_path / "commits.json").write_text(json.dumps({"commits": commits, "reference": check}))
    (tmp_path / "commits.ok").touch()
    sound = verdict in (None, Verdict.AGREES)
    assert enforce_commits(["--results", str(tmp_path)]) == (0 if sound else 1)
    assert ("failed: reference: ours; it differs" in capsys.readouterr().err) == (not sound)
    assert (tmp_path / "commits.ok").exists() == sound


def test_verdicts_of_commits_are_collected_with_what_was_said_of_the_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "verdict", lambda *_: {"status": "pass"})
    monkeypatch.setattr(history, "fork_point", lambda *_: "a" * 40)
    monkeypatch.setattr(history, "commits", lambda *_: [])
    config = configured(tmp_path, {}, {"set": {"norm_quant": "fused"}}, reference={"command": ["x"]})
    check = {"of": "trained", "verdict": "differs", "text": "it differs", "bound": 0.1, "missing": []}
    assert audit.collect(tmp_path, config, "main", "head")["reference"]["verdict"] == Verdict.CANNOT_MEASURE
    write_json(tmp_path / FILE, check | {"taps": []})
    assert audit.collect(tmp_path, config, "main", "head")["reference"] == check


def test_a_verdict_says_whose_reference_it_stands_on(tiny, tmp_path):
    assert read_check(tmp_path, asked=False)["text"] == "reference: ours; no other was given"
    assert read_check(tmp_path, asked=True)["verdict"] == Verdict.CANNOT_MEASURE
    found = checked(tiny)
    write_json(tmp_path / FILE, found)
    assert read_check(tmp_path, asked=True) == {
        name: found[name] for name in ("of", "verdict", "text", "bound", "missing")
    }
