"""What was not judged on the changed op's own path is no pass, and neither is a dump of nothing."""

import numpy as np
import pandas as pd
import pytest

from dsv4.judge.claims_by_field import CLAIMS
from dsv4.judge.conftest import EXERCISED
from dsv4.judge.gate import gate, write_json
from dsv4.judge.measure import Notes
from dsv4.judge.summary import IDLE, own_path
from dsv4.ladder import State
from dsv4.taps import BY_NAME, TAPS

OWN = [(field, tap.name) for field in CLAIMS for tap in TAPS if tap.stage in CLAIMS[field]]
OTHERS = [(field, tap.name) for field in CLAIMS for tap in TAPS if tap.stage not in CLAIMS[field]]


def floor_rows(verdict, tap=""):
    """Two prompts' fidelity verdicts: "within", but for one tap."""
    frame = pd.DataFrame(
        {"tap": [spec.name for spec in TAPS] * 2, "prompt": ["one"] * len(TAPS) + ["two"] * len(TAPS)}
    )
    frame = frame.assign(against="floor", mode="isolated", part="all", verdict="within")
    frame.loc[frame["tap"] == tap, "verdict"] = verdict
    return frame


def notes(**more):
    return Notes(exercised={"one": EXERCISED}, **more)


@pytest.mark.parametrize(("field", "tap"), OWN)
def test_a_tap_of_the_own_path_that_says_nothing_is_named(field, tap):
    name = f"{field}: {tap} ({BY_NAME[tap].stage})"
    assert own_path([field], floor_rows("within"), notes()) == []
    assert own_path([field], floor_rows("within"), notes(declared=[tap])) == [f"{name} is declared missing"]
    assert own_path([field], floor_rows(["not_exercised", "within"], tap), notes()) == []
    lines = own_path([field], floor_rows("not_exercised", tap), notes())
    assert lines == [f"{name}: {IDLE}; give it a prompt that does"]


def test_taps_off_the_own_path_may_be_missing():
    for field, tap in OTHERS:
        assert own_path([field], floor_rows("not_exercised", tap), notes(declared=[tap])) == []


def judged(audit, name, change=None, **attrs):
    """Verdict of a rung, all below it passed."""
    variant = audit.config.ladder[name]
    for rung in audit.config.ladder.lineage(name)[:-1]:
        write_json(audit.results / "gates" / f"{rung.id}.json", {"id": rung.id, "status": "pass"})
    if variant.parent:
        audit.variant(variant.parent)
    audit.variant(name, change, **attrs).measured(name)
    return gate(audit.results, audit.config, name)


def test_a_rung_whose_own_tap_is_declared_missing_cannot_be_measured(audit):
    def declared(mode, phase, layer, tap, array):
        moves = tap.name == "lse" and mode == "compounded"  # no silent fallback
        return None if tap.name == "attn_out" else np.nextafter(array, np.float32(9)) if moves else array

    verdict = judged(audit, "B1", declared, declared_missing=["attn_out"])
    assert verdict["status"] == State.CANNOT_MEASURE
    first, taps = verdict["reasons"]
    assert (
        first == "not exercised on the changed op's own path: q_format: attn_out (attend) is declared missing"
    )
    assert taps == "taps {} of {}: made up declares the others missing".format(*verdict["taps"])


@pytest.mark.parametrize("name", ["B0_unfused", "P4", "B1a"])
def test_a_dump_of_nothing_is_no_pass_whatever_is_declared(audit, name):
    verdict = judged(audit, name, lambda *_: None, declared_missing=list(BY_NAME))
    assert verdict["status"] == State.CANNOT_MEASURE
    assert verdict["reasons"][0].startswith("no tap holds anything")
    parent = audit.config.ladder[name].parent
    assert any(
        reason.startswith(f"no tap was compared with {parent}'s") for reason in verdict["reasons"]
    ) == bool(parent)
