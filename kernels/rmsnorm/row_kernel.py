"""A row in a program's registers, as Triton bodies: [GROUPS, 2, 8] FP32, sixteen neighbours of a row a thread.

In this shape a thread loads 16 bytes at a time and has whole NVFP4 groups, so that only a row's sum and its largest
magnitude pass between threads. A row is summed in one order, whatever the threads: eight neighbours as a chain of
multiply-adds, two of these, then halves of the row onto halves. Every fused kernel has that order from here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats.nvfp4_kernel import eighths, max_nan


def paired(x: Tensor) -> Tensor:
    """``x``, as int32 of two values if it is BF16 and lies so: a bare load and one instruction a value to widen it."""
    even = x.shape[-1] % 2 == 0 and x.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return x.view(torch.int32) if x.dtype is torch.bfloat16 and even and x.numel() else x


@triton.jit
def columns(GROUPS: tl.constexpr):
    """Column of each value, int32 [GROUPS, 2, 8]."""
    group, half, one = tl.arange(0, GROUPS), tl.arange(0, 2), tl.arange(0, 8)
    return group[:, None, None] * 16 + half[None, :, None] * 8 + one[None, None, :]


@triton.jit
def raw_row(ptr, D, GROUPS: tl.constexpr):
    """D values of BF16, FP32, or BF16 as :func:`paired` has them, zeros beyond: for :func:`widened`."""
    if ptr.dtype.element_ty == tl.int32:
        group, half, pair = tl.arange(0, GROUPS), tl.arange(0, 2), tl.arange(0, 4)
        at = group[:, None, None] * 8 + half[None, :, None] * 4 + pair[None, None, :]
        return tl.load(ptr + at, at < D // 2, other=0)
    else:
        at = columns(GROUPS)
        return tl.load(ptr + at, at < D, other=0.0)


@triton.jit
def widened(raw, GROUPS: tl.constexpr):
    """FP32 [GROUPS, 2, 8] of what :func:`raw_row` gives."""
    if raw.dtype == tl.int32:
        low = (raw << 16).to(tl.float32, bitcast=True)
        high = (raw & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), (GROUPS, 2, 8))
    else:
        return raw.to(tl.float32)


@triton.jit
def load_row(ptr, D, GROUPS: tl.constexpr):
    """D values from ``ptr`` as FP32 [GROUPS, 2, 8], zeros beyond."""
    return widened(raw_row(ptr, D, GROUPS), GROUPS)


@triton.jit
def load_row_weight(ptr, D, GROUPS: tl.constexpr, WEIGHTED: tl.constexpr):
    """FP32 weights [GROUPS, 2, 8]; ones without a weight."""
    if WEIGHTED:
        return load_row(ptr, D, GROUPS)
    else:
        return tl.full((GROUPS, 2, 8), 1.0, tl.float32)


@triton.jit
def squares(x, A: tl.constexpr, B: tl.constexpr):
    """Sums of squares of FP32 [A, B, 8] over the last axis, a chain of multiply-adds: [A, B]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(x, A, B)
    total = tl.fma(x1, x1, x0 * x0)
    total = tl.fma(x2, x2, total)
    total = tl.fma(x3, x3, total)
    total = tl.fma(x4, x4, total)
    total = tl.fma(x5, x5, total)
    total = tl.fma(x6, x6, total)
    return tl.fma(x7, x7, total)


@triton.jit
def onto_halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sum of FP32 [ROWS, COLS] over a power of two of columns, the upper half onto the lower one: [ROWS]."""
    if COLS == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return onto_halves(tl.sum(tl.reshape(x, (ROWS, 2, COLS // 2)), 1), ROWS, COLS // 2)


@triton.jit
def _sum_and_max(sum0, max0, sum1, max1):
    return sum0 + sum1, max_nan(max0, max1)


@triton.jit
def sum_and_top(total, top, GROUPS: tl.constexpr):
    """Sum, as :func:`onto_halves`, and largest value (NaN if one is) of FP32 [GROUPS]: two scalars.

    The first halves lie in one thread. After them every warp gets the values of all warps at once and adds them alike:
    one exchange through shared memory, not one a halving (P4 of 4096 rows of 4096 values: 17.9 us, not 18.8, H200).
    """
    if GROUPS >= 64:
        HALF: tl.constexpr = GROUPS // 2
        total, top = _halved(total, top, GROUPS)
        both = tl.permute(tl.reshape(tl.join(total, top), (HALF // 32, 32, 2)), (1, 0, 2))
        total, top = _over_warps(both, HALF // 32)
        return _over_lanes(total, top, 32)
    else:
        return _over_lanes(total, top, GROUPS)


@triton.jit
def _halved(total, top, SIZE: tl.constexpr):
    return tl.reduce((tl.reshape(total, (2, SIZE // 2)), tl.reshape(top, (2, SIZE // 2))), 0, _sum_and_max)


@triton.jit
def _over_lanes(total, top, SIZE: tl.constexpr):
    if SIZE == 1:
        return tl.sum(total, 0), tl.sum(top, 0)
    else:
        total, top = _halved(total, top, SIZE)
        return _over_lanes(total, top, SIZE // 2)


@triton.jit
def _over_warps(both, WARPS: tl.constexpr):
    """Sums and largest values [32], the upper half of WARPS onto the lower one, of FP32 [32, WARPS, 2]."""
    if WARPS == 1:
        total, top = tl.split(tl.reshape(both, (32, 2)))
    else:
        low, high = tl.split(tl.permute(tl.reshape(both, (32, 2, WARPS // 2, 2)), (0, 2, 3, 1)))
        sum0, max0 = tl.split(low)
        sum1, max1 = tl.split(high)
        total, top = _over_warps(tl.join(sum0 + sum1, max_nan(max0, max1)), WARPS // 2)
    return total, top


@triton.jit
def row_top(amax):
    """Largest of FP32 [GROUPS] from 0 up, NaN if one is: a scalar."""
    return tl.max(amax.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)  # NaN has the largest bits


@triton.jit
def group_max(x, GROUPS: tl.constexpr):
    """Largest magnitude of each group of FP32 [GROUPS, 2, 8], NaN if one is: [GROUPS]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(tl.abs(x), GROUPS, 2)
    low = max_nan(max_nan(x0, x1), max_nan(x2, x3))
    high = max_nan(max_nan(x4, x5), max_nan(x6, x7))
    first, second = tl.split(max_nan(low, high))
    return max_nan(first, second)


@triton.jit
def inverse_root(total, size, eps):
    """1 / sqrt(total / size + eps), each step rounded to nearest: FP32 of any shape."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, size * 1.0) + eps))


@triton.jit
def inverse_rms_of_row(x, size, eps, GROUPS: tl.constexpr):
    """1 / sqrt(mean square + eps) of FP32 [GROUPS, 2, 8], zeros beyond ``size`` values: [1]."""
    return inverse_root(onto_halves(tl.sum(squares(x, GROUPS, 2), 1)[None, :], 1, GROUPS), size, eps)


@triton.jit
def norm_row(x, weight, D, eps, BETWEEN: tl.constexpr, GROUPS: tl.constexpr):
    """RMSNorm of FP32 [GROUPS, 2, 8] as stored in BETWEEN: the norm, each group's and the row's largest magnitude.

    The magnitudes are taken of x * weight and multiplied, as rounding keeps order: so the row's sum and its largest
    magnitude are ready at once.
    """
    x_weight = x * weight
    amax = group_max(x_weight, GROUPS)
    total, top = sum_and_top(tl.sum(squares(x, GROUPS, 2), 1), amax, GROUPS)
    inverse = inverse_root(total, D, eps)
    return (
        _stored(x_weight * inverse, BETWEEN),
        _stored(amax * inverse, BETWEEN),
        _stored(top * inverse, BETWEEN),
    )


@triton.jit
def _stored(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)
