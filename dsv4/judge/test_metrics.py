import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dsv4.judge import metrics
from dsv4.judge.metrics import choice_columns, logit_columns, sums, value_columns

FINITE = st.integers(-999, 999).map(float)  # their sums are exact, so that equal means equal
NEVER = 1 << 20


def measured(test, reference):
    """Columns of one tensor [R, D]."""
    columns = value_columns(sums(np.float32(test)[None], np.float32(reference)[None]))
    return {name: column[0] for name, column in columns.items()}


def test_hand_computed():
    got = measured([[3, 4], [1, 0]], [[3, 4], [0, 2]])
    assert got["cos"] == pytest.approx(25 / math.sqrt(26 * 29))
    assert got["cos_min"] == 0.0
    assert got["cos_p01"] == pytest.approx(0.01)
    assert got["cos_median"] == 0.5
    assert got["worst_index"] == 1
    assert got["gain"] == pytest.approx(25 / 29)
    assert got["gain_worst"] == 0.0
    assert got["norm_ratio"] == pytest.approx(math.sqrt(26 / 29))
    assert got["rel_l2"] == pytest.approx(math.sqrt(5 / 29))
    assert got["rel_l2_worst"] == pytest.approx(math.sqrt(5) / 2)
    assert got["max_abs"] == 2.0
    assert got["changed"] == 0.5
    assert got["nonfinite"] == 0


def test_a_gain_is_seen_where_cosine_is_blind():
    row = np.linspace(-1, 1, 64)[None]
    got = measured(np.float32(row) * np.float32(1.05), row)
    assert got["cos"] == pytest.approx(1.0, abs=1e-12)
    assert got["gain"] == pytest.approx(1.05, abs=1e-7)
    assert got["rel_l2"] == pytest.approx(0.05, abs=1e-7)


@pytest.mark.parametrize(
    ("test", "reference", "cos", "gain", "ratio", "distance"),
    [
        pytest.param(0, 0, 1.0, 1.0, 1.0, 0.0, id="zero against zero is equal"),
        pytest.param(1, 0, 0.0, math.nan, math.inf, math.inf, id="something against zero"),
        pytest.param(0, 1, 0.0, 0.0, 0.0, 1.0, id="zero against something"),
        pytest.param(-1, 1, -1.0, -1.0, 1.0, 2.0, id="sign flip"),
    ],
)
def test_zero_vectors_are_defined(test, reference, cos, gain, ratio, distance):
    got = measured(np.full((1, 3), test), np.full((1, 3), reference))
    assert (got["cos"], got["norm_ratio"], got["rel_l2"]) == pytest.approx((cos, ratio, distance))
    assert got["gain"] == pytest.approx(gain, nan_ok=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1], ids=["tested", "reference"])
def test_non_finite_is_counted_and_blanks_the_rest(bad, side):
    pair = [np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)]
    pair[side][2, 1] = bad
    got = measured(*pair)
    assert got["nonfinite"] == 1
    assert got["worst_index"] == 2
    for name in ("cos", "cos_min", "cos_median", "rel_l2", "rel_l2_worst", "max_abs", "gain", "norm_ratio"):
        assert math.isnan(got[name]), name


def test_tiny_and_huge_values_do_not_vanish():
    tiny = np.full((1, 4), 1e-45)
    assert measured(tiny, tiny)["cos"] == pytest.approx(1.0)
    huge = np.full((1, 4), 3e38)
    assert measured(-huge, huge)["cos"] == pytest.approx(-1.0)


def test_no_rows_and_one_row():
    empty = value_columns(sums(np.empty((2, 0, 4), np.float32), np.empty((2, 0, 4), np.float32)))
    assert np.isnan(empty["cos"]).all()
    assert empty["nonfinite"].tolist() == [0, 0]
    assert empty["worst_index"].tolist() == [-1, -1]
    got = measured([[1, 2]], [[1, 2]])
    assert got["cos_min"] == got["cos_p01"] == got["cos_median"] == got["cos"] == 1.0


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"tested \(2, 3\), reference \(2, 4\)"):
        sums(np.zeros((2, 3)), np.zeros((2, 4)))


@given(arrays(np.float32, (2, 3, 8), elements=FINITE), arrays(np.float32, (2, 3, 8), elements=FINITE))
@settings(max_examples=60, deadline=None)
def test_parts_merge_to_the_whole(x, y):
    whole, merged = sums(x, y), sums(x[..., :5], y[..., :5]).merge(sums(x[..., 5:], y[..., 5:]))
    for name, value in value_columns(whole).items():
        np.testing.assert_array_equal(value_columns(merged)[name], value)


@given(arrays(np.float32, (1, 3, 8), elements=FINITE), st.sampled_from([0.5, 2.0, 1024.0]))
@settings(max_examples=60, deadline=None)
def test_a_power_of_two_scale_moves_gain_alone(x, factor):
    got = value_columns(sums(x * np.float32(factor), x))
    assert got["cos_min"] == pytest.approx(1.0)
    assert got["gain"] == pytest.approx(factor if x.any() else 1.0)


@given(arrays(np.float32, (1, 3, 8), elements=FINITE), arrays(np.float32, (1, 3, 8), elements=FINITE))
@settings(max_examples=60, deadline=None)
def test_bounds(x, y):
    got = value_columns(sums(x, y))
    assert -1 <= got["cos_min"] <= got["cos_median"] <= 1
    assert 0 <= got["changed"] <= 1
    if np.isfinite(got["rel_l2_worst"]).all():
        assert got["rel_l2_worst"] >= got["rel_l2"] - 1e-9


@given(arrays(np.float32, (2, 3, 8), elements=FINITE))
@settings(max_examples=30, deadline=None)
def test_the_short_cut_for_equal_tensors_is_what_measuring_gives(x):
    slow, fast = value_columns(sums(x, x)), metrics.equal_columns(2, np.zeros(2))
    for name in metrics.VALUES:
        if name != "worst_index":
            np.testing.assert_allclose(fast[name], slow[name], atol=1e-12)


def choices(test, reference, scores=None, width=10):
    columns = choice_columns(
        np.array(test)[None],
        np.array(reference)[None],
        None if scores is None else np.float32(scores)[None],
        width,
    )
    return {name: column[0] for name, column in columns.items()}


def test_choices_are_sets():
    got = choices([[2, 1, 0], [5, 6, 7]], [[0, 1, 2], [5, 6, 8]])
    assert got["overlap"] == pytest.approx((1 + 2 / 3) / 2)
    assert got["overlap_min"] == pytest.approx(2 / 3)
    assert got["worst_index"] == 1
    assert (got["invalid"], got["duplicates"]) == (0, 0)
    assert math.isnan(got["mass_lost"])


@pytest.mark.parametrize(
    ("ids", "invalid", "duplicates", "overlap"),
    [
        pytest.param([0, 1, 1], 0, 1, 2 / 3, id="duplicate"),
        pytest.param([0, 1, 99], 1, 0, 2 / 3, id="out of range"),
        pytest.param([0, 1, -7], 1, 0, 2 / 3, id="negative"),
        pytest.param([0, 1, -1], 1, 0, 2 / 3, id="slot left empty"),
        pytest.param([0, 1, 3], 1, 0, 2 / 3, id="not yet visible"),
    ],
)
def test_bad_ids_are_counted(ids, invalid, duplicates, overlap):
    got = choices([ids], [[0, 1, 2]], scores=[[3, 2, 1, -np.inf]], width=4)
    assert (got["invalid"], got["duplicates"]) == (invalid, duplicates)
    assert got["overlap"] == pytest.approx(overlap)


def test_padding_is_no_choice():
    got = choices([[0, -1, -1], [-1, -1, -1]], [[0, -1, -1], [-1, -1, -1]])
    assert (got["overlap"], got["invalid"]) == (1.0, 0)
    assert choices([[0]], [[-1]])["overlap"] == 0.0


def test_mass_lost_and_margin():
    got = choices([[0, 2]], [[0, 1]], scores=[[4, 3, 2, -1]], width=4)
    assert got["mass_lost"] == pytest.approx(1 / 7)
    assert got["margin_min"] == pytest.approx(1 / 3)
    assert got["margin_flipped"] == pytest.approx(1 / 3)


def test_a_swap_between_ties_costs_nothing():
    got = choices([[0, 2]], [[0, 1]], scores=[[4, 3, 3, -1]], width=4)
    assert (got["mass_lost"], got["margin_flipped"]) == (0, 0)
    assert got["overlap"] == 0.5


def test_no_cut_no_margin():
    got = choices([[0, 1]], [[0, 1]], scores=[[4, 3, -np.inf, -np.inf]], width=4)
    assert math.isnan(got["margin_min"])


def test_rows_that_choose_nothing():
    nothing = np.empty((1, 3, 0), np.int32)
    columns = choice_columns(nothing, nothing, None, 8)
    assert (columns["overlap"][0], columns["invalid"][0], columns["changed"][0]) == (1.0, 0, 0.0)


def test_no_choices_at_all():
    columns = choice_columns(np.empty((1, 0, 4), np.int32), np.empty((1, 0, 4), np.int32), None, NEVER)
    assert math.isnan(columns["overlap"][0])
    assert columns["worst_index"].tolist() == [-1]


def test_top_k_ties_go_to_the_smaller_index():
    scores = np.float32([[1, 3, 3, 2], [1, -np.inf, -np.inf, -np.inf]])
    assert metrics.top_k(scores, np.array([2, 1])).tolist() == [[1, 2], [0, -1]]


def test_kl_hand_computed():
    p, q = np.log(np.float64([0.5, 0.25, 0.25])), np.log(np.float64([0.25, 0.5, 0.25]))
    got = logit_columns(np.stack([q, p])[None], np.stack([p + 7, p])[None])
    worst = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert got["kl_worst"][0] == pytest.approx(worst)
    assert got["kl_nats"][0] == pytest.approx(worst / 2)
    assert got["top1"][0] == 0.5


def test_kl_of_equal_is_zero_and_of_nan_is_nan():
    logits = np.random.default_rng(0).standard_normal((1, 3, 50)).astype(np.float32)
    assert logit_columns(logits, logits)["kl_nats"][0] == 0
    assert logit_columns(logits, logits)["top1"][0] == 1
    broken = logits.copy()
    broken[0, 1, 2] = np.nan
    assert math.isnan(logit_columns(broken, logits)["kl_nats"][0])
    assert math.isnan(logit_columns(broken, logits)["top1"][0])
    assert math.isnan(logit_columns(logits[:, :0], logits[:, :0])["kl_nats"][0])


@given(arrays(np.float32, (1, 2, 6), elements=st.floats(-50, 50, width=32)), st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_kl_is_never_negative_and_ignores_a_shift(logits, shift):
    other = logits[..., ::-1]
    got = logit_columns(other, logits)["kl_nats"]
    assert got >= 0
    assert logit_columns(other + shift, logits)["kl_nats"] == pytest.approx(got, rel=1e-3, abs=1e-4)
