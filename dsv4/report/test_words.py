import json

import pytest

from dsv4.ladder import State
from dsv4.report import digits, words
from dsv4.report.conftest import read

pytestmark = pytest.mark.xdist_group("report")


def audit(results, target=None, **changes):
    """An audit with the verdicts of some variants replaced; None removes one."""
    found = read(results, target)
    for name, change in changes.items():
        if change is None:
            found.verdicts.pop(name, None)
        else:
            found.verdicts[name] = found.verdicts.get(name, {"id": name}) | change
    return found


def test_failure_names_rung_place_reason_and_what_is_blocked(failing):
    text, tone = words.headline(audit(failing))
    assert text == (
        "B2 fails in layer 4, index_topk (topk): 12 of 40 entries differ in the worst row, limit 2;"
        " so B3 and above are blocked."
    )
    assert tone is State.FAIL


def test_all_pass_says_where_the_next_change_goes(passing):
    text, tone = words.headline(audit(passing))
    assert text == "All 12 rungs pass; the next change may be stacked on B4_head."
    assert tone is State.PASS


def test_failing_leaf_blocks_nothing(passing):
    text, _ = words.headline(audit(passing, B1_rope_fp8={"status": "fail"}))
    assert text.startswith("All 12 rungs pass")


def test_last_rung_failing_blocks_nothing(passing):
    text, _ = words.headline(audit(passing, B4_head={"status": "fail", "culprit": None, "reasons": []}))
    assert text == "B4_head fails."


def test_cannot_measure_is_no_pass(passing):
    text, tone = words.headline(audit(passing, B2={"status": "cannot_measure", "reasons": ["one page only"]}))
    assert text == "B2 cannot be measured: one page only; so B3 and above are blocked."
    assert tone is State.CANNOT_MEASURE


def test_missing_verdict_is_said(passing):
    missing = dict.fromkeys(("B3", "B4_router", "B4_swiglu", "B4_attn_out", "B4_head"))
    text, tone = words.headline(audit(passing, **missing))
    assert text == "The audit is not complete: B2 and below pass; B3 and above were not run."
    assert tone is State.NOT_RUN


def test_rung_without_verdict_on_a_failed_one_is_blocked(failing):
    found = audit(failing, B3=None, B4_router=None)
    states = {rung.id: found.state(rung) for rung in found.ladder}
    assert states["B3"] is State.BLOCKED
    assert states["B4_router"] is State.BLOCKED


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("B1", "safe to stack"),
        ("B1a", "safe to stack: bit-equal to B0"),
        ("B1_q2", "may adopt q in two FP8 terms"),
        ("B1_rope_fp8", "keep BF16 rope: rope: rel_l2 0.037 against trained is over 0.014"),
        ("B3", "it stands on B2, which is fail"),
        ("B2_fp4", "not shown to be safe: no row has more than index_topk visible entries"),
        ("B5_all", "on request: snakemake B5_all"),
    ],
)
def test_advice(failing, name, said):
    found = read(failing)
    assert words.advice(found, next(rung for rung in found.ladder if rung.id == name)) == said


def test_target_leaf_leads_its_own_page(failing, passing):
    assert words.headline(audit(passing, "B1_q2"))[0] == "B1_q2 passes; may adopt q in two FP8 terms."
    text, _ = words.headline(audit(failing, "B1_rope_fp8"))
    assert text.startswith("B1_rope_fp8 fails in layer 4, attend (attn_out); keep BF16 rope")


SAID = "its text is broken: plain `code`: a stop id was passed at step 12"
BROKEN = {"e2e": {"text": {"broken": True}}, "reasons": [SAID, "sound"]}


def test_a_broken_text_leads_the_page(failing, passing):
    found = audit(passing, B1=BROKEN)
    said = f"B1 passes its gate, but {SAID}."
    assert words.headline(found) == (f"{said} Nothing may be stacked on it.", State.FAIL)
    rung = next(rung for rung in found.ladder if rung.id == "B1")
    assert words.advice(found, rung) == f"passes its gate: {SAID}"
    assert "Broken text: B1." in words.summary(found)
    text, tone = words.headline(audit(failing, B1=BROKEN))
    assert text.startswith("B2 fails in layer 4")
    assert text.endswith(f" are blocked. {said}")
    assert tone is State.FAIL


def test_a_leafs_broken_text_leads_its_own_page_alone(passing):
    found = audit(passing, B1_q2=BROKEN)
    assert words.headline(found)[0].startswith("All 12 rungs pass; ")
    assert "Broken text: B1_q2." in words.summary(found)
    own = words.headline(audit(passing, "B1_q2", B1_q2=BROKEN))
    assert own == (f"B1_q2 passes its gate, but {SAID}.", State.FAIL)


def test_the_residuals_ab_is_a_page_about_what_it_stands_on(passing):
    found = audit(passing, "B5")
    assert [rung.id for rung in found.ladder][-4:] == ["B5_all", "B5_first_half", "B5_last_half", "B5_single"]
    assert words.headline(found)[0].startswith("All 12 rungs pass")
    assert "B5_all" in " ".join(gap.what for gap in found.gaps)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (1 - 3e-8, "1−3e-8"),
        (0.9991234, "0.999123"),
        (float("nan"), "—"),
        (None, "—"),
        (float("inf"), "inf"),
    ],
)
def test_cosine_keeps_the_digits_that_tell_it_from_one(value, text):
    assert digits.cosine(value) == text


def test_percent_is_whole_only_when_all():
    assert digits.percent(1.0) == "100%"
    assert digits.percent(0.99999) == "<100%"


def test_numbers_are_short():
    assert digits.number(1.2e-12) == "1.2e-12"
    assert digits.number(-0.5, ".2f") == "−0.50"
    assert digits.signed(-2048) == "−2,048"
    assert json.dumps(digits.number(float("-inf"))) == '"inf"'


def test_what_is_not_needed_says_why_in_one_whole_clause(passing):
    why = "max abs X is 86.5, and a BF16 ULP reaches 2 from 256 on"
    told = f"not needed: not exercised: {why}: an FP32 residual can say nothing here; {'no text asks for it ' * 9}"
    found = audit(passing, B5_all={"status": "not_needed", "reasons": [told]})
    rung = next(each for each in found.ladder if each.id == "B5_all")
    assert words.advice(found, rung) == why
