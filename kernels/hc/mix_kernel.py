"""mHC's mixing product as a Triton body, cut along its sum; :mod:`kernels.hc.finish_kernel` makes weights of the cuts.

The sum over K = 4 D runs over segments of 256 in a fixed order, whatever the number of rows: four segments one after
the other, four of these likewise, and sixteens as a tree. A program sums one, four or sixteen segments, and the
second kernel adds the rest in that order: a row gets the same bits from all three.

Streams are BF16 in memory, so a product with an FP32 weight is exact as three BF16 products (8 + 8 + 8 bits), on
tensor cores, summed in FP32: no accuracy is given up for speed, unlike TF32, which cuts the weight to 11 bits.
FP32 streams are cut in three as well; of the nine products the six above 2^-24 are taken.
"""

import triton
import triton.language as tl

from kernels.overlap import follow
from kernels.rmsnorm.row_kernel import eighths, onto_halves

SEGMENT = 256
FOUR = 4  # segments, and fours of them
COLUMNS = tl.constexpr(32)  # of partial sums: those of fn, pre, post and comb, and the sum of squares at 24


@triton.jit
def _upper(x):
    """FP32 as BF16, cut off: exact where the lower 16 bits are 0."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _three_terms(x):
    """FP32 as three BF16 values whose sum it is, largest first: cut, not rounded, as that takes two bare operations."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return _upper(high), _upper(middle), _upper(rest - middle)


@triton.jit
def _product(x, weight, total):
    """``total + x @ weight.T`` for [BLOCK_T, K] BF16 or FP32 and [32, K] FP32, smallest terms first."""
    high, middle, low = _three_terms(weight)
    if x.dtype == tl.bfloat16:
        total = tl.dot(x, tl.trans(low), total)
        total = tl.dot(x, tl.trans(middle), total)
        return tl.dot(x, tl.trans(high), total)
    else:
        x_high, x_middle, x_low = _three_terms(x)
        total = tl.dot(x_low, tl.trans(high), total)
        total = tl.dot(x_middle, tl.trans(middle), total)
        total = tl.dot(x_high, tl.trans(low), total)
        total = tl.dot(x_middle, tl.trans(high), total)
        total = tl.dot(x_high, tl.trans(middle), total)
        return tl.dot(x_high, tl.trans(high), total)


@triton.jit
def _add_squares(x, total, ROWS: tl.constexpr, EIGHTS: tl.constexpr):
    """``total`` [ROWS, EIGHTS] and the squares of FP32 [ROWS, 8 EIGHTS], eight neighbours as a chain."""
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(tl.reshape(x, (ROWS, EIGHTS, 8)), ROWS, EIGHTS)
    total = tl.fma(x1, x1, tl.fma(x0, x0, total))
    total = tl.fma(x3, x3, tl.fma(x2, x2, total))
    total = tl.fma(x5, x5, tl.fma(x4, x4, total))
    return tl.fma(x7, x7, tl.fma(x6, x6, total))


@triton.jit
def _load(x_at, fn_at, at, held, used, K):
    """Streams and weights at the columns ``at``, zeros where there are none."""
    x = tl.load(x_at + at[None, :], held[:, None] & (at < K)[None, :], other=0)
    if x.dtype == tl.int16:
        x = x.to(tl.bfloat16, bitcast=True)
    return x, tl.load(fn_at + at[None, :], used[:, None] & (at < K)[None, :], other=0.0)


@triton.jit
def partial_kernel(
    streams_ptr,
    fn_ptr,
    part_ptr,
    streams_stride,
    num_rows,
    K,
    OUTPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of SEGMENTS segments of SIZE for BLOCK_T rows, not normalised: part [split, T, 32].

    Streams are FP32, BF16, or BF16 as int16: then the tensor cores take them from registers, not from shared memory.
    """
    follow(PDL)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    used = column < OUTPUTS
    k = tl.arange(0, BLOCK_K)
    x_at = streams_ptr + row.to(tl.int64)[:, None] * streams_stride
    fn_at = fn_ptr + column[:, None] * K
    STEPS: tl.constexpr = SIZE // BLOCK_K
    total = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    four = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    part = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    total_square = tl.zeros((BLOCK_T,), tl.float32)
    four_square = tl.zeros((BLOCK_T,), tl.float32)
    square = tl.zeros((BLOCK_T, BLOCK_K // 8), tl.float32)
    if SEGMENTS == 1:  # unrolled: all loads are on their way at once
        for step in tl.static_range(STEPS):
            at = split * SIZE + step * BLOCK_K + k
            x, weight = _load(x_at, fn_at, at, row < num_rows, used, K)
            part = _product(x, weight, part)
            square = _add_squares(x.to(tl.float32), square, BLOCK_T, BLOCK_K // 8)
        total = part
        total_square = onto_halves(square, BLOCK_T, BLOCK_K // 8)
    else:
        for step in tl.range(0, SEGMENTS * STEPS, num_stages=STAGES):
            at = split * (SEGMENTS * SIZE) + step * BLOCK_K + k
            x, weight = _load(x_at, fn_at, at, row < num_rows, used, K)
            part = _product(x, weight, part)
            square = _add_squares(x.to(tl.float32), square, BLOCK_T, BLOCK_K // 8)
            if (step + 1) % STEPS == 0:
                four += part
                four_square += onto_halves(square, BLOCK_T, BLOCK_K // 8)
                part = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
                square = tl.zeros((BLOCK_T, BLOCK_K // 8), tl.float32)
                if (step + 1) % (4 * STEPS) == 0:
                    total += four
                    total_square += four_square
                    four = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
                    four_square = tl.zeros((BLOCK_T,), tl.float32)
    to = part_ptr + (split.to(tl.int64) * num_rows + row) * COLUMNS
    tl.store(to[:, None] + column[None, :], total, (row < num_rows)[:, None] & used[None, :])
    tl.store(to + 24, total_square, row < num_rows)
