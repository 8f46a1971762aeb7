"""Counts that a plan asks for, and what a fallback would look like."""

from pathlib import Path

import pytest

from dsv4 import config as configuration
from dsv4.judge.evaluate import other_path
from dsv4.judge.kernel_launches import MHC_FUSED, Q_AND_ATTENTION, Q_FP8, QUANTISE, expected, words, wrong
from dsv4.judge.launches import Sizes
from dsv4.judge.measure import Notes
from dsv4.plan import flatten

LADDER = configuration.load(Path(__file__).parents[2] / "config.yaml").ladder
SIZES = Sizes(
    compress_ratios=(0, 4, 128),
    head_dim=256,
    hidden_size=256,
    hc_mult=4,
    sliding_window=128,
    index_topk=40,
    index_head_dim=128,
)

SEEN = ("norm_quant", "mhc_quant", "q_a_norm", "kv_read", "q_format", "index_score", "kv_norm")


def as_asked(rung):
    """Counts of a run that did what the plan asks."""
    return {one.kernels[0]: one.least for one in expected(flatten(LADDER[rung].plan), SIZES)}


@pytest.mark.parametrize("rung", [rung.id for rung in LADDER])
def test_what_a_plan_asks_for_is_accepted_and_its_parents_is_not(rung):
    plan = flatten(LADDER[rung].plan)
    assert list(wrong(plan, SIZES, as_asked(rung))) == []
    field, (_, to) = next(iter(LADDER[rung].change.items()), ("", ("", "")))
    if field in SEEN and (field, to) not in (("q_format", "fp8x2"), ("norm_quant", "fused_scalar_gsa")):
        found = [words(*one) for one in wrong(plan, SIZES, as_asked(LADDER[rung].parent))]
        assert any("the new path did not run" in text or "still runs" in text for text in found)


def test_a_layer_that_fell_back_is_one_launch_short():
    plan, counts = flatten(LADDER["P5"].plan), as_asked("P5")
    assert counts[MHC_FUSED] == 6
    counts[MHC_FUSED] -= 1
    notes = Notes(labels={"backend": "kernel"}, launches=counts)
    (finding,) = other_path(plan, SIZES, notes)
    assert finding.tap == "attn_in"
    assert finding.text.startswith(f"{MHC_FUSED} ran 5 times in a decode step, where the plan asks for 6")
    assert finding.text.endswith("the new path did not run")


def test_one_kernel_of_q_and_attention_is_both_paths():
    """In BF16 it is neither: what still runs there is said."""
    plan, counts = flatten(LADDER["B1"].plan), as_asked("B1")
    del counts[Q_FP8], counts["sparse_attn.attend_fp8_kernel"]
    assert [finding for finding, _ in wrong(plan, SIZES, counts)]
    counts[Q_AND_ATTENTION] = len(SIZES.compress_ratios)
    assert list(wrong(plan, SIZES, counts)) == []
    assert list(wrong(flatten(LADDER["B0"].plan), SIZES, as_asked("B0") | {Q_AND_ATTENTION: 1}))


def test_a_dump_on_kernels_without_counts_fails_and_one_on_refs_is_not_asked():
    plan = flatten(LADDER["B1"].plan)
    assert other_path(plan, SIZES, Notes(labels={"backend": "kernel"}))
    assert not other_path(plan, SIZES, Notes(labels={"backend": "ref"}))
    assert not other_path(plan, SIZES, Notes())


def test_windows_that_a_step_closes_may_be_stored_or_not():
    plan, counts = flatten(LADDER["B3"].plan), as_asked("B3")
    store = "kv_store._kv_store_kernel"
    assert [list(wrong(plan, SIZES, counts | {store: count})) == [] for count in (0, 2, 3)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("rung", ["B0_unfused", "P4", "P4_scalar_gsa", "B3"])
def test_a_second_readers_input_is_quantised_exactly_once(rung):
    plan, counts = flatten(LADDER[rung].plan), as_asked(rung)
    found = {
        more: [one.tap for one, _ in wrong(plan, SIZES, counts | {QUANTISE: counts[QUANTISE] + more}, 2)]
        for more in (1, 2, 3)
    }
    assert found == {1: ["attn_in_q"], 2: [], 3: ["attn_in_q"]}


def test_under_one_gsa_a_launch_torch_quantises_it():
    plan, counts = flatten(LADDER["P4_launch_gsa"].plan), as_asked("P4_launch_gsa")
    alone = counts[QUANTISE]
    seen = [list(wrong(plan, SIZES, counts | {QUANTISE: alone + more}, 2)) == [] for more in (-1, 0, 1, 2)]
    assert seen == [False, True, False, False]
