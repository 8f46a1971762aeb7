"""What makes mHC's weights of partial sums, as a Triton body: gates and Sinkhorn, a token a thread."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels.hc.mix_kernel import COLUMNS
from kernels.overlap import follow


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
    FOURS: tl.constexpr,
    SINGLES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a row's partial sums, normalise, and make weights; ITERATIONS 0: only pre, of the head.

    SINGLES splits make a four, FOURS of these a sixteen, and there are GROUPS sixteens.
    """
    follow(PDL)
    at = tl.arange(0, ROWS * COLUMNS)
    row, column = tl.program_id(0) * ROWS + at // COLUMNS, at % COLUMNS
    group = tl.arange(0, GROUPS)[:, None]
    total = tl.zeros((GROUPS, ROWS * COLUMNS), tl.float32)
    held = ((row < num_rows) & (column < 25))[None, :]
    for outer in tl.static_range(FOURS):
        four = tl.zeros((GROUPS, ROWS * COLUMNS), tl.float32)
        for inner in tl.static_range(SINGLES):
            split = group * (FOURS * SINGLES) + outer * SINGLES + inner
            place = (split.to(tl.int64) * num_rows + row[None, :]) * COLUMNS + column[None, :]
            four += tl.load(part_ptr + place, held & (split < num_splits), other=0.0)
        total += four
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
    _store_gates(
        sum_at + 16, base_ptr, tl.load(scale_ptr) * inverse, pre_ptr + row * 4, own, 1.0, hc_eps, FAST
    )
    if ITERATIONS > 0:
        post_scale = tl.load(scale_ptr + 1) * inverse
        _store_gates(sum_at + 20, base_ptr + 4, post_scale, post_ptr + row * 4, own, 2.0, 0.0, FAST)
        comb_scale = tl.load(scale_ptr + 2) * inverse
        _store_comb(sum_at, base_ptr + 8, comb_scale, comb_ptr + row * 16, own, hc_eps, ITERATIONS, FAST)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1 / x, within 2 ulp; FAST: the hardware's own, which has no scaling for the far ends of FP32.

    39 of them one after the other are a third of the time of one row: 6.9 us against 7.8 (H200, 2026-11-30).
    """
    if FAST:
        return libdevice.fast_dividef(1.0, x)
    else:
        return 1.0 / x


@triton.jit
def _store_gates(sum_ptr, base_ptr, scale, out_ptr, own, factor, offset, FAST: tl.constexpr):
    """``factor * sigmoid(sum * scale + base) + offset`` of four columns."""
    for stream in tl.static_range(4):
        logit = tl.load(sum_ptr + stream, own, other=0.0) * scale + tl.load(base_ptr + stream)
        gate = factor * _reciprocal(1.0 + tl.exp(-logit), FAST) + offset
        tl.store(out_ptr + stream, gate, own)


@triton.jit
def _load_row(sum_ptr, base_ptr, scale, own, hc_eps, ROW: tl.constexpr, FAST: tl.constexpr):
    """One row of comb after its softmax: four values a token."""
    a = tl.load(sum_ptr + ROW * 4, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4)
    b = tl.load(sum_ptr + ROW * 4 + 1, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4 + 1)
    c = tl.load(sum_ptr + ROW * 4 + 2, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4 + 2)
    d = tl.load(sum_ptr + ROW * 4 + 3, own, other=0.0) * scale + tl.load(base_ptr + ROW * 4 + 3)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    inverse = _reciprocal((a + b) + (c + d), FAST)
    return a * inverse + hc_eps, b * inverse + hc_eps, c * inverse + hc_eps, d * inverse + hc_eps


@triton.jit
def _over_sum(a, b, c, d, hc_eps, FAST: tl.constexpr):
    """Four values over their sum + hc_eps."""
    inverse = _reciprocal((a + b) + (c + (d + hc_eps)), FAST)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _store_comb(
    sum_ptr, base_ptr, scale, comb_ptr, own, hc_eps, ITERATIONS: tl.constexpr, FAST: tl.constexpr
):
    """Sinkhorn in registers, a token a thread; xjk is comb[j, k]."""
    x00, x01, x02, x03 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 0, FAST)
    x10, x11, x12, x13 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 1, FAST)
    x20, x21, x22, x23 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 2, FAST)
    x30, x31, x32, x33 = _load_row(sum_ptr, base_ptr, scale, own, hc_eps, 3, FAST)
    for step in range(ITERATIONS):
        if step > 0:
            x00, x01, x02, x03 = _over_sum(x00, x01, x02, x03, hc_eps, FAST)
            x10, x11, x12, x13 = _over_sum(x10, x11, x12, x13, hc_eps, FAST)
            x20, x21, x22, x23 = _over_sum(x20, x21, x22, x23, hc_eps, FAST)
            x30, x31, x32, x33 = _over_sum(x30, x31, x32, x33, hc_eps, FAST)
        x00, x10, x20, x30 = _over_sum(x00, x10, x20, x30, hc_eps, FAST)
        x01, x11, x21, x31 = _over_sum(x01, x11, x21, x31, hc_eps, FAST)
        x02, x12, x22, x32 = _over_sum(x02, x12, x22, x32, hc_eps, FAST)
        x03, x13, x23, x33 = _over_sum(x03, x13, x23, x33, hc_eps, FAST)
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
