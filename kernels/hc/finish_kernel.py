"""What makes mHC's weights of partial sums, as a Triton body: gates and Sinkhorn, a token a thread."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels.hc.mix_kernel import COLUMNS
from kernels.overlap import follow_alone
from kernels.rmsnorm.row_kernel import inverse_root


@triton.jit
def _over_groups(x, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Sum of [GROUPS, SIZE] over the first axis as a tree: [SIZE]."""
    if GROUPS == 1:
        return tl.reshape(x, (SIZE,))
    else:
        return _over_groups(tl.sum(tl.reshape(x, (GROUPS // 2, 2, SIZE)), 1), GROUPS // 2, SIZE)


@triton.jit
def _sums(
    part_ptr,
    first,
    num_rows,
    num_splits,
    FOURS: tl.constexpr,
    SINGLES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of ROWS rows over their splits: [ROWS, 32]; columns that no program wrote hold anything."""
    at = tl.arange(0, ROWS * COLUMNS)
    row, column = first + at // COLUMNS, at % COLUMNS
    group = tl.arange(0, GROUPS)[:, None]
    own = (row < num_rows)[None, :]
    loaded = ()  # before any is added: all loads are on their way at once
    for single in tl.static_range(FOURS * SINGLES):
        split = group * (FOURS * SINGLES) + single
        place = (split.to(tl.int64) * num_rows + row[None, :]) * COLUMNS + column[None, :]
        loaded = loaded + (tl.load(part_ptr + place, own & (split < num_splits), other=0.0),)  # noqa: RUF005
    total = tl.zeros((GROUPS, ROWS * COLUMNS), tl.float32)
    for outer in tl.static_range(FOURS):
        four = tl.zeros((GROUPS, ROWS * COLUMNS), tl.float32)
        for inner in tl.static_range(SINGLES):
            four += loaded[outer * SINGLES + inner]
        total += four
    return tl.reshape(_over_groups(total, GROUPS, ROWS * COLUMNS), (ROWS, COLUMNS))


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

    SINGLES splits make a four, FOURS of these a group, and there are GROUPS. What all 24 columns have in common is done
    a column a thread: one product, one sigmoid, one softmax. Only the 20 passes take a token a thread.
    """
    follow_alone(PDL)
    first = tl.program_id(0) * ROWS
    column = tl.arange(0, COLUMNS)
    used = column < (24 if ITERATIONS > 0 else 4)
    scale = tl.load(scale_ptr + tl.minimum(column // 4, 2), used, other=0.0)
    base = tl.load(base_ptr + column, used, other=0.0)
    sums = _sums(part_ptr, first, num_rows, num_splits, FOURS, SINGLES, GROUPS, ROWS)
    square = tl.sum(tl.where((column == 24)[None, :], sums, 0.0), 1)
    logits = sums * (scale[None, :] * inverse_root(square, K, norm_eps)[:, None]) + base[None, :]
    row = first + tl.arange(0, ROWS)
    own = row < num_rows
    at = row[:, None] * 4 + column[None, :]
    sigmoid = _reciprocal(1.0 + tl.exp(-logits), FAST)
    tl.store(pre_ptr + at, sigmoid + hc_eps, own[:, None] & (column < 4)[None, :])
    if ITERATIONS > 0:
        tl.store(post_ptr + at - 4, 2.0 * sigmoid, own[:, None] & (column // 4 == 1)[None, :])
        comb = _softmax(logits, hc_eps, ROWS, FAST)
        sum_at = sum_ptr + row.to(tl.int64) * COLUMNS
        if ROWS > 1:  # through memory: every thread then has whole rows, whose 20 passes need no exchange
            tl.store(sum_at[:, None] + column[None, :], comb, own[:, None])
            tl.debug_barrier()
        _store_comb(comb, sum_at, comb_ptr + row * 16, own, hc_eps, ITERATIONS, ROWS, FAST)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1 / x, within 2 ulp; FAST: the hardware's own, which has no scaling for the far ends of FP32."""
    if FAST:
        return libdevice.fast_dividef(1.0, x)
    else:
        return 1.0 / x


@triton.jit
def _softmax(logits, hc_eps, ROWS: tl.constexpr, FAST: tl.constexpr):
    """Softmax of each four columns of [ROWS, 32], plus hc_eps."""
    fours = tl.reshape(logits, (ROWS, 8, 4))
    powers = tl.exp(fours - tl.max(fours, 2)[:, :, None])
    twos = tl.sum(tl.reshape(powers, (ROWS, 8, 2, 2)), 3)  # two and two: one order, whatever thread has them
    shares = powers * _reciprocal(tl.sum(twos, 2), FAST)[:, :, None]
    return tl.reshape(shares + hc_eps, (ROWS, COLUMNS))


@triton.jit
def _reciprocals(a, b, FAST: tl.constexpr):
    """1 / a and 1 / b of values whose product FP32 holds, within 4 ulp; FAST: both of one 1 / (a b).

    A warp's reciprocals queue for one unit, and a pass waits for four.
    """
    if FAST:
        return libdevice.fast_dividef(b, a * b), libdevice.fast_dividef(a, a * b)
    else:
        return 1.0 / a, 1.0 / b


@triton.jit
def _value(comb, sum_at, own, COLUMN: tl.constexpr, ROWS: tl.constexpr):
    """A column of the softmax: of one row from registers."""
    if ROWS == 1:
        return tl.gather(tl.reshape(comb, (COLUMNS,)), tl.full((1,), COLUMN, tl.int32), 0)
    else:
        return tl.load(sum_at + COLUMN, own, other=0.0)


@triton.jit
def _row(comb, sum_at, own, ROW: tl.constexpr, ROWS: tl.constexpr):
    """Row of comb after its softmax: four values a token."""
    START: tl.constexpr = 8 + 4 * ROW
    a, b = _value(comb, sum_at, own, START, ROWS), _value(comb, sum_at, own, START + 1, ROWS)
    c, d = _value(comb, sum_at, own, START + 2, ROWS), _value(comb, sum_at, own, START + 3, ROWS)
    return a, b, c, d


@triton.jit
def _inverse(a, b, c, d, FAST: tl.constexpr):
    """Reciprocals of four values."""
    a_inverse, b_inverse = _reciprocals(a, b, FAST)
    c_inverse, d_inverse = _reciprocals(c, d, FAST)
    return a_inverse, b_inverse, c_inverse, d_inverse


@triton.jit
def _weighted(a, b, c, d, wa, wb, wc, wd, held, hc_eps):
    """``a wa + b wb + c wc + d wd + hc_eps held``."""
    return tl.fma(b, wb, tl.fma(a, wa, hc_eps * held)) + tl.fma(d, wd, c * wc)


@triton.jit
def _store_comb(
    comb, sum_at, comb_at, own, hc_eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, FAST: tl.constexpr
):
    """Sinkhorn in registers, a token a thread: comb[j, k] = pjk uj vk, of which a pass changes u or v.

    Dividing a row by ``uj sum_k pjk vk + hc_eps`` makes 1 / uj into ``sum_k pjk vk + hc_eps / uj``; columns alike.
    Five operations wait for each other in a pass; dividing the 16 values themselves, six: 4.66 us against 4.83 for the
    whole of one row of 16384 values (H200, 2026-12-01).
    """
    p00, p01, p02, p03 = _row(comb, sum_at, own, 0, ROWS)
    p10, p11, p12, p13 = _row(comb, sum_at, own, 1, ROWS)
    p20, p21, p22, p23 = _row(comb, sum_at, own, 2, ROWS)
    p30, p31, p32, p33 = _row(comb, sum_at, own, 3, ROWS)
    ones = tl.full((ROWS,), 1.0, tl.float32)
    u0, u1, u2, u3 = ones, ones, ones, ones
    r0, r1, r2, r3 = ones, ones, ones, ones  # 1 / u
    c0, c1, c2, c3 = ones, ones, ones, ones  # 1 / v
    v0, v1, v2, v3 = ones, ones, ones, ones
    for step in range(ITERATIONS):
        if step > 0:
            r0 = _weighted(p00, p01, p02, p03, v0, v1, v2, v3, r0, hc_eps)
            r1 = _weighted(p10, p11, p12, p13, v0, v1, v2, v3, r1, hc_eps)
            r2 = _weighted(p20, p21, p22, p23, v0, v1, v2, v3, r2, hc_eps)
            r3 = _weighted(p30, p31, p32, p33, v0, v1, v2, v3, r3, hc_eps)
            u0, u1, u2, u3 = _inverse(r0, r1, r2, r3, FAST)
        c0 = _weighted(p00, p10, p20, p30, u0, u1, u2, u3, c0, hc_eps)
        c1 = _weighted(p01, p11, p21, p31, u0, u1, u2, u3, c1, hc_eps)
        c2 = _weighted(p02, p12, p22, p32, u0, u1, u2, u3, c2, hc_eps)
        c3 = _weighted(p03, p13, p23, p33, u0, u1, u2, u3, c3, hc_eps)
        v0, v1, v2, v3 = _inverse(c0, c1, c2, c3, FAST)
    _store_row(comb_at, p00 * u0 * v0, p01 * u0 * v1, p02 * u0 * v2, p03 * u0 * v3, own)
    _store_row(comb_at + 4, p10 * u1 * v0, p11 * u1 * v1, p12 * u1 * v2, p13 * u1 * v3, own)
    _store_row(comb_at + 8, p20 * u2 * v0, p21 * u2 * v1, p22 * u2 * v2, p23 * u2 * v3, own)
    _store_row(comb_at + 12, p30 * u3 * v0, p31 * u3 * v1, p32 * u3 * v2, p33 * u3 * v3, own)


@triton.jit
def _store_row(to, a, b, c, d, own):
    """Four values a token beside each other."""
    tl.store(to, a, own)
    tl.store(to + 1, b, own)
    tl.store(to + 2, c, own)
    tl.store(to + 3, d, own)
