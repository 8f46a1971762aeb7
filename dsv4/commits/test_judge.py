"""What counts against a commit: its own findings, not those of what it stands on, nor what a repair moves."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from dsv4.commits import audit, judge
from dsv4.commits.judge import Against, _counts, _inherited, listed
from dsv4.commits.run import Outcome
from dsv4.judge.evaluate import Finding

OUTSIDE = Finding(kind="fidelity", mode="isolated", layer=5, tap="topk", text="")
BLAST = Finding(kind="blast", mode="isolated", layer=5, tap="topk", text="")
BUDGET = Finding(
    kind="limit", mode="compounded", layer=-1, tap="logits", text="", limit="logits.kl_nats.parent"
)
SUM = Finding(
    kind="limit", mode="compounded", layer=-1, tap="logits", text="", limit="logits.kl_nats.trained"
)


def below(moved=(), findings=()):
    """A commit below, its dumps and findings."""
    found = {(each.kind, each.mode, each.layer, each.tap): each for each in findings}
    return Against(sha="a" * 40, of="a" * 40, moved=frozenset(moved), findings=found)


@pytest.mark.parametrize(
    ("against", "inherited"),
    [
        ([below(findings=[OUTSIDE])], True),
        ([below()], False),  # it is new here
        ([below(moved=[("isolated", 5, "topk")], findings=[OUTSIDE])], False),  # wrong in another way
        ([below(moved=[("compounded", 5, "topk")], findings=[OUTSIDE])], True),
        ([below(), below(findings=[OUTSIDE])], True),  # a merge takes it from its second parent
        ([below(moved=[("isolated", 5, "topk")], findings=[OUTSIDE]), below(findings=[SUM])], False),
    ],
)
def test_a_finding_is_inherited_with_the_same_bits_only(against, inherited):
    said = _inherited(OUTSIDE, against)
    assert bool(said) is inherited
    assert not said or said.startswith("stands on aaaaaaaaaa, which fails at layer 5, topk (index_topk)")


@pytest.mark.parametrize(
    ("finding", "merge", "broken", "changed", "counts"),
    [
        (OUTSIDE, True, True, False, True),
        (BLAST, False, False, True, True),
        (BLAST, False, False, False, False),  # without a field the sites decide
        (BLAST, True, False, True, False),
        (BUDGET, False, False, False, True),
        (BUDGET, False, True, False, False),  # what repairs a failure moves far
        (BUDGET, True, False, False, False),
        (SUM, True, True, False, True),
    ],
)
def test_which_findings_count(finding, merge, broken, changed, counts):
    assert _counts(finding, merge, [below(findings=[OUTSIDE] if broken else [])], changed) is counts


@pytest.mark.parametrize(
    ("taps", "change", "units", "said"),
    [
        (["kv_store", "attn_out"], {}, ["kernels/kv_store", "kernels/sparse_attn"], True),
        (["kv_store", "attn_out"], {}, ["kernels/kv_store with s.py: f"], False),  # one op explains it
        (["kv_store"], {}, ["kernels/kv_store", "kernels/sparse_attn"], False),  # what reads it did not move
        (
            ["kv_store", "attn_out"],
            {"kv_format": ("fp8", "nvfp4")},
            ["a", "b"],
            False,
        ),  # the plan claims both
        (["attn_out", "lse"], {}, ["a", "b"], False),
    ],
)
def test_a_second_site_behind_a_store_is_said_not_to_be_seen(monkeypatch, taps, change, units, said):
    """Of a store and what reads it the reader moves in any case: no second site, and no proof that there is none."""
    monkeypatch.setattr(judge, "_units", lambda *_: units)
    found = below(moved=[("isolated", 1, tap) for tap in taps])
    assert judge.two_sites(None, "b" * 40, found, {}) == ""
    text = judge.unseen_site(None, "b" * 40, found, change)
    assert text.startswith("attend moved too, which reads what moved before it") == said
    assert not said or "touches kernels/kv_store; kernels/sparse_attn; if these are two changes" in text


@pytest.mark.parametrize(
    ("own", "status", "kind", "says"),
    [
        ([], "pass", "no_numerics", "proved: the 3 files that can run or be read are equal to"),
        ([OUTSIDE], "blocked", "inherited", "stands on aaaaaaaaaa, which fails at layer 5, topk"),
    ],
)
def test_words_on_a_step_that_moved_too_far_are_no_failure(monkeypatch, own, status, kind, says):
    """What the commit below has wrong only against its own parent is not wrong with what has its bits."""
    other = {"id": "a", "taps": [9, 9], "status": "fail", "findings": listed([*own, BUDGET]), "reasons": []}
    monkeypatch.setattr(audit, "_cached", lambda branch, sha: other)
    monkeypatch.setattr(audit, "_about", lambda branch, sha: {"findings": []})
    monkeypatch.setattr(audit, "own_findings", lambda branch, sha: (own, ""))
    branch = SimpleNamespace(commit=lambda sha: SimpleNamespace(parents=("a" * 40,)))
    found = audit._proved(branch, "b" * 40, Outcome(state="equal", of="a" * 40, key="k", files=3))
    assert (found["status"], found["kind"]) == (status, kind)
    assert found["reasons"][0].startswith(says)
    assert found["findings"] == listed(own)


@pytest.mark.parametrize(
    ("kind", "reason", "line"),
    [
        ("does_not_run", "does not run: no such file", "does not run: no such file"),
        ("does_not_run", "its dumps cannot be compared: x", "does not run: its dumps cannot be compared: x"),
        ("two_sites", "two sites: a; b", "two sites: a; b"),
        ("base", "within its noise", "base: within its noise"),
    ],
)
def test_the_line_of_a_commit_says_nothing_twice(capsys, kind, reason, line):
    found = {"id": "a1", "subject": "Keys", "status": "cannot_measure", "kind": kind, "reasons": [reason]}
    audit._say(Console(), found)
    assert capsys.readouterr().out == f"a1 Keys: cannot measure, {line}\n"
