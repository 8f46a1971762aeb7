"""mHC's mixing weights as Triton bodies: a product cut along its sum, then what turns logits into weights.

The sum over K = 4 D runs over segments of 256 in a fixed order, whatever the number of rows: within a group of 16
segments one after the other, groups as a tree. A launch of few rows has a program a segment, and the second kernel
adds them in that order; a launch of many rows has a program a group. Either gives a row the same bits.

Streams are BF16 in memory, so a product with an FP32 weight is exact as three BF16 products (8 + 8 + 8 bits), on
tensor cores, summed in FP32: no accuracy is given up for speed, unlike TF32, which cuts the weight to 11 bits.
FP32 streams are cut in three as well; of the nine products the six above 2^-24 are taken.
"""

import triton
import triton.language as tl

from kernels.rmsnorm.kernel import tree_sum

SEGMENT = 256
GROUP = 16  # segments
COLUMNS = tl.constexpr(32)  # of partial sums: comb at 0, pre at 16, post at 20, the sum of squares at 24


@triton.jit
def _three_terms(x):
    """FP32 as three BF16 values whose sum it is, largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


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
):
    """Sums of SEGMENTS segments of SIZE for BLOCK_T rows, not normalised: part [split, T, 32]."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    output = tl.where(column < 16, column + 8, column - 16)  # of fn: pre, post, comb
    used = (column < 24) & (output < OUTPUTS)
    k = tl.arange(0, BLOCK_K)
    x_at = streams_ptr + row.to(tl.int64)[:, None] * streams_stride
    fn_at = fn_ptr + output[:, None] * K
    total = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for segment in tl.range(split * SEGMENTS, (split + 1) * SEGMENTS, num_stages=STAGES):
        part = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
        square = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        for step in tl.static_range(SIZE // BLOCK_K):
            at = segment * SIZE + step * BLOCK_K + k
            x = tl.load(x_at + at[None, :], (row < num_rows)[:, None] & (at < K)[None, :], other=0.0)
            weight = tl.load(fn_at + at[None, :], used[:, None] & (at < K)[None, :], other=0.0)
            part = _product(x, weight, part)
            wide = x.to(tl.float32)
            square = tl.fma(wide, wide, square)
        total += part
        squares += tree_sum(square, BLOCK_T, BLOCK_K)
    to = part_ptr + (split.to(tl.int64) * num_rows + row) * COLUMNS
    tl.store(to[:, None] + column[None, :], total, (row < num_rows)[:, None] & (column < 24)[None, :])
    tl.store(to + 24, squares, row < num_rows)


@triton.jit
def _over_groups(x, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Sum of [GROUPS, SIZE] over the first axis as a tree: [SIZE]."""
    if GROUPS == 1:
        return tl.reshape(x, (SIZE,))
    else:
        return _over_groups(tl.sum(tl.reshape(x, (GROUPS // 2, 2, SIZE)), 1), GROUPS // 2, SIZE)


@triton.jit
def finish_kernel(
    part_ptr,
    sum_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    num_rows,
    num_splits,
    K,
    norm_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add a row's partial sums (SPLITS a group), normalise, and make weights; ITERATIONS 0: only pre, of the head."""
    at = tl.arange(0, ROWS * COLUMNS)
    row, column = tl.program_id(0) * ROWS + at // COLUMNS, at % COLUMNS
    group = tl.arange(0, GROUPS)[:, None]
    total = tl.zeros((GROUPS, ROWS * COLUMNS), tl.float32)
    held = ((row < num_rows) & (column < 25))[None, :]
    for step in tl.static_range(SPLITS):
        split = group * SPLITS + step
        place = (split.to(tl.int64) * num_rows + row[None, :]) * COLUMNS + column[None, :]
        total += tl.load(part_ptr + place, held & (split < num_splits), other=0.0)
    sums = _over_groups(total, GROUPS, ROWS * COLUMNS)
    # through memory: every thread then has whole rows, whose 20 passes need no exchange
    tl.store(sum_ptr + row.to(tl.int64) * COLUMNS + column, sums, row < num_rows)
    tl.debug_barrier()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = row < num_rows
    sum_at = sum_ptr + row.to(tl.int64) * COLUMNS
    size = tl.full((ROWS,), 1.0, tl.float32) * K
    mean = tl.div_rn(tl.load(sum_at + 24, own, other=0.0), size)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + norm_eps))
    _store_gates(sum_at + 16, base_ptr, tl.load(scale_ptr) * inverse, pre_ptr + row * 4, own, 1.0, hc_eps)
    if ITERATIONS > 0:
        post_scale = tl.load(scale_ptr + 1) * inverse
        _store_gates(sum_at + 20, base_ptr + 4, post_scale, post_ptr + row * 4, own, 2.0, 0.0)
        comb_scale = tl.load(scale_ptr + 2) * inverse
        _store_comb(sum_at, base_ptr + 8, comb_scale, comb_ptr + row * 16, own, hc_eps, ITERATIONS)


@triton.jit
def _store_gates(sum_ptr, base_ptr, scale, out_ptr, own, factor, offset):
    """``factor * sigmoid(sum * scale + base) + offset`` of four columns."""
    for stream in tl.static_range(4):
        logit = tl.load(sum_ptr + stream, own, other=0.0) * scale + tl.load(base_ptr + stream)
        tl.store(out_ptr + stream, factor / (1.0 + tl.exp(-logit)) + offset, own)


@triton.jit
def _load_row(sum_ptr, base_ptr, scale, own, hc_eps, ROW: tl.constexpr):
    """One row of comb after its softmax: four values a token."""
    a = tl.load(sum_ptr + ROW * 4, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4)
    b = tl.load(sum_ptr + ROW * 4 + 1, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4 + 1)
    c = tl.load(sum_ptr + ROW * 4 + 2, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4 + 2)
    d = tl.load(sum_ptr + ROW * 4 + 3, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4 + 3)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    inverse = 1.0 / ((a + b) + (c + d))
    return a * inverse + hc_eps, b * inverse + hc_eps, c * inverse + hc_eps, d * inverse + hc_eps


@triton.jit
def _over_sum(a, b, c, d, hc_eps):
    """Four values over their sum + hc_eps."""
    inverse = 1.0 / (((a + b) + (c + d)) + hc_eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _store_comb(sum_ptr, base_ptr, scale, comb_ptr, own, hc_eps, ITERATIONS: tl.constexpr):
    """Sinkhorn in registers, a token a thread; xjk is comb[j, k]."""
    x00, x01, x02, x03 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 0)
    x10, x11, x12, x13 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 1)
    x20, x21, x22, x23 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 2)
    x30, x31, x32, x33 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 3)
    for step in range(ITERATIONS):
        if step > 0:
            x00, x01, x02, x03 = _over_sum(x00, x01, x02, x03, hc_eps)
            x10, x11, x12, x13 = _over_sum(x10, x11, x12, x13, hc_eps)
            x20, x21, x22, x23 = _over_sum(x20, x21, x22, x23, hc_eps)
            x30, x31, x32, x33 = _over_sum(x30, x31, x32, x33, hc_eps)
        x00, x10, x20, x30 = _over_sum(x00, x10, x20, x30, hc_eps)
        x01, x11, x21, x31 = _over_sum(x01, x11, x21, x31, hc_eps)
        x02, x12, x22, x32 = _over_sum(x02, x12, x22, x32, hc_eps)
        x03, x13, x23, x33 = _over_sum(x03, x13, x23, x33, hc_eps)
    _store_row(comb_ptr, x00, x01, x02, x03, own)
    _store_row(comb_ptr + 4, x10, x11, x12, x13, own)
    _store_row(comb_ptr + 8, x20, x21, x22, x23, own)
    _store_row(comb_ptr + 12, x30, x31, x32, x33, own)


@triton.jit
def _store_row(to, a, b, c, d, own):
    """Four values a token beside each other."""
    tl.store(to, a, own)
    tl.store(to + 1, b, own)
    tl.store(to + 2, c, own)
    tl.store(to + 3, d, own)
