import json
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256

import pandas as pd
import pytest
import yaml

from dsv4.identity import git_state
from dsv4.judge import collect as collect_module
from dsv4.judge.claims import CHECKS, FILE, judge_claims
from dsv4.judge.claims_by_field import CLAIMS, NEEDS, WORDS, claimed
from dsv4.judge.collect import collect
from dsv4.judge.collect import main as collect_main
from dsv4.judge.enforce import culprits
from dsv4.judge.enforce import main as enforce_main
from dsv4.judge.evidence import Evidence
from dsv4.judge.gate import gate, write_json
from dsv4.judge.launches import (
    FLASH,
    PRO,
    Sizes,
    cache_bytes,
    index_key_bytes,
    key_bytes,
    launches,
    record_bytes,
    step_bytes,
)
from dsv4.judge.residual import judge
from dsv4.ladder import State
from dsv4.plan import Plan, change, choices, flatten
from dsv4.taps import STAGES

PLAN = flatten(Plan())


def plan(**values):
    return flatten(change(Plan(), values))


def sized(layers):
    return Sizes(**{**vars(FLASH), "compress_ratios": (0,) * layers})


class TestLaunches:
    @pytest.mark.parametrize(("layers", "saved"), [(61, 610), (43, 430), (8, 80)])
    def test_the_fused_mhc_saves_five_a_site(self, layers, saved):
        fused = plan(norm_quant="fused", mhc_quant="fused")
        before, after = (sum(launches(p, sized(layers)).values()) for p in (PLAN, fused))
        assert before - after == saved

    def test_every_cast_site_is_a_launch_less(self):
        total = sum(launches(PLAN, FLASH).values())
        for name in ("router", "swiglu", "attn_out", "head"):
            assert sum(launches(plan(**{f"casts.{name}": "native"}), FLASH).values()) < total

    def test_the_plans_own_bytes_a_key(self):
        assert key_bytes(PLAN, 512) == {"read": 584, "written": 1024, "read_again": 1024}
        assert sum(key_bytes(plan(kv_read="in_place"), 512).values()) == 584

    @pytest.mark.parametrize(
        ("values", "size"),
        [({}, 584), ({"kv_record": "aligned"}, 580), ({"kv_format": "nvfp4"}, 224 + 128 + 28 + 4)],
    )
    def test_record_sizes(self, values, size):
        assert record_bytes(plan(**values), 512) == size

    def test_index_keys(self):
        assert index_key_bytes(PLAN, 128) == 132
        assert index_key_bytes(plan(index_score="fp4"), 128) == 68

    def test_bytes_grow_with_context_and_stop_at_top_k(self):
        short, long = (step_bytes(PLAN, FLASH, context) for context in (1024, 65536))
        assert long["index_keys"] == 64 * short["index_keys"]
        assert long["residual"] == short["residual"]
        csa = Sizes(**{**vars(FLASH), "compress_ratios": (4,)})
        assert step_bytes(PLAN, csa, 1 << 20)["keys"] == (128 + 512) * 2632

    @pytest.mark.parametrize(("sizes", "layers"), [(FLASH, 43), (PRO, 61)])
    def test_an_fp32_residual_adds_a_bf16_one_in_its_layers(self, sizes, layers):
        narrow, wide = (step_bytes(plan(residual=value), sizes, 1)["residual"] for value in ("bf16", "fp32"))
        a_layer = 2 * 2 * sizes.hc_mult * sizes.hidden_size * 2  # two sites, read and written, BF16
        assert (narrow, wide) == (layers * a_layer, 2 * layers * a_layer)
        added = {"fp32_first_half": layers // 2, "fp32_last_half": layers - layers // 2, "fp32_last": 1}
        for value, count in added.items():
            assert step_bytes(plan(residual=value), sizes, 1)["residual"] == narrow + count * a_layer

    def test_cache_of_one_window_layer(self):
        assert cache_bytes(PLAN, Sizes(**{**vars(FLASH), "compress_ratios": (0,)}), 4096) == 128 * 584


class TestClaimTable:
    def test_every_field_of_the_plan_is_in_it(self):
        assert set(CLAIMS) == set(choices())
        assert {stage for stages in CLAIMS.values() for stage in stages} <= set(STAGES)
        assert set(NEEDS) <= set(CLAIMS)
        assert {name for needs in NEEDS.values() for name in needs} <= set(WORDS)

    def test_readers_of_stored_forms_are_claimed_too(self):
        assert claimed(["norm_quant"]) >= {"q_a", "kv", "experts", "shared"}
        assert claimed(["kv_norm"]) == {"kv", "kv_store", "attend"}
        assert claimed([]) == frozenset()


class TestCollect:
    @pytest.fixture
    def judged(self, audit):
        audit.variant("B0_unfused").measured("B0_unfused")
        write_json(
            audit.results / "gates" / "B0_unfused.json", gate(audit.results, audit.config, "B0_unfused")
        )
        return audit

    def test_unjudged_rungs_have_a_state_and_a_reason(self, judged):
        states = {verdict["id"]: verdict for verdict in collect(judged.results, judged.config)["variants"]}
        assert list(states) == [rung.id for rung in judged.config.ladder]
        assert states["B0_unfused"]["status"] == "pass"
        assert states["P4"]["status"] == "not_run"
        assert states["P5"]["reasons"] == ["waits for P4, which was not run"]
        assert states["B5_all"]["reasons"] == ["on request: snakemake B5_all"]

    def test_a_failed_rung_blocks_what_stands_on_it(self, judged):
        write_json(judged.results / "gates" / "P4.json", {"id": "P4", "status": "fail", "spine": True})
        states = {verdict["id"]: verdict for verdict in collect(judged.results, judged.config)["variants"]}
        assert states["P5"]["status"] == "blocked"
        assert states["P5"]["reasons"] == ["blocked: it stands on P4, which is fail"]

    @pytest.mark.parametrize("state", ["fail", "cannot_measure"])
    def test_every_rung_above_it_names_the_rung_that_did_not_hold(self, judged, state):
        write_json(judged.results / "gates" / "P4.json", {"id": "P4", "status": state, "spine": True})
        blocked = {"id": "B0", "status": "blocked", "spine": True}  # of an earlier run
        write_json(judged.results / "gates" / "B0.json", blocked)
        ladder = judged.config.ladder
        above = [rung for rung in ladder if rung.id != "P4" and ladder["P4"] in ladder.lineage(rung.id)]
        found = {verdict["id"]: verdict for verdict in collect(judged.results, judged.config)["variants"]}
        assert len([rung for rung in above if rung.spine]) > 5
        for rung in above:
            if rung.spine and rung.id != "B0":
                assert found[rung.id]["status"] == "blocked", rung.id
                assert found[rung.id]["reasons"] == [
                    f"blocked: it stands on P4, which is {state.replace('_', ' ')}"
                ]
        assert found["KV_nvfp4"]["status"] == "blocked"  # a leaf too

    def test_a_small_residual_needs_no_fp32(self, judged):
        small = {"exercised": {"residual_absmax": [80.0, 90.0]}}
        judged.variant("B0_unfused", **small).measured("B0_unfused")
        write_json(judged.results / "residual.json", judge(judged.results, judged.config))
        states = {verdict["id"]: verdict for verdict in collect(judged.results, judged.config)["variants"]}
        assert states["B5_all"]["status"] == "not_needed"
        assert "not exercised: max abs X is 90, and" in states["B5_all"]["reasons"][0]

    def test_the_run_says_what_was_asked_of_what(self, judged, tmp_path):
        manifest = {"sha256": "c" * 64, "label": "trained nano weights"}
        write_json(judged.results / "checkpoint.json", manifest)
        other = tmp_path / "other.yaml"
        other.write_bytes(judged.config.path.read_bytes())
        gates = collect(judged.results, replace(judged.config, path=other), "P4")
        run = gates["run"]
        commit, dirty = git_state()
        assert (run["commit"], run["dirty"], run["device"]) == (commit, dirty, "cpu")
        assert run["command"] == f"snakemake --configfile {other} P4"
        assert run["config_sha256"] == sha256(other.read_bytes()).hexdigest()
        assert run["prompts_sha256"] == sha256(judged.config.prompts.read_bytes()).hexdigest()
        assert run["checkpoint_sha256"] == "c" * 64
        assert abs((datetime.now(UTC) - datetime.fromisoformat(run["date"])).total_seconds()) < 60
        assert run["versions"].keys() >= {"torch", "triton", "python"}
        assert gates["labels"][-1] == "trained nano weights"
        assert collect(judged.results, judged.config)["run"]["command"] == "snakemake all"

    def test_without_a_manifest_nothing_is_said_of_the_weights(self, judged):
        gates = collect(judged.results, judged.config)
        assert not any("weights" in label for label in gates["labels"])
        assert gates["run"]["checkpoint_sha256"] is None

    def test_a_target_takes_its_ancestors(self, judged):
        names = [verdict["id"] for verdict in collect(judged.results, judged.config, "P5")["variants"]]
        assert names == ["B0_unfused", "P4", "P5"]

    def test_command_line_writes_three_files(self, judged, monkeypatch, capsys):
        monkeypatch.setattr(collect_module, "load", lambda path: judged.config)
        monkeypatch.setattr("sys.argv", ["collect", "--results", str(judged.results)])
        assert collect_main() == 0
        gates = json.loads((judged.results / "gates.json").read_text())
        assert (gates["schema"], gates["model"], gates["device"]) == (1, "nano", "cpu")
        assert set(pd.read_parquet(judged.results / "metrics.parquet")["variant"]) == {"B0_unfused"}
        claims = json.loads((judged.results / "claims.json").read_text())
        assert {row["state"] for row in claims} == {"holds", "does_not", "not_run"}
        assert "1 pass" in capsys.readouterr().err


class TestClaims:
    def test_every_claim_has_a_check_or_a_reason(self):
        rows = yaml.safe_load(FILE.read_text())
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            assert ("check" in row) != ("not_run" in row), row["id"]
        assert {row["check"] for row in rows if "check" in row} == set(CHECKS)

    def test_what_needs_rungs_says_which(self, audit):
        rows = {row["id"]: row for row in judge_claims(Evidence(audit.results, audit.config, "cpu"))}
        assert rows["p5_launches"]["state"] == "holds"
        assert "610 at 61 layers, 430 at 43 layers, 80 at 8 layers" in rows["p5_launches"]["measured"]
        assert rows["rope_bf16"]["state"] == "not_run"
        assert rows["rope_bf16"]["reason"] == "not measured in this run: B1, B1_rope_fp8"
        assert all(row["measured"] or row["reason"] for row in rows.values())

    def test_both_cosines_decide_on_rope(self, audit):
        for name in ("B0", "B1a", "B1"):
            audit.variant(name)
        worse = lambda m, p, layer, tap, x: x + 0.05 * x[..., ::-1] if tap.name == "attn_out" else x  # noqa: E731
        audit.variant("B1_rope_fp8", worse)
        for name in ("B1", "B1_rope_fp8"):
            audit.measured(name)
        holds, text = CHECKS["rope_bf16"](Evidence(audit.results, audit.config, "cpu"))
        assert not holds
        assert "keep BF16" in text


GATES = {
    "variants": [
        {"id": "B0", "parent": None, "spine": True, "status": "pass"},
        {
            "id": "KV_nvfp4",
            "parent": "B0",
            "spine": False,
            "status": "fail",
            "reasons": ["layer 0, kv_store"],
        },
        {
            "id": "B1",
            "parent": "B0",
            "spine": True,
            "status": "fail",
            "reasons": ["layer 2, attn_out is wrong"],
        },
        {"id": "B2", "parent": "B1", "spine": True, "status": "blocked", "reasons": ["blocked"]},
    ]
}


class TestEnforce:
    @pytest.mark.parametrize(
        ("target", "names"),
        [(None, ["B1"]), ("B0", []), ("B2", ["B1"]), ("KV_nvfp4", [])],
    )
    def test_who_is_to_blame(self, target, names):
        assert [verdict["id"] for verdict in culprits(GATES, target)] == names

    @pytest.mark.parametrize("state", list(State))
    def test_only_a_pass_and_what_is_not_needed_exit_0(self, tmp_path, capsys, state):
        rungs = [{"id": "B0", "parent": None, "spine": True, "status": "pass"}]
        rungs += [{"id": "B1", "parent": "B0", "spine": True, "status": state, "reasons": ["why"]}]
        rungs += [{"id": "KV", "parent": "B0", "spine": False, "status": state}]
        rungs += [{"id": "B5_all", "parent": "B1", "spine": True, "on_request": True, "status": "not_run"}]
        write_json(tmp_path / "gates.json", {"variants": rungs})
        good = state in (State.PASS, State.NOT_NEEDED)
        assert enforce_main(["--results", str(tmp_path)]) == (not good)
        said = capsys.readouterr().err
        words = "" if state == State.FAIL else f"{state.replace('_', ' ')}: "
        assert (f"  B1: {words}why" in said) == (not good)
        assert "KV" not in said
        assert "B5" not in said
        assert ("The audit is complete" in said) == (state in (State.FAIL, State.CANNOT_MEASURE))
        assert (tmp_path / "enforced.ok").exists() == good
        assert enforce_main(["--results", str(tmp_path), "--target", "KV"]) == 0
        assert enforce_main(["--results", str(tmp_path), "--target", "B5_all"]) == 1

    @pytest.mark.parametrize("state", ["fail", "cannot_measure", "not_run", "blocked"])
    def test_who_waits_for_a_culprit_is_none(self, state):
        rungs = [{"id": "B0", "parent": None, "spine": True, "status": state}]
        rungs += [{"id": "B1", "parent": "B0", "spine": True, "status": "blocked"}]
        rungs += [{"id": "B2", "parent": "B1", "spine": True, "status": "not_run"}]
        assert [verdict["id"] for verdict in culprits({"variants": rungs})] == ["B0"]

    @pytest.mark.parametrize(("rungs", "target"), [([], "all"), (GATES["variants"], "B9")])
    def test_what_was_never_judged_did_not_pass(self, tmp_path, capsys, rungs, target):
        write_json(tmp_path / "gates.json", {"variants": rungs})
        asked = [] if target == "all" else ["--target", target]
        assert enforce_main(["--results", str(tmp_path), *asked]) == 1
        assert f"has no verdict on {target}; run snakemake {target}" in capsys.readouterr().err

    @pytest.mark.parametrize(("state", "good"), [("pass", True), ("fail", False)])
    def test_the_ab_counts_the_spine_below_it_and_none_of_its_leaves(self, tmp_path, capsys, state, good):
        rungs = [{"id": "B4", "parent": None, "spine": True, "status": state, "reasons": ["why"]}]
        rungs += [{"id": "B5_all", "parent": "B4", "spine": False, "on_request": True, "status": "fail"}]
        write_json(tmp_path / "gates.json", {"target": "B5", "variants": rungs})
        assert enforce_main(["--results", str(tmp_path), "--target", "B5"]) == (not good)
        assert ("B4: why" in capsys.readouterr().err) == (not good)
        write_json(tmp_path / "gates.json", {"target": None, "variants": rungs})  # of another call
        assert enforce_main(["--results", str(tmp_path), "--target", "B5"]) == 1

    def test_it_exits_1_and_names_them(self, tmp_path, capsys):
        write_json(tmp_path / "gates.json", GATES)
        (tmp_path / "enforced.ok").touch()
        assert enforce_main(["--results", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert "The audit is complete" in said
        assert "B1: layer 2, attn_out is wrong" in said
        assert "KV_nvfp4" not in said
        assert not (tmp_path / "enforced.ok").exists()

    def test_it_passes_what_holds(self, tmp_path):
        write_json(tmp_path / "gates.json", GATES)
        assert enforce_main(["--results", str(tmp_path), "--target", "B0"]) == 0
        assert (tmp_path / "enforced.ok").exists()

    def test_without_verdicts_the_audit_did_not_get_so_far(self, tmp_path, capsys):
        assert enforce_main(["--results", str(tmp_path)]) == 1
        assert "run snakemake all" in capsys.readouterr().err
