"""Six commits, six verdicts; see conftest.py for what each does."""

import json

import pytest

from dsv4.commits.audit import verdict
from dsv4.taps import BY_NAME

pytestmark = pytest.mark.xdist_group("commits")  # one worker: the commits run once
FIELDS = ("status", "reasons", "cos", "culprit", "fidelity", "vs_parent", "cost", "taps", "label", "device")
OF_COMMITS = ("commit", "subject", "parents", "against", "kind", "sites", "plan", "rung")


@pytest.fixture(scope="module")
def verdicts(small):
    """Verdict of each commit, by name."""
    return {name: verdict(small.results, small.config, sha) for name, sha in small.shas.items()}


@pytest.mark.parametrize(
    ("name", "status", "kind", "says"),
    [
        ("base", "pass", "base", "within its noise"),
        ("good", "pass", "one_site", "it moves 6 of "),
        ("renames", "pass", "no_numerics", "no stored code or value changes"),
        ("two sites", "fail", "two_sites", "two sites: index_q (layers 3, 5); moe_sum (layer"),
        ("merges", "pass", "merge", "no stored code or value changes"),
        ("breaks", "fail", "one_site", "layer 5, topk (index_topk) is not what the plan computes"),
        (
            "crashes",
            "cannot_measure",
            "does_not_run",
            "does not run: ImportError: cannot import name 'Fp5Key'",
        ),
    ],
)
def test_six_commits_six_verdicts(small, verdicts, name, status, kind, says):
    found = verdicts[name]
    assert (found["status"], found["kind"]) == (status, kind), found["reasons"]
    assert says in found["reasons"][0]
    assert found["commit"] == small.shas[name]
    assert not [field for field in (*FIELDS, *OF_COMMITS) if field not in found]
    assert (found["rung"], found["plan"]["norm_quant"]) == ("P4", "fused")
    assert json.loads((small.results / "commits" / small.shas[name] / "verdict.json").read_text()) == found


def test_the_broken_indexer_is_named_and_confirmed(small, verdicts):
    found = verdicts["breaks"]
    assert {name: found["culprit"][name] for name in ("layer", "stage", "tap", "mode")} == {
        "layer": 5,
        "stage": "index_topk",
        "tap": "topk",
        "mode": "isolated",
    }
    assert found["confirmed"]["confirmed"]
    assert found["confirmed"]["distance"][1] == 0.0
    assert found["sites"] == [{"stage": "index_topk", "layers": [5], "taps": ["topk"]}]
    assert found["against"] == small.shas["merges"]


def test_two_sites_name_stages_layers_and_code(verdicts):
    reason = verdicts["two sites"]["reasons"][0]
    assert "dsv4/model/stages.py: LayerStages.__init__; dsv4/model/stages.py: LayerStages._index_q" in reason
    assert "split it into one commit a site" in reason
    assert [site["stage"] for site in verdicts["two sites"]["sites"]] == ["index_q", "moe_sum"]
    assert verdicts["two sites"]["culprit"]["stage"] == "index_q"


def test_one_site_says_which(verdicts):
    (site,) = verdicts["good"]["sites"]
    assert (site["stage"], site["layers"]) == ("route", list(range(6)))
    assert all(BY_NAME[tap].stage == "route" for tap in site["taps"])


def test_a_merge_is_compared_with_both_parents(small, verdicts):
    assert verdicts["merges"]["parents"] == [small.shas["two sites"], small.shas["renames"]]
    assert verdicts["merges"]["vs_parent"]["bit_equal"]


def test_a_crash_is_placed_in_the_commits_own_files(verdicts):
    assert verdicts["crashes"]["reasons"][0].endswith("(dsv4/model/records.py), dsv4/model/memory.py:17")


def test_words_alone_run_nothing_and_inherit_a_failure(small, verdicts):
    found = verdicts["documents"]
    assert (found["status"], found["kind"]) == ("blocked", "inherited")
    broken = small.shas["breaks"][:10]
    says = f"stands on {broken}, which fails at layer 5, topk (index_topk); proved: the "
    assert found["reasons"][0].startswith(says)
    assert found["reasons"][0].endswith(f"files that can run or be read are equal to {broken}'s")
    assert found["dump_of"] == small.shas["breaks"]
    assert not list((small.results / "commits" / small.shas["documents"]).glob("*.h5"))
    assert found["cos"] == verdicts["breaks"]["cos"]


def test_a_plan_that_is_no_rung_is_said(verdicts):
    found = verdicts["misspelt"]
    assert (found["status"], found["kind"]) == ("cannot_measure", "does_not_run")
    assert "Audit-Variant: P9: no such rung; rungs: P4, P5" in found["reasons"][0]


def test_asked_again_nothing_runs(small, verdicts, monkeypatch):
    monkeypatch.setattr("dsv4.commits.run.checked_out", None)
    for name, sha in small.shas.items():
        if name == "documents":
            (
                small.results / "commits" / sha / "verdict.json"
            ).unlink()  # judged again, it runs nothing either
        assert verdict(small.results, small.config, sha) == verdicts[name]


def test_nothing_is_left_behind(small, verdicts):
    assert small.repository.git("status", "--porcelain", "--ignored") == ""
    assert small.repository.git("worktree", "list").count("\n") == 0
    assert list((small.results / ".trees").iterdir()) == []
