"""The plan's claims on audits that lack what they need."""

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
import yaml

from dsv4.judge import claims_measured, claims_timed
from dsv4.judge import collect as collect_module
from dsv4.judge.claims import FILE, judge_claims
from dsv4.judge.collect import main as collect_main
from dsv4.judge.conftest import EXERCISED
from dsv4.judge.evidence import Evidence
from dsv4.judge.gate import write_json
from dsv4.ladder import Ladder
from dsv4.stored import file_sha256, sidecar


def ladder_of(config, names=None, rename=""):
    """The shipped ladder: of these rungs, or with one of them under another name."""
    rungs = yaml.safe_load(config.path.read_text())["ladder"]
    rungs = {name: rung for name, rung in rungs.items() if names is None or name in names}
    other = lambda name: "Other" if name == rename else name  # noqa: E731
    changed = {
        other(name): rung
        | ({"parent": other(rung["parent"])} if "parent" in rung else {})
        | {"needs": [other(need) for need in rung.get("needs", ())]}
        for name, rung in rungs.items()
    }
    return replace(config, ladder=Ladder(changed))


def claims(audit, config=None):
    return {row["id"]: row for row in judge_claims(Evidence(audit.results, config or audit.config, "cpu"))}


SHIPPED = list(yaml.safe_load((FILE.parents[1] / "config.yaml").read_text())["ladder"])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_ladder_without_a_shipped_name_runs_no_claim_that_needs_it(audit, name):
    config = ladder_of(audit.config, rename=name)
    found = claims(audit, config)
    assert {row["state"] for row in found.values()} <= {"holds", "does_not", "not_run"}
    missing = [row["id"] for row in found.values() if row["reason"] == f"the ladder has no rung {name}"]
    assert ("p5_launches" in missing) == (name in ("B0_unfused", "P5", "P4"))
    assert all(found[id]["state"] == "not_run" and found[id]["measured"] is None for id in missing)


@pytest.mark.parametrize("fault", ["truncated", "sidecar", "schema", "no HDF5", "empty"])
def test_a_reference_that_cannot_be_read_is_a_reason(audit, fault):
    path = audit.results / "reference" / "one.h5"
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    if fault == "sidecar":
        sidecar(path).unlink()
    if fault == "schema":
        with h5py.File(path, "a") as file:
            file.attrs["schema"] = 7
        sidecar(path).write_text(file_sha256(path))
    if fault in ("no HDF5", "empty"):
        path.write_bytes(b"no HDF5" if fault == "no HDF5" else b"")
        sidecar(path).write_text(file_sha256(path))
    row = claims(audit)["mhc_non_expansive"]
    assert (row["state"], row["measured"]) == ("not_run", None)
    assert "reference/one.h5" in row["reason"]


def spoiled(tap, value, mode):
    """A variant whose tap holds one NaN or Inf, in one row of one layer."""

    def change(m, p, layer, spec, array):
        if (m, p, spec.name) != (mode, "decode", tap) or layer == 0:
            return array
        array = array.copy()
        array.reshape(-1)[5] = value
        return array

    return change


MEASURED = {  # claim -> the rung that it looks at, what stands below and beside it, tap and mode
    "rope_bf16": ("B1_rope_fp8", ("B0", "B1a", "B1"), "attn_out", "isolated"),
    "index_fp4": ("B2_fp4", ("B1",), "index_scores", "isolated"),
    "kv_fp4_compounds": ("KV_nvfp4", ("P5", "B0"), "logits", "compounded"),
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("claim", MEASURED)
def test_no_claim_is_drawn_from_nan(audit, claim, value):
    rung, below, tap, mode = MEASURED[claim]
    for name in below:
        audit.variant(name)
    audit.measured(below[-1])
    audit.variant(rung).measured(rung)
    assert "NaN" not in (claims(audit)[claim]["measured"] or claims(audit)[claim]["reason"])
    audit.variant(rung, spoiled(tap, value, mode)).measured(rung)
    row = claims(audit)[claim]
    assert (row["state"], row["measured"]) == ("not_run", None)
    assert row["reason"].startswith(f"{rung} has NaN or Inf there: 1 of ")


@pytest.mark.parametrize("claim", MEASURED)
def test_no_claim_is_drawn_from_dumps_that_were_refused(audit, claim):
    rung, below, *_ = MEASURED[claim]
    for name in below:
        audit.variant(name)
    audit.measured(below[-1])
    audit.variant(rung, checkpoint="d" * 8).measured(rung)
    assert rung in claims(audit)[claim]["reason"].removeprefix("not measured in this run: ").split(", ")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_combs_and_residuals_with_nan_hold_nothing(audit, value):
    spoil = spoiled("moe_comb", value, "compounded")
    truth = lambda m, p, layer, tap: spoil(m, p, layer, tap, audit.truth[p, layer, tap.name])  # noqa: E731
    audit.dump("reference", audit.attrs("reference"), truth, ("compounded",))
    peaks = EXERCISED | {"residual_absmax": [300.0, value]}
    audit.variant("B0_unfused", exercised=peaks).measured("B0_unfused")
    found = claims(audit)
    assert found["mhc_non_expansive"]["reason"] == "one.h5: decode/1/moe_comb holds NaN or Inf"
    assert (
        found["residual_magnitude"]["reason"] == "the residual of B0_unfused has NaN or Inf in its free run"
    )


def bench_file(name="NVIDIA B200", date="2026-12-24T10:00:00Z", fp8=4.0e15, whole=100.0, **head):
    """A results/bench.json of one run."""
    run = {
        "date": date,
        "device": {"name": name},
        "ceilings": {"matrix": 8192, "flops_per_s": {"bf16": 2e15}},
    }
    run["ceilings"]["flops_per_s"] |= {"fp8": fp8} if fp8 else {}
    times = {"B=8, top 512 of 32768 entries, 64 heads": whole, "top 512 of 8 x 32768": 20.0}
    rows = [
        {
            "op": "index_topk",
            "name": row,
            "run": "one",
            "paths": {"replaced": {"us": {"median": us}}} if us else {},
        }
        for row, us in times.items()
    ]
    return {"schema": 1, "runs": {"one": run | head}, "rows": rows}


def with_bench(audit, content):
    write_json(audit.results.parent / "bench.json", content)
    return claims(audit)


def test_every_number_names_the_device_that_it_was_measured_on(audit):
    for name in ("B0", "B1a", "B1", "B1_rope_fp8"):
        audit.variant(name)
    audit.measured("B1")
    audit.measured("B1_rope_fp8")
    write_json(audit.results.parent / "bench.json", bench_file())
    rows = judge_claims(Evidence(audit.results, audit.config, "NVIDIA H200 (9.0)"))
    found = {row["id"]: row["device"] for row in rows}
    for name in ("p5_cos_unfused", "p5_cos_true", "p5_gsa", "p4_scalar_gsa", "kv_fp4_round_trip"):
        assert found[name] == "cpu, claims_ops.json"
    for name in ("p5_launches", "q_a_launches", "gather_bytes", "no_e5m2", "fp8_share"):
        assert found[name] == "counted, on no device"
    assert found["rope_bf16"] == "NVIDIA H200 (9.0)"
    assert found["mhc_non_expansive"] == "cpu"  # the made-up reference's
    assert found["fp8_rate"] == found["index_share"] == "NVIDIA B200, 2026-12-24"
    assert all((row["device"] is None) == (row["state"] == "not_run") for row in rows)


@pytest.mark.parametrize(("fp8", "state"), [(4.0e15, "holds"), (3.0e15, "does_not"), (None, "not_run")])
def test_rates_are_those_of_the_benchmark(audit, fp8, state):
    row = with_bench(audit, bench_file(fp8=fp8))["fp8_rate"]
    assert row["state"] == state
    assert "NVIDIA B200, 2026-12-24" in (row["device"] or row["reason"])


@pytest.mark.parametrize(("whole", "state"), [(100.0, "holds"), (30.0, "does_not"), (None, "not_run")])
def test_the_einsums_share_is_what_the_choice_leaves(audit, whole, state):
    row = with_bench(audit, bench_file(whole=whole))["index_share"]
    assert row["state"] == state
    if whole:
        assert f"{1 - 20 / whole:.0%} at 8 x 32768 entries" in row["measured"]


@pytest.mark.parametrize("content", ["not there", "no JSON", "no device", "no runs"])
def test_without_a_benchmark_of_its_own_the_published_one_counts(audit, content, monkeypatch, tmp_path):
    path = audit.results.parent / "bench.json"
    if content == "no JSON":
        path.write_text("{")
    elif content != "not there":
        write_json(path, bench_file(device=None) if content == "no device" else {"runs": {}, "rows": []})
    assert claims(audit)["fp8_rate"]["device"].startswith("NVIDIA H200, 2026-")
    monkeypatch.setattr(claims_timed, "PUBLISHED", tmp_path / "none.json")
    for name in ("fp8_rate", "index_share"):
        row = claims(audit)[name]
        assert (row["state"], row["device"], row["reason"]) == ("not_run", None, claims_timed.NO_BENCH)


@pytest.mark.parametrize(("scale", "state"), [(1.0, "does_not"), (3.0, "holds")])
def test_at_the_plans_depth_the_claim_about_kv_is_decided(audit, monkeypatch, scale, state):
    monkeypatch.setattr(claims_measured, "DEPTH", 8)
    audit.variant("P5").variant("B0").measured("B0")
    worse = lambda m, p, layer, tap, x: x[:, ::-1].copy() * scale if tap.name == "logits" and scale > 1 else x  # noqa: E731
    audit.variant("KV_nvfp4", worse).measured("KV_nvfp4")
    assert claims(audit)["kv_fp4_compounds"]["state"] == state


def test_an_audit_of_one_rung_is_collected(audit, monkeypatch):
    config = ladder_of(audit.config, ["B0_unfused"])
    audit.variant("B0_unfused").measured("B0_unfused")
    monkeypatch.setattr(collect_module, "load", lambda path: config)
    monkeypatch.setattr("sys.argv", ["collect", "--results", str(audit.results)])
    assert collect_main() == 0
    assert [row["id"] for row in json.loads((audit.results / "gates.json").read_text())["variants"]] == [
        "B0_unfused"
    ]
    found = json.loads((audit.results / "claims.json").read_text())
    assert next(row for row in found if row["id"] == "fp8_share")["reason"] == "the ladder has no rung B0"
