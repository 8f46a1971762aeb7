"""The product against integer arithmetic, and its independence of order, batch and threads, bit for bit."""

import math
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_differs, assert_threads_agree, draw, num_changed
from kernels.formats import bf16, fp8_block
from kernels.matmul.ref import MAX_K, exact_sum, matmul, slices


def scaled(x):
    """Python integers x * 2^149 of finite FP32 values, through exact fractions."""
    out = np.empty(tuple(x.shape), dtype=object)
    for at, value in np.ndenumerate(x.double().numpy()):
        numerator, denominator = float(value).as_integer_ratio()
        out[at] = numerator * (2**149 // denominator)
    return out


def from_fraction(numerator, power):
    """float64 nearest to ``numerator * 2^-power``, ties to even, in float64's normal range."""
    return numerator / (1 << power)  # Python divides integers with one rounding


def sliced_oracle(a, b):
    """The documented splitting in Python integers: what matmul must give, bit for bit."""

    def cut(v, exponent):
        high = round_half_even(v, exponent - 19)
        low = round_half_even(v - high * 2 ** (exponent - 19 + 300), exponent - 38)
        return high, low

    def round_half_even(v, power):  # v is an integer in units of 2^-300
        unit = 2 ** (power + 300)
        quotient, rest = divmod(v, unit)
        up = 2 * rest > unit or (2 * rest == unit and quotient % 2 == 1)
        return quotient + up

    big_a, big_b = scaled(a) * 2**151, scaled(b) * 2**151
    top_a = [math.frexp(float(row.abs().max()))[1] for row in a]
    top_b = [math.frexp(float(col.abs().max()))[1] for col in b.T]
    out = np.empty((len(a), b.shape[1]))
    for m in range(len(a)):
        parts_a = [cut(v, top_a[m]) for v in big_a[m]]
        for n in range(b.shape[1]):
            parts_b = [cut(v, top_b[n]) for v in big_b[:, n]]
            high = sum(x[0] * y[0] for x, y in zip(parts_a, parts_b, strict=True))
            cross = sum(x[0] * y[1] + x[1] * y[0] for x, y in zip(parts_a, parts_b, strict=True))
            power = 57 - top_a[m] - top_b[n]
            total = (high << 19) + cross
            out[m, n] = from_fraction(total, power) if power >= 0 else float(total << -power)
    return out


def bound(a, b):
    """2^-36 x K x row maximum x column maximum, and FP64's last rounding: the docstring's promise."""
    size = a.shape[1] * a.double().abs().amax(1)[:, None] * b.double().abs().amax(0)
    return (2.0**-36 * size).numpy()


@pytest.mark.parametrize("decades", [0.0, 3.0, 12.0])
@pytest.mark.parametrize("T", SIZES)
def test_error_is_within_the_bound_of_the_exact_product(T, decades):
    a, b = draw(T, 129, seed=1, decades=decades), draw(129, 3, seed=2, decades=decades)
    exact = scaled(a) @ scaled(b)  # in units of 2^-298
    want = np.array([[from_fraction(v, 298) for v in row] for row in exact]).reshape(T, 3)
    got = matmul(a, b)
    assert got.dtype == torch.float64
    assert (np.abs(got.numpy() - want) <= bound(a, b) + np.abs(want) * 2.0**-53).all()


def test_error_bound_is_reached_within_a_factor():
    # FP64 values whose slices leave half a unit each: three products of 2^-38 a term
    a = torch.full((1, 64), 1 - 2.0**-19 + 2.0**-38, dtype=torch.float64)
    a[0, 0] = 1.0
    error = float(matmul(a, a.T) - (a.numpy().astype(np.longdouble) ** 2).sum().astype(np.float64))
    assert 2.0**-37 < abs(error) / 64 < 2.0**-36


@pytest.mark.parametrize("decades", [0.0, 4.0, 30.0])
def test_bits_are_those_of_the_documented_slices(decades):
    a, b = draw(9, 33, seed=3, decades=decades), draw(33, 5, seed=4, decades=decades)
    assert_bitwise(matmul(a, b), sliced_oracle(a, b))


def hostile(rows, size, seed):
    """FP32 rows over 2^-100..2^100, elements over 2^-40..2^40 of that, a denormal row, a huge row."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size))
    x = x * np.exp2(rng.integers(-100, 80, (rows, 1))) * np.exp2(rng.integers(-40, 20, (rows, size)))
    x[0] = rng.integers(-9, 10, size) * 2.0**-149
    x[1] = rng.uniform(-1, 1, size) * 3.4e38
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("K", [7, 1000, 4097, MAX_K])
def test_order_of_the_sum_does_not_matter(K):
    a, b = hostile(5, K, seed=5), hostile(3, K, seed=6).T
    order = torch.from_numpy(np.random.default_rng(K).permutation(K))
    whole = matmul(a, b)
    assert_bitwise(matmul(a[:, order], b[order]), whole)
    assert_bitwise(matmul(a.flip(1), b.flip(0)), whole)
    assert_bitwise(matmul(b.T, a.T), whole.T.contiguous())
    assert whole.isfinite().all()


def test_a_plain_product_would_depend_on_order():
    a, b = hostile(5, 4097, seed=5).double(), hostile(3, 4097, seed=6).double().T
    order = torch.from_numpy(np.random.default_rng(0).permutation(4097))
    assert_differs(a[:, order] @ b[order], a @ b)


def test_longest_sum_of_the_largest_slices_is_exact():
    # every high slice is 2^19 units: the sum is 2^15 * 2^38 = 2^53 units, the last exact one
    just_under = float(np.nextafter(np.float32(1), np.float32(0)))
    a = torch.full((1, MAX_K), just_under)
    b = a.T.clone()
    b[::2] = -just_under
    b[0] = just_under
    assert matmul(a, b).item() == matmul(a.flip(1), b.flip(0)).item()
    exact = (scaled(a[:, :1]) @ scaled(b[:1])).item() * 2  # all but the first pair cancel
    assert matmul(a, b).item() == pytest.approx(exact / 2**298, rel=2.0**-20)
    assert matmul(a, a.T).item() == pytest.approx(MAX_K * just_under**2, rel=2.0**-36)


def test_longer_sums_are_refused():
    a = torch.zeros(1, MAX_K + 1)
    with pytest.raises(ValueError, match=r"K = 32769 is over 32768"):
        matmul(a, a.T)
    with pytest.raises(ValueError, match=r"K = 32769"):
        matmul(a, a.T, narrow=True)
    with pytest.raises(ValueError, match="length 32769"):
        slices(a, dim=-1)


@pytest.mark.parametrize("T", SIZES)
def test_rows_and_columns_do_not_see_each_other(T):
    a, b = draw(T, 130, seed=7, decades=6), draw(130, 67, seed=8, decades=6)
    whole = matmul(a, b)
    for row in range(0, T, 41):
        assert_bitwise(matmul(a[row : row + 1], b), whole[row : row + 1])
    for col in (0, 1, 63, 66):
        assert_bitwise(matmul(a, b[:, col : col + 1]), whole[:, col : col + 1])
    assert_bitwise(matmul(a, b[:, :5]), whole[:, :5])
    assert_bitwise(matmul(a[T // 2 :], b), whole[T // 2 :])


def test_batch_axes_are_independent_products():
    a, b = draw(4, 3, 9, 21, seed=9), draw(3, 21, 5, seed=10)
    whole = matmul(a, b)
    for i in range(4):
        for j in range(3):
            assert_bitwise(matmul(a[i, j], b[j]), whole[i, j])


def test_threads_do_not_change_bits():
    a, b = draw(64, 2048, seed=11, decades=3), draw(2048, 64, seed=12, decades=3)
    assert_threads_agree(lambda: matmul(a, b))


@pytest.mark.parametrize("power", [-90, -1, 1, 70])
def test_powers_of_two_commute(power):
    a, b = draw(5, 129, seed=13), draw(129, 4, seed=14)
    scale = torch.exp2(torch.tensor([power, 0, 1, 2, -3.0]))
    assert_bitwise(matmul(a * scale[:, None], b), matmul(a, b) * scale.double()[:, None])
    assert_bitwise(matmul(a, b * 2.0**power), matmul(a, b) * 2.0**power)


def test_denormal_rows_meet_huge_columns():
    a = torch.tensor([[2.0**-149, -3 * 2.0**-149, 0.0]])
    b = torch.tensor([[2.0**127], [2.0**120], [2.0**127]])
    assert matmul(a, b).item() == 2.0**-22 - 3 * 2.0**-29


def test_zeros_give_zeros():
    a = draw(3, 8, seed=15)
    a[1] = 0
    got = matmul(a, draw(8, 2, seed=16))
    assert got[1].tolist() == [0.0, 0.0]
    assert not got[1].signbit().any()
    for rows in (1, 2):  # at K = 1 BLAS gives 0 for one row and -0 for two
        one_key = matmul(torch.zeros(rows, 1), -draw(1, 50, seed=27).abs())
        assert_bitwise(one_key, torch.zeros(rows, 50, dtype=torch.float64))
    assert_bitwise(matmul(torch.zeros(3, 8), torch.zeros(8, 2)), torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(("M", "K", "N"), [(0, 4, 3), (3, 0, 2), (3, 4, 0), (0, 0, 0)])
def test_empty_axes(M, K, N):
    for narrow in (False, True):
        got = matmul(torch.ones(M, K), torch.ones(K, N), narrow=narrow)
        assert_bitwise(got, torch.zeros(M, N, dtype=torch.float64))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_in_their_rows_and_columns(bad, narrow):
    a, b = bf16.round(draw(7, 12, seed=17)), bf16.round(draw(12, 9, seed=18))
    clean = matmul(a, b, narrow=narrow)
    a_bad, b_bad = a.clone(), b.clone()
    a_bad[2, 5], b_bad[3, 4] = bad, bad
    got = matmul(a_bad, b_bad, narrow=narrow)
    touched = torch.zeros(7, 9, dtype=torch.bool)
    touched[2], touched[:, 4] = True, True
    assert not got[touched].isfinite().any()
    assert_bitwise(got[~touched], clean[~touched])


def test_infinity_times_zero_is_nan():
    assert matmul(torch.tensor([[math.inf, 1.0]]), torch.tensor([[0.0], [1.0]])).isnan().all()


@pytest.mark.parametrize("K", [64, 513])
def test_narrow_is_exact_while_its_terms_are_near(K):
    a = fp8_block.round(bf16.round(draw(9, K, seed=19)).abs().clamp(0.25, 4), K) * draw(9, K, seed=20).sign()
    b = bf16.round(draw(K, 7, seed=21).abs().clamp(0.25, 4)) * draw(K, 7, seed=22).sign()
    exact = scaled(a) @ scaled(b)
    want = np.array([[from_fraction(v, 298) for v in row] for row in exact])
    order = torch.from_numpy(np.random.default_rng(K).permutation(K))
    assert_bitwise(matmul(a, b, narrow=True), want)
    assert_bitwise(matmul(a[:, order], b[order], narrow=True), want)


def test_narrow_beyond_its_span_depends_on_order_and_the_slices_do_not():
    # 2^60 + 1 - 2^60: a plain sum keeps or loses the 1 by its place
    a = torch.tensor([[2.0**30, 1.0, -(2.0**30)]])
    b = torch.tensor([[2.0**30], [1.0], [2.0**30]])
    orders = [torch.tensor(o) for o in ([0, 1, 2], [0, 2, 1], [1, 0, 2])]
    products = (a[0] * b[:, 0]).double()
    plain = {reduce(add, products[order].tolist()) for order in orders}  # from 3.12 on sum() compensates
    assert plain == {0.0, 1.0}
    assert len({matmul(a[:, order], b[order]).item() for order in orders}) == 1


def test_half_precision_inputs_are_widened():
    a, b = draw(3, 40, seed=23), draw(40, 2, seed=24)
    assert_bitwise(matmul(a.bfloat16(), b.bfloat16()), matmul(bf16.round(a), bf16.round(b)))


@pytest.mark.parametrize("size", [1, 3, 640, MAX_K])
def test_exact_sum_does_not_depend_on_order_and_keeps_its_bound(size):
    x = hostile(6, size, seed=25)
    order = torch.from_numpy(np.random.default_rng(size).permutation(size))
    got = exact_sum(x, -1)
    assert_bitwise(exact_sum(x[:, order], -1), got)
    assert_bitwise(exact_sum(x.T, 0), got)
    assert_bitwise(exact_sum(torch.cat((x, torch.zeros(6, MAX_K - size)), dim=1), -1), got)
    assert_bitwise(exact_sum(x[2:3], -1), got[2:3])
    want = np.array([math.fsum(row) for row in x.double().tolist()])
    assert (np.abs(got.numpy() - want) <= 2.0**-38 * size * x.abs().amax(1).double().numpy()).all()


def test_exact_sum_sees_what_a_plain_sum_drops():
    x = draw(50, 64, 83, seed=26).double() ** 3
    assert num_changed(x.sum(1)[..., :3], x[..., :3].contiguous().sum(1))  # torch: by the column's place
    assert_bitwise(exact_sum(x, 1)[..., :3], exact_sum(x[..., :3].contiguous(), 1))


def test_exact_sum_of_edges():
    assert exact_sum(torch.zeros(3, 0), -1).tolist() == [0.0, 0.0, 0.0]
    assert exact_sum(torch.zeros(0, 3), -1).shape == (0,)
    assert exact_sum(torch.tensor([[math.inf, 1.0], [math.inf, -math.inf]]), -1).isfinite().sum() == 0
    assert exact_sum(torch.tensor([1.0, math.nan]), -1).isnan()
    with pytest.raises(ValueError, match="length 32769 is over 32768"):
        exact_sum(torch.zeros(MAX_K + 1), -1)
