"""RMSNorm's kernel against the ref, under a bound that is derived, and its exact properties."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels._check import SIZES, assert_bitwise, assert_differs, assert_fault_seen, assert_rows_alone, draw
from kernels.formats.device import EXACT
from kernels.rmsnorm import kernel, ref

EPS = 1e-6
BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("poisoned")


def ulps(D: int) -> float:
    """Relative error in units of 2^-24: a sum of D squares, then what turns it into the result.

    Eight roundings of a chain, one a level above, of the mean and of its sum with eps, all halved by the root; the
    root, its reciprocal and two products; and the ref's own.
    """
    levels = max(0, math.ceil(math.log2(D)) - 3)
    return (8 + levels + 2) / 2 + 5


def assert_near(got, want, D):
    error = (got.double().cpu() - want.double()).abs()
    assert (error <= ulps(D) * 2.0**-24 * want.double().abs() + 2.0**-149).all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("T", SIZES)
def test_every_number_of_rows(T, dtype, accelerator):
    x, weight = draw(T, 130, seed=1, decades=1).to(dtype), draw(130, seed=2)
    want = ref.rmsnorm(x, weight, eps=EPS)
    got = kernel.rmsnorm(x.to(accelerator), weight.to(accelerator), eps=EPS, dtype=F32)
    assert_near(got, want, 130)
    narrow = kernel.rmsnorm(x.to(accelerator), weight.to(accelerator), eps=EPS)
    assert_bitwise(narrow.float().cpu(), got.to(BF16).float().cpu())


@pytest.mark.parametrize("D", [1, 2, 64, 1000, 4096, 7168])
def test_every_width(D, accelerator):
    x, weight = draw(3, D, seed=3) * 1e-3, draw(D, seed=4).to(BF16)  # the mean square is about eps
    for w in (weight, None):
        on_device = None if w is None else w.to(accelerator)
        got = kernel.rmsnorm(x.to(accelerator), on_device, eps=EPS, dtype=F32)
        assert_near(got, ref.rmsnorm(x, w, eps=EPS), D)


@pytest.mark.parametrize("fault", ["eps", "count", "weight", "dtype"])
def test_a_planted_fault_is_seen(fault, accelerator):
    x, weight = draw(3, 130, seed=3) * 1e-3, draw(130, seed=4)
    want = ref.rmsnorm(x, weight, eps=EPS)
    got = kernel.rmsnorm(
        x.to(accelerator),
        (weight * (1 + 2.0**-19) if fault == "weight" else weight).to(accelerator),
        eps=EPS * 1.0001 if fault == "eps" else EPS,
        dtype=BF16 if fault == "dtype" else F32,
    )
    got = got * (130 / 131) ** 0.5 if fault == "count" else got
    assert_fault_seen(lambda: assert_near(got, want, 130))


def test_rows_may_be_strided_and_do_not_see_their_batch(accelerator):
    wide = draw(40, 300, seed=5, decades=1).to(accelerator)
    weight = draw(130, seed=6).to(accelerator)
    x = wide[::2, 20:150]
    got = kernel.rmsnorm(x, weight, eps=EPS)
    assert_bitwise(got.float().cpu(), kernel.rmsnorm(x.contiguous(), weight, eps=EPS).float().cpu())
    assert_rows_alone(lambda rows: kernel.rmsnorm(rows["x"], weight, eps=EPS).float().cpu(), {"x": x})


def test_many_rows_have_the_bits_of_few(accelerator):
    """No program knows how many there are."""
    x = draw(140, 64, seed=7, decades=1).to(accelerator)
    got = kernel.rmsnorm(x, None, eps=EPS, dtype=F32)
    for row in (0, 131, 139):
        assert_bitwise(got[row].cpu(), kernel.rmsnorm(x[row : row + 1], None, eps=EPS, dtype=F32)[0].cpu())


def by_hand(x, total):
    """The norm of one FP32 row from its sum of squares, every step rounded; torch's root is not."""
    mean = np.float32(total) / np.float32(x.size) + np.float32(EPS)
    return x * (np.float32(1) / np.sqrt(mean))


def chains(x):
    """Sums of squares of eight neighbours each, every step a multiply-add (in 80-bit arithmetic)."""
    total = np.zeros(x.size // 8, np.float32)
    for i in range(8):
        value = x[i::8].astype(np.longdouble)
        total = (value * value + total).astype(np.float32)
    return total


def order_row(D, step=1):
    """A row (1, D) of a large square, and of three ones that are lost if they join it one by one; and its sum.

    Halves onto halves add up the odd groups (of ``step`` sixteens) first. Neighbours, or one after the other, lose
    the ones: 2^24.
    """
    row = np.zeros((1, D), np.float32)
    row[0, 0], row[0, [16 * step * group for group in (1, 3, 5)]] = 2.0**12, 1
    return row, 2.0**24 + 4  # 2^24 + 3 is a tie


def test_the_sum_is_chains_of_eight_in_pairs_then_halves_onto_halves(accelerator):
    def norm(x):
        return kernel.rmsnorm(torch.from_numpy(x).to(accelerator), None, eps=EPS, dtype=F32).cpu()

    x = draw(1, 64, seed=8).numpy()
    eights = chains(x[0])
    sixteens = eights[::2] + eights[1::2]
    assert_bitwise(norm(x), by_hand(x, (sixteens[0] + sixteens[2]) + (sixteens[1] + sixteens[3])))
    # most orders give a drawn row's bits: these rows are made to tell them apart
    row, total = order_row(128)
    assert_bitwise(norm(row), by_hand(row, total))
    assert_differs(norm(row), by_hand(row, 2.0**24))
    chain = np.zeros((1, 64), np.float32)
    chain[0, 0], chain[0, 1:8] = (
        2.0**12,
        np.sqrt(np.float32(3)),
    )  # of a square just under 3, which rounds to 3
    assert chains(chain[0])[0] == 2.0**24 + 14
    assert_bitwise(norm(chain), by_hand(chain, 2.0**24 + 14))
    assert_differs(norm(chain), by_hand(chain, 2.0**24 + 28))  # products rounded, then added


def test_a_norm_inside_a_kernel_of_several_rows_has_the_same_bits(accelerator):
    """What kv's and q's kernels take from here: rows beside each other in one program."""
    x = draw(32, 512, seed=9, decades=1).to(accelerator)
    got = torch.empty(32, device=accelerator)
    _inverses[(8,)](x, got, 4, 512, **EXACT)
    assert_bitwise((x * got[:, None]).cpu(), kernel.rmsnorm(x, None, eps=EPS, dtype=F32).cpu())


@triton.jit
def _inverses(x_ptr, y_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x = tl.load(x_ptr + row[:, None] * COLS + col[None, :])
    tl.store(y_ptr + row, kernel.inverse_rms(x, COLS, 1e-6, ROWS, COLS))


def test_non_finite_values_stay_in_their_row(accelerator):
    x = draw(4, 8, seed=13)
    clean = kernel.rmsnorm(x.to(accelerator), None, eps=EPS, dtype=F32).cpu()
    x[1, 3], x[2, 0] = math.nan, -math.inf
    y = kernel.rmsnorm(x.to(accelerator), None, eps=EPS, dtype=F32).cpu()
    assert y[1].isnan().all()
    assert y[2, 0].isnan()
    assert (y[2, 1:] == 0).all()
    assert_bitwise(y[[0, 3]], clean[[0, 3]])


def test_zeros_stay_zero_and_signed(accelerator):
    x = torch.zeros(2, 7)
    x[1] = -0.0
    y = kernel.rmsnorm(x.to(accelerator), None, eps=EPS, dtype=F32).cpu()
    assert_bitwise(y, x)


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (torch.zeros(3, 8, dtype=torch.float64), None, TypeError),
        (torch.zeros(3, 8).T, None, ValueError),
        (torch.zeros(3, 8), torch.zeros(7), ValueError),
        (torch.zeros(3, 40000), None, ValueError),
        (torch.zeros(8), None, ValueError),
    ],
)
def test_a_misfit_is_refused_by_name(x, weight, error):
    with pytest.raises(error, match="rmsnorm: "):
        kernel.rmsnorm(x, weight, eps=EPS)
