"""RMSNorm against 80-bit arithmetic, its exact properties, edges, and its one rounding point."""

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
    assert_stored_once,
    assert_threads_agree,
    draw,
    to_bf16,
)
from kernels.formats import bf16
from kernels.rmsnorm.ref import rmsnorm

EPS = 1e-6


def oracle(x, weight, eps):
    wide = x.numpy().astype(np.longdouble)
    y = wide / np.sqrt((wide * wide).sum(-1, keepdims=True) / wide.shape[-1] + eps)
    return y if weight is None else y * weight.numpy().astype(np.longdouble)


@pytest.mark.parametrize("decades", [0.0, 3.0, 15.0])
@pytest.mark.parametrize("T", SIZES)
def test_equals_80_bit_arithmetic_rounded_once(T, decades):
    x, weight = draw(T, 1000, seed=1, decades=decades), draw(1000, seed=2)
    assert_nearest(rmsnorm(x, weight, eps=EPS), oracle(x, weight, EPS))
    assert_nearest(rmsnorm(x, None, eps=EPS), oracle(x, None, EPS))


@pytest.mark.parametrize("D", [1, 2, 64, 4096, 7168])
def test_every_hidden_size(D):
    x, weight = draw(5, D, seed=3) * 1e-3, draw(D, seed=4)  # the mean square is about eps
    assert_nearest(rmsnorm(x, weight, eps=EPS), oracle(x, weight, EPS))


def test_only_the_last_axis_is_reduced():
    x, weight = draw(5, 3, 64, seed=5), draw(64, seed=6)
    assert_bitwise(rmsnorm(x, weight, eps=EPS), rmsnorm(x.flatten(0, 1), weight, eps=EPS).view(5, 3, 64))


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    weight = draw(515, seed=7)
    assert_rows_alone(
        lambda rows: rmsnorm(rows["x"], weight, eps=EPS), {"x": draw(T, 515, seed=8, decades=2)}
    )


def test_threads_do_not_change_bits():
    assert_threads_agree(lambda: rmsnorm(draw(1, 28672, seed=9), None, eps=EPS))  # the flat norm of Pro's mHC
    assert_threads_agree(lambda: rmsnorm(draw(129, 4096, seed=9), None, eps=EPS))


def test_powers_of_two_commute():
    x, weight = draw(9, 130, seed=10), draw(130, seed=11)
    y = rmsnorm(x, weight, eps=0.0)
    assert_bitwise(rmsnorm(x * 2.0**-20, weight, eps=0.0), y)
    assert_bitwise(rmsnorm(x, weight * 2.0**10, eps=EPS), rmsnorm(x, weight, eps=EPS) * 2.0**10)
    assert_bitwise(rmsnorm(-x, weight, eps=EPS), -rmsnorm(x, weight, eps=EPS))


def test_narrower_inputs_are_widened_first():
    x = draw(4, 96, seed=12)
    assert_bitwise(rmsnorm(x.bfloat16(), None, eps=EPS), rmsnorm(bf16.round(x), None, eps=EPS))


def test_hand_computed_rows():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [5.0, 5.0], [-0.0, 2.0]])
    y = rmsnorm(x, torch.tensor([1.0, 10.0]), eps=0.5)
    want = [3 / math.sqrt(13), 40 / math.sqrt(13), 0, 0, 5 / math.sqrt(25.5), 50 / math.sqrt(25.5)]
    np.testing.assert_allclose(y[:3].flatten(), want, rtol=1e-7)
    assert y[3, 0] == 0
    assert y[3, 0].signbit()


def test_equal_values_become_one_and_zeros_stay_zero_without_eps_on_equal_rows():
    assert rmsnorm(torch.full((2, 7), -3.0), None, eps=0.0).tolist() == [[-1.0] * 7] * 2
    assert rmsnorm(torch.zeros(2, 7), None, eps=EPS).tolist() == [[0.0] * 7] * 2
    assert rmsnorm(torch.zeros(1, 7), None, eps=0.0).isnan().all()  # 0 / 0


def test_extreme_magnitudes_do_not_overflow_or_vanish():
    x = torch.full((2, 4), 3e38)
    x[1] = 2.0**-149
    y = rmsnorm(x, None, eps=0.0)
    assert y.tolist() == [[1.0] * 4] * 2
    assert (rmsnorm(x[1:], None, eps=1e-6) > 0).all()  # 2^-149 / 1e-3: not flushed


def test_non_finite_values_stay_in_their_row():
    x = draw(4, 8, seed=13)
    clean = rmsnorm(x, None, eps=EPS)
    x[1, 3], x[2, 0] = math.nan, -math.inf
    y = rmsnorm(x, None, eps=EPS)
    assert y[1].isnan().all()
    assert y[2, 0].isnan()
    assert (y[2, 1:] == 0).all()  # finite over an infinite mean
    assert_bitwise(y[[0, 3]], clean[[0, 3]])


def test_out_is_the_last_step_and_happens_once():
    x, weight = draw(129, 130, seed=14), draw(130, seed=15)
    assert_stored_once(lambda out: rmsnorm(x, weight, eps=EPS, out=out))
    assert_stored_once(lambda out: rmsnorm(x, None, eps=EPS, out=out))


@pytest.mark.parametrize("T", SIZES)
def test_bf16_store_equals_the_emulation(T):
    x, weight = draw(T, 130, seed=16), draw(130, seed=17)
    want = to_bf16(oracle(x, weight, EPS).astype(np.float32))
    assert_bitwise(rmsnorm(x, weight, eps=EPS, out=bf16.round), want)


def test_a_rounding_in_another_place_would_show():
    x, weight = draw(129, 130, seed=18), draw(130, seed=19)
    stored = rmsnorm(x, weight, eps=EPS, out=bf16.round)
    before_weight = to_bf16(to_bf16(oracle(x, None, EPS).astype(np.float32)) * weight.numpy())
    narrow_input = to_bf16(oracle(bf16.round(x), weight, EPS).astype(np.float32))
    narrow_weight = to_bf16(oracle(x, bf16.round(weight), EPS).astype(np.float32))
    for fault in (before_weight, narrow_input, narrow_weight):
        assert_differs(stored, fault)
