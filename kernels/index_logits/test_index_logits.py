"""The indexer's scores against a loop over heads, their independence of order and context, and edges."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_nearest,
    assert_rows_alone,
    assert_threads_agree,
    draw,
    num_changed,
)
from kernels.formats import bf16, e4m3, fp8_scaled, mxfp4
from kernels.hadamard.ref import hadamard
from kernels.index_logits.ref import ROWS, index_logits

H, D = 5, 64


def case(T, C=37, seed=0):
    """q, k, head weights of both signs."""
    return draw(T, H, D, seed=seed), draw(C, D, seed=seed + 1), draw(T, H, seed=seed + 2)


def oracle(q, k, weights, key_scale=None):
    q, k, weights = (x.numpy().astype(np.longdouble) for x in (q, k, weights))
    score = np.zeros((len(q), len(k)), np.longdouble)
    for head in range(q.shape[1]):
        score += weights[:, head, None] * np.maximum(q[:, head] @ k.T, 0)
    return score if key_scale is None else score * key_scale.numpy().astype(np.longdouble)


def slack(q, k, weights, key_scale=None):
    """The product's 2^-36 and the sum's 2^-38, carried through the heads."""
    dot = D * q.abs().double().amax((1, 2))[:, None] * k.abs().double().amax(1)
    bound = dot * weights.abs().double().sum(1)[:, None] * (2.0**-36 + H * 2.0**-38)
    return (bound if key_scale is None else bound * key_scale.double()).numpy()


@pytest.mark.parametrize("C", [1, 3, 129])
@pytest.mark.parametrize("T", SIZES)
def test_equals_a_loop_over_heads_in_80_bits(T, C):
    q, k, weights = case(T, C)
    scale = draw(C, seed=9).abs() + 0.1
    assert_nearest(index_logits(q, k, weights), oracle(q, k, weights), slack(q, k, weights))
    got = index_logits(q, k, weights, key_scale=scale)
    assert_nearest(got, oracle(q, k, weights, scale), slack(q, k, weights, scale))


@pytest.mark.parametrize("T", [1, 3, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_row_does_not_see_its_batch(T, narrow):
    q, k, weights = case(T, seed=3)
    q, k = bf16.round(q), e4m3.decode(fp8_scaled.quantise(k)[0])
    assert_rows_alone(
        lambda r: index_logits(r["q"], k, r["weights"], narrow=narrow), {"q": q, "weights": weights}
    )


@pytest.mark.parametrize("narrow", [False, True])
def test_a_key_does_not_see_the_others(narrow):
    q, k, weights = case(9, C=67, seed=5)
    q, k = e4m3.decode(fp8_scaled.quantise(q)[0]), e4m3.decode(fp8_scaled.quantise(k)[0])
    scale = draw(67, seed=6).abs()
    whole = index_logits(q, k, weights, key_scale=scale, narrow=narrow)
    for count in (1, 3, 7, 16, 66):  # a growing context
        few = index_logits(q, k[:count], weights, key_scale=scale[:count], narrow=narrow)
        assert_bitwise(few, whole[:, :count])
    order = torch.from_numpy(np.random.default_rng(7).permutation(67))
    moved = index_logits(q, k[order], weights, key_scale=scale[order], narrow=narrow)
    assert_bitwise(moved, whole[:, order])


def test_heads_may_come_in_any_order():
    q, k, weights = case(9, seed=8)
    q[:, 3] = q[:, 0]
    weights[:, 0] *= 1e20  # an FP64 sum keeps or loses the other heads by their place between these two
    weights[:, 3] = -weights[:, 0]
    order = torch.tensor([3, 1, 4, 0, 2])
    assert_bitwise(index_logits(q[:, order], k, weights[:, order]), index_logits(q, k, weights))


def test_threads_and_powers_of_two():
    q, k, weights = case(129, C=300, seed=11)
    whole = index_logits(q, k, weights)
    assert_threads_agree(lambda: index_logits(q, k, weights))
    assert_bitwise(index_logits(q * 4, k, weights), whole * 4)
    assert_bitwise(index_logits(q, k / 8, weights), whole / 8)
    assert_bitwise(index_logits(q, k, weights * 2), whole * 2)
    assert_bitwise(index_logits(q, k, weights, key_scale=torch.full((300,), 0.5)), whole / 2)


def test_exact_codes_give_the_same_bits_narrow_or_not():
    q, k, weights = case(40, seed=13)
    q_codes, k_codes = (e4m3.decode(fp8_scaled.quantise(x)[0]) for x in (q, k))
    want = index_logits(q_codes, k_codes, weights)
    assert_bitwise(index_logits(q_codes, k_codes, weights, narrow=True), want)
    q_fp4, k_fp4 = (mxfp4.round(hadamard(x)) for x in (q, k))
    assert_bitwise(index_logits(q_fp4, k_fp4, weights, narrow=True), index_logits(q_fp4, k_fp4, weights))


def test_hand_computed_scores():
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    k = torch.tensor([[3.0, 5.0], [-3.0, 5.0], [3.0, -5.0], [-3.0, -5.0], [0.0, 0.0]])
    weights = torch.tensor([[10.0, -1.0]])
    assert index_logits(q, k, weights).tolist() == [[20.0, -10.0, 30.0, 0.0, 0.0]]
    scale = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0])
    assert index_logits(q, k, weights, key_scale=scale).tolist() == [[20.0, -20.0, 15.0, 0.0, 0.0]]


def test_equal_keys_tie_exactly():
    q, k, weights = case(7, seed=15)
    k[11] = k[3]
    scores = index_logits(q, k, weights)
    assert_bitwise(scores[:, 11], scores[:, 3])


def test_empty_inputs():
    q, k, weights = case(3)
    assert index_logits(q, k[:0], weights).shape == (3, 0)
    assert index_logits(q[:0], k, weights[:0]).shape == (0, 37)
    assert index_logits(q[:0], k[:0], weights[:0]).shape == (0, 0)
    assert index_logits(q[:0], k, weights[:0]).dtype == torch.float32


def test_nan_stays_with_its_key_and_its_row():
    q, k, weights = case(6, seed=17)
    clean = index_logits(q, k, weights)
    q[2, 1, 0], k[5, 3], weights[4, 0] = math.nan, math.nan, math.nan
    got = index_logits(q, k, weights)
    touched = torch.zeros(6, 37, dtype=torch.bool)
    touched[2], touched[4], touched[:, 5] = True, True, True
    assert got[touched].isnan().all()  # ReLU does not hide it
    assert_bitwise(got[~touched], clean[~touched])


def test_faults_of_the_formula_would_show():
    q, k, weights = case(20, seed=19)
    scale = draw(37, seed=20).abs()
    got = index_logits(q, k, weights, key_scale=scale)
    dots = torch.einsum("thd,sd->ths", q.double(), k.double())
    stated = ((dots.relu() * weights[..., None]).sum(1) * scale).float()
    assert num_changed(got, stated) <= 2  # of 740: the product's 2^-36 where a sum meets an FP32 tie
    faults = {
        "no ReLU": (dots * weights[..., None]).sum(1) * scale,
        "ReLU after the weight": (dots * weights[..., None]).relu().sum(1) * scale,
        "ReLU after the sum": (dots * weights[..., None]).sum(1).relu() * scale,
        "key scale dropped": (dots.relu() * weights[..., None]).sum(1),
        "weights in BF16": (dots.relu() * bf16.round(weights)[..., None]).sum(1) * scale,
        "dots in FP32": (dots.float().relu().double() * weights[..., None]).sum(1) * scale,
    }
    for fault in faults.values():
        assert num_changed(got, fault.float()) > 40
