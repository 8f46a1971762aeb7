"""What the FP32 residual's A/B may say, from hand-made measurements."""

import json

import pytest

from dsv4.judge.onsets import asked_by, earlier, onsets
from dsv4.judge.residual_verdict import Found, Tried, decide, unjudged_residual
from dsv4.ladder import Ladder, State

RUNGS = {
    "bottom": {"spine": True},
    "wide": {"parent": "bottom", "set": {"residual": "fp32"}, "on_request": True},
}
EARLY = {"chat": (40, 100), "code": (None, None)}  # prompt -> the rung's onset, the reference's
LATE = {"chat": (100, 100), "code": (None, None)}
LESS = {"kl_change": -2e-3, "se": 1e-4, "moved": True}
SAME = {"kl_change": -2e-4, "se": 1e-4, "moved": False}
MORE = {"kl_change": 2e-3, "se": 1e-4, "moved": True}
ASKED = [{"variant": "B4_head", "prompt": "chat", "onset": 40, "reference_onset": 100}]


def tried(change=SAME, own=EARLY, variant="B5_all", value="fp32"):
    return Tried(variant, value, 0.01, change, own)


def found(*rungs, parent=EARLY, **more):
    base = {"peak": 300.0, "texts": ["B0", "B4_head"], "asked_by": ASKED, "parent": ("B4_head", parent)}
    return Found(**(base | {"tried": rungs} | more))


@pytest.mark.parametrize(
    ("own", "reference", "expected"),
    [
        (None, None, False),
        (None, 5, False),
        (5, None, True),
        (4, 5, True),
        (5, 5, False),
        (6, 5, False),
        (0, 5, True),
    ],
)
def test_early_is_before_the_reference_or_where_it_never_repeats(own, reference, expected):
    assert earlier(own, reference) is expected


def account(onset):
    return {"loop": None if onset is None else {"onset": onset, "period": 2, "copies": 9.0}}


def test_every_early_text_asks_and_a_forced_one_does_not():
    text = {"prompts": {
        "chat": {"own": account(40), "reference": account(100)},
        "code": {"own": account(0), "reference": account(None)},
        "late": {"own": account(None), "reference": account(7)},
        "leaf": {"own": None, "reference": account(7)},
    }}  # fmt: skip
    assert onsets(text) == {"chat": (40, 100), "code": (0, None), "late": (None, 7)}
    assert asked_by({"B4_head": text}) == [
        {"variant": "B4_head", "prompt": "chat", "onset": 40, "reference_onset": 100},
        {"variant": "B4_head", "prompt": "code", "onset": 0, "reference_onset": None},
    ]


ONE_LAYER = {"variant": "B5_single", "value": "fp32_last"}
CASES = {
    "kl falls": (found(tried(LESS)), "contributor", "B5_all moves the KL (-0.002 nats"),
    "as the reference": (found(tried(own=LATE)), "contributor", "(chat from 40, now from 100)"),
    "repeats no more": (found(tried(own={"chat": (None, 100)})), "contributor", "now never"),
    "onsets alone": (found(tried(None, LATE)), "contributor", "has no KL to compare"),
    "one layer is enough": (
        found(tried(), tried(LESS, **ONE_LAYER)),
        "contributor",
        "against B4_head B5_single moves",
    ),
    "asked by nobody": (found(tried(LESS), asked_by=[]), "contributor", "no passing rung repeats"),
    "a token early": (found(tried(own={"chat": (99, 100)})), "ruled_out", "not move the repetition back"),
    "back on one, early on another": (
        found(tried(own=LATE | {"code": (9, None)})),
        "ruled_out",
        "does not move the repetition back",
    ),
    "kl rises": (found(tried(MORE)), "ruled_out", "moves the KL (+0.002 nats"),
    "neither": (found(tried()), "ruled_out", "B5_all does not move the KL"),
    "forced only": (found(tried(own={})), "not_run", "has no text of its own"),
    "nothing to move back": (found(tried(), parent=LATE), "ruled_out", "B4_head itself has no early"),
    "just large enough": (found(tried(), peak=256.0), "ruled_out", "does not move the KL"),
    "one layer alone": (found(tried(**ONE_LAYER)), "not_run", "rules nothing out, against B4_head B5_single"),
    "onsets without a kl": (found(tried(None)), "not_run", "has no KL to compare and does not move"),
    "needed": (found(), "not_run", "B4_head repeats from token 40 of chat on, the reference from 100"),
    "stopped": (found(stopped={"B5_all": "cannot_measure"}), "not_run", "B5_all: cannot measure"),
    "no texts": (Found(peak=300.0), "not_run", "no passing rung has a text"),
    "parent unseen": (Found(texts=["B0"], peak=300.0), "not_run", "snakemake B5"),
    "nothing to compare": (found(tried(None, {})), "not_run", "repeats from"),
    "no need": (found(asked_by=[]), "not_needed", "no passing rung repeats earlier"),
    "not finite": (found(peak=float("nan"), asked_by=[]), "not_needed", "no passing rung"),
    "no magnitudes": (found(peak=None, asked_by=[]), "not_needed", "no passing rung"),
    "small": (found(peak=255.9), "not_exercised", "max abs X is 255.9, and"),
    "small, but it ran": (found(tried(LESS), peak=90.0), "not_exercised", "can say nothing here"),
    "small, no texts": (Found(peak=90.0), "not_exercised", "is 90"),
}


@pytest.mark.parametrize(("measured", "verdict", "said"), CASES.values(), ids=CASES)
def test_verdict_and_words(measured, verdict, said):
    got, words = decide(measured)
    assert got == verdict
    assert said in words
    assert words.startswith(verdict.replace("_", " ") + ": ")
    assert words.endswith("(Part A not applied)")


def test_a_small_residual_does_not_hide_what_moved():
    _, words = decide(found(tried(LESS), peak=90.0))
    assert "B5_all moves the KL (-0.002 nats" in words


@pytest.mark.parametrize(
    ("content", "state", "reason"),
    [
        ({"verdict": "not_needed", "words": "not needed: because"}, State.NOT_NEEDED, "not needed: because"),
        (
            {"verdict": "not_exercised", "words": "not exercised: x"},
            State.NOT_NEEDED,
            "not needed: not exercised: x",
        ),
        (
            {"verdict": "not_run", "words": "not run: y"},
            State.NOT_RUN,
            "on request: snakemake wide; not run: y",
        ),
        (None, State.NOT_RUN, "on request: snakemake wide"),
    ],
)
def test_a_rung_that_did_not_run_says_what_the_verdict_says(tmp_path, content, state, reason):
    if content:
        (tmp_path / "residual.json").write_text(json.dumps(content))
    found = unjudged_residual(tmp_path, Ladder(RUNGS)["wide"])
    assert found == {"status": state, "reasons": [reason]}
