import json

import numpy as np
import pytest

from dsv4.config import ConfigError
from dsv4.judge import gate as gate_module
from dsv4.judge.conftest import EXERCISED, RATIOS
from dsv4.judge.gate import confirm_by_aba, gate, main, write_json
from dsv4.judge.limits import LimitError
from dsv4.ladder import LadderError, State
from dsv4.taps import layer_taps


def at(tap, layer=1, mode=None, phase=None):
    """A fault's place: only this tap's arrays are handed to it."""

    def wrap(fault):
        def change(m, p, where, spec, array):
            here = spec.name == tap and where == layer and mode in (None, m) and phase in (None, p)
            return fault(array.copy()) if here else array

        return change

    return wrap


def put(index, value):
    def fault(array):
        array[index] = value
        return array

    return fault


def judged(audit, name="B0_unfused", change=None, **options):
    audit.variant(name, change, **options).measured(name)
    return gate(audit.results, audit.config, name)


def passing(audit, name):
    """Pretend that a rung and all that it stands on were judged and passed."""
    for rung in audit.config.ladder.lineage(name):
        write_json(audit.results / "gates" / f"{rung.id}.json", {"id": rung.id, "status": "pass"})


def test_a_correct_bottom_rung_passes(audit):
    verdict = judged(audit)
    assert verdict["status"] == State.PASS, verdict["reasons"]
    assert verdict["fidelity"] == "bit_equal"
    assert verdict["culprit"] is None
    counts = verdict["taps_by_mode"]
    assert verdict["taps"] == [sum(pair) for pair in zip(*counts.values(), strict=True)]
    every = sum(len(layer_taps(ratio)) for ratio in RATIOS) + 2
    free = sum(len(layer_taps(ratio, "compounded")) for ratio in RATIOS) + 2
    assert counts == {"isolated": [every, every], "compounded": [free, every]}
    assert verdict["reasons"][0].endswith("within its noise")
    assert verdict["cos"]["per_layer"] == pytest.approx([1, 1], abs=1e-5)
    assert verdict["cos"]["worst"]["tap"] == "attn_out"
    assert verdict["e2e"]["top1"] == 1.0
    assert verdict["cost"]["note"] == "time: not measured on this device"
    assert json.loads(json.dumps(verdict))["status"] == "pass"


@pytest.mark.parametrize(
    ("fault", "tap", "says"),
    [
        pytest.param(lambda x: x * np.float32(1.05), "moe_in", "gain 1.050", id="gain x1.05"),
        pytest.param(lambda x: x * np.float32(0.72), "attn_out", "gain 0.720", id="gain x0.72"),
        pytest.param(lambda x: -x, "routed", "gain -1.000", id="sign flip"),
        pytest.param(np.zeros_like, "attn_proj", "relative L2 1", id="zeros"),
        pytest.param(
            lambda x: np.roll(x, 1, axis=0), "kv", "99.9% of elements changed", id="rows shifted by one"
        ),
        pytest.param(put((slice(None), 1), 0.0), "q", "50.0% of elements changed", id="one bad head"),
        pytest.param(put(3, 0.25), "shared", "relative L2", id="one bad row"),
        pytest.param(lambda x: np.swapaxes(x, 1, 2), "attn_comb", "relative L2", id="comb transposed"),
        pytest.param(put((2, 5), np.nan), "qr", "1 NaN or Inf, first at one, prefill, token 22", id="NaN"),
        pytest.param(lambda x: x + np.float32(0.5), "lse", "off by up to 0.5", id="sink dropped"),
        pytest.param(np.abs, "index_scores", "NaN or Inf", id="no ReLU"),
        pytest.param(
            lambda x: np.roll(x, 8, axis=1),
            "kv_bytes",
            "scale stored is not the scale applied",
            id="scales rolled",
        ),
    ],
)
def test_a_planted_fault_is_caught_and_placed(audit, fault, tap, says):
    verdict = judged(audit, change=at(tap, mode="isolated")(fault))
    assert verdict["status"] == State.FAIL
    assert (verdict["culprit"]["layer"], verdict["culprit"]["tap"]) == (1, tap)
    assert verdict["reasons"][0].startswith(f"layer 1, {tap} (")
    assert any(says in reason for reason in verdict["reasons"]), verdict["reasons"]


def test_the_first_op_is_named_however_many_follow(audit):
    def many(mode, phase, layer, tap, array):
        late = layer == 1 or tap.stage in ("experts", "moe_sum", "moe_mix")
        return array * np.float32(1.1) if late and tap.kind == "value" and mode == "isolated" else array

    culprit = judged(audit, change=many)["culprit"]
    assert (culprit["layer"], culprit["stage"], culprit["tap"]) == (0, "experts", "routed")


@pytest.mark.parametrize(
    ("ids", "says"),
    [([0, 0], "8 ids chosen twice"), ([0, 99], "8 invalid ids"), ([0, -1], "8 invalid ids")],
    ids=["duplicate", "out of range", "left empty"],
)
def test_bad_choices_are_caught(audit, ids, says):
    fault = at("expert_ids", mode="isolated", phase="decode")(
        lambda x: np.broadcast_to(np.int32(ids), x.shape).copy()
    )
    verdict = judged(audit, change=fault)
    assert verdict["culprit"]["tap"] == "expert_ids"
    assert any(says in reason for reason in verdict["reasons"])


def test_valid_ids_that_are_not_the_plans_are_caught(audit):
    fault = at("expert_ids", mode="isolated", phase="decode")(lambda x: (x + 1) % 8)
    verdict = judged(audit, change=fault)
    assert (verdict["culprit"]["layer"], verdict["culprit"]["tap"]) == (1, "expert_ids")
    assert verdict["reasons"][0].startswith("layer 1, expert_ids (route) is not what the plan computes")


def test_a_missing_tap_fails_unless_declared(audit):
    leave = lambda m, p, layer, tap, x: None if tap.name == "lse" and layer == 1 else x  # noqa: E731
    verdict = judged(audit, change=leave)
    assert verdict["status"] == State.FAIL
    assert "layer 1, lse (attend) was not dumped" in verdict["reasons"][0]
    verdict = judged(audit, change=leave, declared_missing=["lse"])
    assert verdict["status"] == State.PASS
    every = verdict["taps_by_mode"]["isolated"][1]
    assert verdict["taps_by_mode"]["isolated"] == [every - 1, every]


def test_logits_shifted_by_one_label_fail_in_the_free_run(audit):
    fault = at("logits", layer="model", mode="compounded")(lambda x: np.roll(x, 1, axis=0))
    verdict = judged(audit, change=fault)
    assert verdict["status"] == State.FAIL
    assert verdict["culprit"] == {
        **{"layer": "model", "stage": "lm_head", "tap": "logits", "kind": "limit", "mode": "compounded"},
        **{key: verdict["culprit"][key] for key in ("prompt", "step", "row")},
    }
    assert "kl_nats" in verdict["reasons"][0]


def test_a_dump_that_is_refused_cannot_be_measured(audit):
    verdict = judged(audit, checkpoint="d" * 8)
    assert verdict["status"] == State.CANNOT_MEASURE
    assert "checkpoint is 'dddddddd', expected 'cccccccc'" in verdict["reasons"][0]


def test_without_a_floor_fidelity_cannot_be_judged(audit):
    verdict = judged(audit, floor=False)
    assert verdict["status"] == State.CANNOT_MEASURE
    assert "no noise floor" in verdict["reasons"][0]


def test_blocked_by_the_nearest_spine_rung(audit):
    write_json(audit.results / "gates" / "B0.json", {"id": "B0", "status": "fail"})
    verdict = gate(audit.results, audit.config, "B1a")
    assert verdict["status"] == State.BLOCKED
    assert verdict["reasons"] == ["blocked: it stands on B0, which is fail"]
    assert gate(audit.results, audit.config, "KV_nvfp4")["status"] == State.BLOCKED


def test_without_measurements_it_was_not_run(audit):
    passing(audit, "B0")
    verdict = gate(audit.results, audit.config, "B1a")
    assert verdict["status"] == State.NOT_RUN
    assert "run snakemake B1a" in verdict["reasons"][0]


def test_bit_equal_says_so(audit):
    passing(audit, "B0")
    audit.variant("B0")
    verdict = judged(audit, "B1a")
    assert verdict["status"] == State.PASS
    assert verdict["reasons"] == ["bit-equal to B0: no stored code or value changes"]
    assert verdict["vs_parent"]["taps_changed"] == 0


def test_a_change_that_moves_nothing_is_a_silent_fallback(audit):
    passing(audit, "B1a")
    audit.variant("B1a")
    verdict = judged(audit, "B1")
    assert verdict["status"] == State.FAIL
    assert "silent fallback: q_format changed" in verdict["reasons"][0]


def test_blast_radius(audit):
    passing(audit, "B1a")
    audit.variant("B1a")
    claimed = lambda m, p, layer, tap, x: x * np.float32(1 + 2**-7) if tap.name == "attn_out" else x  # noqa: E731
    audit.floor("B1", claimed)
    verdict = judged(audit, "B1", claimed, floor=False)
    assert verdict["status"] == State.PASS, verdict["reasons"]
    assert verdict["blast_radius"] == {"ok": True, "changed": []}

    def beyond(m, p, layer, tap, x):
        moved = tap.name == "streams_mid" and layer == 1
        return claimed(m, p, layer, tap, np.nextafter(x, np.float32(9)) if moved else x)

    verdict = judged(audit, "B1", beyond, floor=False)
    assert verdict["status"] == State.FAIL
    assert any(
        reason.startswith("blast radius: layer 1, streams_mid (attn_mix)") for reason in verdict["reasons"]
    )
    assert verdict["blast_radius"] == {"ok": False, "changed": ["layer 1 streams_mid"]}


def test_what_no_prompt_reached_is_listed_and_on_the_own_path_it_decides(audit):
    less = EXERCISED | {"batch": 1, "csa_rows_over_topk": 0}
    verdict = judged(audit, exercised=less)
    assert verdict["status"] == State.PASS
    assert any(line.startswith("batch: one sequence at a time") for line in verdict["not_exercised"])
    passing(audit, "B1")
    audit.variant("B1")
    moved = lambda m, p, layer, tap, x: x * np.float32(1.001) if tap.name == "index_scores" else x  # noqa: E731
    audit.floor("B2", moved)
    verdict = judged(audit, "B2", moved, floor=False, exercised=less)
    assert verdict["status"] == State.CANNOT_MEASURE
    assert "index_score: top-k" in verdict["reasons"][0]


def test_a_tightened_limit_fails_what_passed(audit, monkeypatch):
    assert judged(audit)["status"] == State.PASS
    object.__setattr__(audit.config, "tighten", {"attn_in.rel_l2.trained": 1e-4})
    verdict = gate(audit.results, audit.config, "B0_unfused")
    assert verdict["status"] == State.FAIL
    assert "attn_in.rel_l2.trained" in verdict["reasons"][0]
    object.__setattr__(audit.config, "tighten", {"attn_in.rel_l2.trained": 1.0})
    with pytest.raises(LimitError, match="looser than at most"):
        gate(audit.results, audit.config, "B0_unfused")


def test_an_unknown_variant_is_named(audit):
    with pytest.raises(LadderError, match="unknown variant 'B9'"):
        gate(audit.results, audit.config, "B9")


class TestConfirmation:
    """Repeat, revert, re-apply happens in a process of its own and may be missing."""

    @pytest.fixture
    def failing(self, audit):
        passing(audit, "B0_unfused")
        audit.variant("B0_unfused")
        return audit.variant("P4", at("moe_in", mode="isolated")(lambda x: x * 2))

    def confirm(self, audit, monkeypatch, out, code=0, name="P4"):
        calls = []

        def run(command, **_):
            calls.append(command)
            return type("Done", (), {"stdout": out, "stderr": "Traceback\nBoom: x", "returncode": code})

        monkeypatch.setattr(gate_module.subprocess, "run", run)
        audit.measured(name)
        confirm = confirm_by_aba(audit.results, audit.config, name)
        return gate(audit.results, audit.config, name, confirm), calls

    def test_its_result_is_in_the_verdict(self, failing, monkeypatch):
        verdict, calls = self.confirm(
            failing, monkeypatch, 'log\n{"repeat": true, "revert": true, "reapply": true}\n'
        )
        assert verdict["confirmed"] == {"repeat": True, "revert": True, "reapply": True}
        assert calls[0][-8:] == [
            "--variant",
            "P4",
            "--layer",
            "1",
            "--tap",
            "moe_in",
            "--prompt",
            "one",
        ]

    def test_a_crash_is_said(self, failing, monkeypatch):
        verdict, _ = self.confirm(failing, monkeypatch, "", 1)
        assert verdict["confirmed"] is None
        assert verdict["reasons"][-1].endswith("dsv4.run.aba exited 1: Boom: x")

    def test_the_bottom_of_the_ladder_has_nothing_to_revert_to(self, audit, monkeypatch):
        audit.variant("B0_unfused", at("moe_in", mode="isolated")(lambda x: x * 2))
        verdict, calls = self.confirm(audit, monkeypatch, "", name="B0_unfused")
        assert (verdict["status"], verdict["confirmed"], calls) == (State.FAIL, None, [])
        assert verdict["reasons"][-1].endswith(
            "B0_unfused is the bottom of the ladder, there is nothing to revert to"
        )

    def test_nothing_is_confirmed_where_no_op_stands_out(self, audit, monkeypatch):
        audit.variant("B0_unfused").variant(
            "P4", at("logits", layer="model", mode="compounded")(lambda x: np.roll(x, 1, axis=0))
        )
        verdict, calls = self.confirm(audit, monkeypatch, "")
        assert calls == []
        assert "no single op" in verdict["reasons"][-1]


def test_command_line(audit, tmp_path, monkeypatch, capsys):
    audit.variant("B0_unfused").measured("B0_unfused")
    monkeypatch.setattr(gate_module, "load", lambda path: audit.config)
    monkeypatch.setattr("sys.argv", ["gate", "--results", str(audit.results), "--variant", "B0_unfused"])
    assert main() == 0
    assert json.loads((audit.results / "gates" / "B0_unfused.json").read_text())["status"] == "pass"
    assert "B0_unfused: pass" in capsys.readouterr().err

    def refuse(path):
        raise ConfigError("config.yaml: ladder.x: unknown")

    monkeypatch.setattr(gate_module, "load", refuse)
    assert main() == 1
    assert "error: config.yaml: ladder.x: unknown" in capsys.readouterr().err
