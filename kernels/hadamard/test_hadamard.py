"""The fast transform against Sylvester's matrix written out by bit parity."""

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
)
from kernels.hadamard.ref import hadamard


def sylvester(size):
    """H[i, j] = (-1)^(number of bits that i and j share)."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


@pytest.mark.parametrize("T", SIZES)
def test_equals_the_matrix(T):
    x = draw(T, 128, seed=1, decades=2)
    want = x.numpy().astype(np.longdouble) @ sylvester(128) / np.sqrt(np.longdouble(128))
    slack = 2.0**-50 * x.double().abs().sum(-1, keepdim=True).numpy()
    assert_nearest(hadamard(x), want, slack=slack)


@pytest.mark.parametrize("D", [1, 2, 4, 16, 64, 256])
def test_one_hot_rows_give_rows_of_the_matrix(D):
    want = (sylvester(D) * np.float64(D) ** -0.5).astype(np.float32)
    assert_bitwise(hadamard(torch.eye(D)), want)


def test_it_is_orthogonal_and_its_own_inverse():
    x = draw(9, 128, seed=2)
    y = hadamard(x)
    np.testing.assert_allclose(hadamard(y), x, atol=2.0**-23 * 8)
    np.testing.assert_allclose(y.double().norm(dim=-1), x.double().norm(dim=-1), rtol=1e-6)


def test_it_is_exact_on_integers_where_the_norm_is_a_power_of_two():
    x = torch.from_numpy(np.random.default_rng(3).integers(-1000, 1000, (9, 64)).astype(np.float32))
    assert_bitwise(hadamard(x), (x.numpy().astype(np.int64) @ sylvester(64) / 8).astype(np.float32))
    assert_bitwise(hadamard(hadamard(x)), x)


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    assert_rows_alone(lambda rows: hadamard(rows["x"]), {"x": draw(T, 3, 64, seed=4)})


def test_threads_powers_of_two_and_signs():
    x = draw(129, 128, seed=5)
    assert_threads_agree(lambda: hadamard(x))
    assert_bitwise(hadamard(x * 2.0**-60), hadamard(x) * 2.0**-60)
    assert_bitwise(hadamard(-x), -hadamard(x))


def test_edges():
    x = torch.zeros(4, 8)
    x[1], x[2, 3], x[3, 0] = 5.0, math.nan, math.inf
    y = hadamard(x)
    assert y[0].tolist() == [0.0] * 8
    assert y[1].tolist() == [float(np.float32(40 * 8**-0.5)), *[0.0] * 7]
    assert y[2].isnan().all()
    assert not y[3].isfinite().any()
    assert hadamard(torch.full((1, 4), 3e38)).tolist() == [[math.inf, 0.0, 0.0, 0.0]]  # 6e38 in FP32
    assert hadamard(torch.full((1, 4), 2.0**-149)).tolist() == [[2.0**-148, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("D", [0, 3, 12, 127])
def test_other_sizes_are_refused(D):
    with pytest.raises(ValueError, match=f"last axis is {D}, must be a power of two"):
        hadamard(torch.zeros(2, D))
