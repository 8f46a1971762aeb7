"""The router's scores, choice and weights against arithmetic and sorting by hand."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_differs,
    assert_nearest,
    assert_rows_alone,
    assert_threads_agree,
    draw,
)
from kernels.formats import bf16
from kernels.route.ref import choose_experts, expert_weights, hash_experts, router_scores

E, D, K = 13, 67, 4


def score_oracle(x, weight):
    """sqrt(log(1 + e^l)) in 80 bits, without overflow: max(l, 0) + log(1 + e^-|l|)."""
    logits = x.numpy().astype(np.longdouble) @ weight.numpy().astype(np.longdouble).T
    return np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits)))), logits


@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("T", SIZES)
def test_scores_equal_80_bit_arithmetic(T, size):
    x, weight = draw(T, D, seed=1) * size, draw(E, D, seed=2)
    want, _ = score_oracle(x, weight)
    # d score / d logit is at most score / 2, and under 0.5
    logit_error = 2.0**-36 * D * x.abs().double().amax(1)[:, None] * weight.abs().double().amax(1) if T else 0
    assert_nearest(router_scores(x, weight), want, slack=np.asarray(logit_error / 2) * want)


def test_scores_by_hand_and_at_the_ends():
    logits = [0.0, 1.0, 100.0, 101.0, 1e30, -50.0, -100.0, -200.0, -3e38]
    got = router_scores(torch.tensor(logits)[:, None], torch.ones(1, 1))[:, 0].double()
    want = [math.sqrt(math.log(2)), math.sqrt(math.log(1 + math.e)), 10.0, math.sqrt(101), 1e15]
    want += [math.exp(-25), math.exp(-50), math.exp(-100), 0.0]
    np.testing.assert_allclose(got, want, rtol=2.0**-23, atol=2.0**-150)
    assert got[7] > 0  # e^-100 is an FP32 subnormal: not flushed


def test_nan_and_infinity_stay_in_their_row_and_expert():
    x, weight = draw(5, D, seed=3), draw(E, D, seed=4)
    clean = router_scores(x, weight)
    x[2, 0], weight[6, 1] = math.nan, math.inf
    got = router_scores(x, weight)
    touched = torch.zeros(5, E, dtype=torch.bool)
    touched[2], touched[:, 6] = True, True
    assert not got[touched].isfinite().any()
    assert_bitwise(got[~touched], clean[~touched])


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    weight, bias = draw(E, D, seed=5), draw(E, seed=6)
    rows = {"x": draw(T, D, seed=7), "tokens": torch.arange(T)}
    table = torch.from_numpy(np.random.default_rng(8).integers(0, E, (T, K)))
    assert_rows_alone(lambda r: router_scores(r["x"], weight), rows)
    rows["scores"] = router_scores(rows["x"], weight)
    assert_rows_alone(lambda r: choose_experts(r["scores"], bias, K), rows)
    rows["ids"] = choose_experts(rows["scores"], bias, K)
    assert_rows_alone(lambda r: expert_weights(r["scores"], r["ids"], scaling=1.5), rows)
    assert_rows_alone(lambda r: hash_experts(r["tokens"], table), rows)


def test_experts_do_not_see_each_other_and_threads_do_not_matter():
    x, weight = draw(129, 512, seed=9), draw(64, 512, seed=10)
    whole = router_scores(x, weight)
    assert_threads_agree(lambda: router_scores(x, weight))
    for expert in (0, 17, 63):
        assert_bitwise(router_scores(x, weight[expert : expert + 1]), whole[:, expert : expert + 1])
    order = torch.from_numpy(np.random.default_rng(11).permutation(64))
    assert_bitwise(router_scores(x, weight[order]), whole[:, order])


def choice_oracle(scores, bias, k):
    steered = scores.numpy() + bias.numpy()  # FP32
    return np.array(
        [sorted(sorted(range(len(bias)), key=lambda e, r=row: (-r[e], e))[:k]) for row in steered], np.int64
    ).reshape(len(scores), k)


@pytest.mark.parametrize("k", [1, K, E])
@pytest.mark.parametrize("T", SIZES)
def test_choice_equals_a_stable_sort(T, k):
    ties = torch.from_numpy(np.random.default_rng([12, T]).integers(0, 4, (T, E)).astype(np.float32))
    for scores, bias in (
        (draw(T, E, seed=13), draw(E, seed=14)),
        (ties, torch.zeros(E)),
        (ties, ties.new_ones(E)),
    ):
        got = choose_experts(scores, bias, k)
        assert got.dtype == torch.int64
        assert_bitwise(got, choice_oracle(scores, bias, k))


def test_ties_among_many_experts_go_to_the_smaller_index():
    scores = torch.from_numpy(np.random.default_rng(20).integers(0, 3, (9, 384)).astype(np.float32))
    assert_bitwise(choose_experts(scores, torch.zeros(384), 6), choice_oracle(scores, torch.zeros(384), 6))


def test_choice_by_hand():
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.1, 0.9, 0.2, 0.9], [0.0, 0.3, 0.2, 0.1]])
    assert choose_experts(scores, torch.zeros(4), 2).tolist() == [[0, 1], [1, 3], [1, 2]]
    assert choose_experts(scores, torch.tensor([0.0, 0.0, 1.0, 0.0]), 2).tolist() == [[0, 2], [1, 2], [1, 2]]
    assert choose_experts(scores, torch.tensor([-1.0, 0.0, 0.0, 0.0]), 3).tolist() == [[1, 2, 3]] * 3
    # the sum is FP32: 1 + 2^-25 is 1, a tie
    near = torch.tensor([[2.0**-25, 0.0]])
    assert choose_experts(near, torch.ones(2), 1).tolist() == [[0]]
    assert choose_experts(near.flip(1), torch.ones(2), 1).tolist() == [[0]]


def test_a_nan_score_is_chosen_not_hidden():
    assert choose_experts(torch.tensor([[1.0, 5.0, math.nan]]), torch.zeros(3), 1).tolist() == [[2]]


def test_hash_layers_read_the_table_in_ascending_order():
    table = torch.tensor([[3, 1], [0, 2], [2, 0]], dtype=torch.int32)
    got = hash_experts(torch.tensor([2, 0, 0]), table)
    assert got.dtype == torch.int64
    assert got.tolist() == [[0, 2], [1, 3], [1, 3]]
    assert hash_experts(torch.zeros(0, dtype=torch.int64), table).shape == (0, 2)
    with pytest.raises(IndexError):
        hash_experts(torch.tensor([3]), table)


@pytest.mark.parametrize("T", SIZES)
def test_weights_equal_the_quotient_rounded_once(T):
    scores = draw(T, E, seed=15).abs()
    ids = choose_experts(scores, draw(E, seed=16), K)
    chosen = np.take_along_axis(scores.numpy().astype(np.longdouble), ids.numpy(), 1)
    want = chosen / (chosen.sum(1, keepdims=True) + np.longdouble(1e-20)) * 2.5
    got = expert_weights(scores, ids, scaling=2.5)
    assert_nearest(got, want)
    np.testing.assert_allclose(got.double().sum(1), 2.5, rtol=4 * 2.0**-24)


def test_the_bias_steers_the_choice_alone():
    scores = torch.tensor([[0.1, 0.3, 0.6]])
    bias = torch.tensor([10.0, 0.0, 0.0])
    ids = choose_experts(scores, bias, 2)
    assert ids.tolist() == [[0, 2]]
    assert_nearest(expert_weights(scores, ids, scaling=1.0), scores[:, [0, 2]].double().numpy() / 0.7, 2e-8)
    biased = expert_weights(scores + bias, ids, scaling=1.0)
    assert_differs(biased, expert_weights(scores, ids, scaling=1.0))


def test_weights_at_the_ends():
    ids = torch.tensor([[0, 1]])
    assert expert_weights(torch.zeros(1, 2), ids, scaling=1.5).tolist() == [[0.0, 0.0]]  # 1e-20 saves it
    tiny = expert_weights(torch.full((1, 2), 2.0**-149), ids, scaling=1.0)
    assert tiny.tolist() == [[np.float32(2.0**-149 / (2.0**-148 + 1e-20))] * 2]
    assert expert_weights(torch.full((1, 2), 3e38), ids, scaling=1.5).tolist() == [[0.75, 0.75]]
    scores = torch.tensor([[0.3, math.nan, 0.2], [0.3, math.nan, 0.2]])
    got = expert_weights(scores, torch.tensor([[0, 1], [0, 2]]), scaling=1.0)
    assert got[0].isnan().all()  # chosen: seen
    assert got[1].isfinite().all()  # not chosen: no effect


def test_scaling_by_powers_of_two_commutes():
    scores = draw(9, E, seed=17).abs()
    ids = choose_experts(scores, torch.zeros(E), K)
    assert_bitwise(expert_weights(scores, ids, scaling=2.0), expert_weights(scores, ids, scaling=1.0) * 2)


def test_faults_of_the_formula_would_show():
    x, weight = draw(40, D, seed=18), draw(E, D, seed=19)
    want, logits = score_oracle(x, weight)
    got = router_scores(x, weight)
    faults = {
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "softplus without the root": want**2,
        "input in BF16": score_oracle(bf16.round(x), weight)[0],
        "weight in BF16": score_oracle(x, bf16.round(weight))[0],
        "FP32 softplus with threshold 20": np.sqrt(np.where(logits > 2, logits, want**2)),
    }
    assert_nearest(got, want, slack=2.0**-33)
    for fault in faults.values():
        with pytest.raises(AssertionError, match="off, first at"):
            assert_nearest(got, fault, slack=2.0**-33)
