"""What a target is about."""

import pytest

from dsv4.ladder import B5, Ladder, LadderError

RUNGS = {
    "bottom": {"spine": True},
    "leaf": {"parent": "bottom", "set": {"q_format": "fp8"}},
    "top": {"parent": "bottom", "set": {"kv_norm": "fused"}, "spine": True},
    "wide": {"parent": "top", "set": {"residual": "fp32"}, "on_request": True},
    "last": {"parent": "top", "set": {"residual": "fp32_last"}, "on_request": True},
}


def names(rungs):
    return [rung.id for rung in rungs]


def test_the_residuals_ab_is_a_target_with_all_that_it_stands_on():
    ladder = Ladder(RUNGS)
    assert names(ladder.residuals()) == ["wide", "last"]
    assert names(ladder.about(B5)) == ["bottom", "top", "wide", "last"]
    assert names(ladder.about("last")) == ["bottom", "top", "last"]
    assert names(ladder.about(None)) == list(RUNGS)


def test_a_rung_of_that_name_is_the_target():
    assert names(Ladder(RUNGS | {B5: {"parent": "leaf", "set": {"kv_norm": "fused"}}}).about(B5)) == [
        "bottom",
        "leaf",
        B5,
    ]


def test_without_rungs_there_is_no_ab():
    with pytest.raises(LadderError, match="B5: no rung on request changes the residual"):
        Ladder({"bottom": RUNGS["bottom"]}).about(B5)
