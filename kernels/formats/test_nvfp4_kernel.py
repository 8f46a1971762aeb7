"""NVFP4 inside kernels against NVFP4 in torch: bitwise, over every decade, tie and special value."""

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels._check import assert_bitwise
from kernels.formats import e2m1, e4m3, nvfp4
from kernels.formats import nvfp4_kernel as fmt
from kernels.formats.device import EXACT
from kernels.formats.test_device import COLS, empty, rows  # noqa: F401 - the fixture
from kernels.rmsnorm.row_kernel import group_max, load_row, row_top


@triton.jit
def _store(word, scale, code_ptr, scale_ptr, row, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(code_ptr + row * (GROUPS * 2) + at, word.to(tl.int32, bitcast=True))
    tl.store(scale_ptr + row * GROUPS + group, scale)


@triton.jit
def _own_gsa(x_ptr, code_ptr, scale_ptr, gsa_ptr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    x = load_row(x_ptr + row * (GROUPS * 16), GROUPS * 16, GROUPS)
    amax = group_max(x, GROUPS)
    word, scale, gsa = fmt.nvfp4_row(x, amax, row_top(amax), GROUPS)
    _store(word, scale, code_ptr, scale_ptr, row, GROUPS)
    tl.store(gsa_ptr + row, gsa)


@triton.jit
def _given_gsa(x_ptr, code_ptr, scale_ptr, gsa_ptr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    x = load_row(x_ptr + row * (GROUPS * 16), GROUPS * 16, GROUPS)
    amax, gsa = group_max(x, GROUPS), tl.load(gsa_ptr + row)
    fits = row_top(amax) <= gsa * 1048576.0
    word, scale = fmt.nvfp4_codes(x, amax, gsa, fits, GROUPS)
    _store(word, scale, code_ptr, scale_ptr, row, GROUPS)


def check(x, factor=None):
    """Codes and scales of rows of COLS values, with their own gsa or with a given one (rows,)."""
    code, scale = empty(x, COLS // 8, torch.int32), empty(x, COLS // 16, torch.uint8)
    gsa = empty(x, 1, torch.float32) if factor is None else factor[:, None].clone()
    kernel = _own_gsa if factor is None else _given_gsa
    kernel[(len(x),)](x, code, scale, gsa, GROUPS=COLS // 16, **EXACT)
    wanted = nvfp4.quantise(x, None if factor is None else factor[:, None])
    assert_bitwise(gsa.cpu(), wanted[2].cpu())
    assert_bitwise(e4m3.decode(scale).cpu(), e4m3.decode(wanted[1]).cpu())
    assert_bitwise(code.view(torch.uint8).cpu(), e2m1.pack(wanted[0]).cpu())


def test_rows(rows):  # noqa: F811 - the fixture
    check(rows)


@pytest.mark.parametrize("gsa", [0.0, 1e-45, 1e-30, 1e-4, 1.0, 1e30, float("nan")])
def test_under_a_gsa_that_does_not_fit(rows, gsa):  # noqa: F811 - the fixture
    check(rows, torch.full((len(rows),), gsa, device=rows.device))


THRESHOLDS = [(0.25, np.greater), (0.75, np.greater_equal), (1.25, np.greater), (1.75, np.greater_equal)]
THRESHOLDS += [(2.5, np.greater), (3.5, np.greater_equal), (5.0, np.greater)]


def fma(x, y, z) -> np.ndarray:
    """Fused multiply-add of FP32: the sum in FP64 to odd, so that its rounding to FP32 is the only one."""
    x, y, z = (np.asarray(value, np.float32).astype(np.float64) for value in (x, y, z))
    product = x * y  # exact: 48 bits
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    even = (total.view(np.int64) & 1) == 0
    beside = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, beside, total).astype(np.float32)


def corrected_quotient(size: np.ndarray, step: np.ndarray) -> np.ndarray:
    """``size / step`` as the kernel has it, from the rounded reciprocal."""
    inverse = np.float32(1) / step
    quotient = size * inverse
    return fma(fma(-quotient, step, size), inverse, quotient)


def in_two(size: np.ndarray, step: np.ndarray, ulp: int = 0, nudge: bool = True) -> np.ndarray:
    """``size / step`` as the kernel has it for codes, where the hardware's division is ``ulp`` off."""
    one = np.float32(1)
    near = ((one / step).view(np.int32) + np.int32(ulp)).view(np.float32)
    high = fma(fma(-step, near, one), near, near)
    low = high * fma(-step, high, one)
    low = fma(np.abs(low), np.float32(2**-23), low) if nudge else low
    return fma(size, high, size * low)


MIDPOINTS = [(t / 16, beyond) for t in range(16, 32) for beyond in (np.greater, np.greater_equal)]  # of E4M3


def wrong_sides(mantissas: np.ndarray, thresholds, quotient) -> int:
    """Values within four ulp of a threshold that ``quotient`` puts on another side than the division.

    With all mantissas of the divisor, in C: 0 wrong of 1,207,959,552 for E4M3, and of 528,482,304 for E2M1 with a
    division that is up to four ulp off.
    """
    divisor = (mantissas.astype(np.int32) | 0x3F800000).view(np.float32)
    wrong = 0
    for threshold, beyond in thresholds:
        at = np.float32(threshold)
        near = (divisor * at).view(np.int32)
        for ulp in range(-4, 5):
            x = (near + np.int32(ulp)).view(np.float32)
            wrong += int((beyond(quotient(x, divisor), at) != beyond(x / divisor, at)).sum())
    return wrong


SOME = np.append(np.arange(0, 1 << 23, 509), [(1 << 23) - 1, (1 << 23) - 2])


def test_a_corrected_product_is_on_the_side_of_the_quotient():
    assert wrong_sides(SOME, MIDPOINTS, corrected_quotient) == 0
    assert wrong_sides(SOME, MIDPOINTS, lambda x, divisor: x * (np.float32(1) / divisor)) > 1000


@pytest.mark.parametrize("ulp", [-2, -1, 0, 1, 2])
def test_so_is_a_product_with_the_reciprocal_in_two(ulp):
    assert wrong_sides(SOME, THRESHOLDS, lambda x, divisor: in_two(x, divisor, ulp)) == 0


def test_a_divisor_of_all_ones_needs_the_nudge():
    last = np.array([(1 << 23) - 1])
    assert wrong_sides(last, THRESHOLDS, lambda x, divisor: in_two(x, divisor, nudge=False)) == 1
    assert wrong_sides(last, THRESHOLDS, in_two) == 0


def test_a_corrected_sixth_is_the_rounded_sixth():
    x = (np.arange(0, 1 << 23, 5, dtype=np.int32) | 0x3F800000).view(np.float32)  # all of them, in C: 0 wrong
    assert_bitwise(corrected_quotient(x, np.full_like(x, 6)), x / np.float32(6))


def test_next_to_every_threshold(accelerator):
    """Values within two ulp of a threshold of their block's step, which a wrongly rounded quotient would move."""
    rng = np.random.default_rng(8)
    step = (1 + rng.integers(0, 1 << 23, (60, 1)) / 2**23).astype(np.float32)
    step[0] = np.nextafter(np.float32(2), np.float32(1))
    at = rng.choice([t for t, _ in THRESHOLDS], (60, COLS)).astype(np.float32)
    near = (step * at).view(np.int32) + rng.integers(-2, 3, (60, COLS), dtype=np.int32)
    x = near.view(np.float32) * rng.choice([-1, 1], near.shape).astype(np.float32)
    x[:, ::16] = 6 * step  # the block's scale: 448
    x[:, 0] = 6 * step[:, 0]
    check(torch.from_numpy(x).to(accelerator) * 2.0**-9)


def test_every_quotient_of_a_subnormal_scale(accelerator):
    """A scale of few bits leaves quotients up to 9: codes saturate."""
    x = torch.zeros(64, COLS)
    x[:, 0] = 2688.0
    x[:, 16:32] = torch.linspace(0.1, 1, 16)[None] * 6 * 2.0**-9 * torch.linspace(0.4, 10, 64)[:, None]
    x[:, 32:48] = -x[:, 16:32]
    check(x.to(accelerator))


def test_every_tie_of_a_scale(accelerator):
    """Groups whose ideal scale is half way between two E4M3 values, or an ulp off, under a gsa of 1."""
    scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    amax = 3 * (scales[1:] + scales[:-1])  # six times the middle, exactly
    amax = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(2688))])
    x = torch.zeros(len(amax) // 7, COLS // 16, 16)
    x[:, 0, 0] = 2688.0
    x[:, 1:, 3] = torch.from_numpy(amax).view(-1, 7)
    check(x.flatten(1).to(accelerator))
