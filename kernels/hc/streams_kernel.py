"""What mHC does to the streams, as Triton bodies: the weighted sum before a block and the update after it.

Sums are chains of multiply-adds over the streams in order, so that a fused kernel gives the same bits.
"""

import triton
import triton.language as tl

NUM_STREAMS = tl.constexpr(4)  # hc_mult


@triton.jit
def weighted_sum(streams_ptr, pre_ptr, row, col, num_rows, streams_stride, D):
    """``sum_j pre_j X_j`` of the rows ``row`` [ROWS]: FP32 [ROWS, BLOCK_D], zeros beyond D columns ``col``."""
    mask = (row < num_rows)[:, None] & (col < D)[None, :]
    at = streams_ptr + row.to(tl.int64)[:, None] * streams_stride + col[None, :]
    first = tl.load(pre_ptr + row * NUM_STREAMS, row < num_rows, other=0.0)
    total = tl.load(at, mask, other=0.0).to(tl.float32) * first[:, None]
    for j in tl.static_range(1, NUM_STREAMS):
        pre = tl.load(pre_ptr + row * NUM_STREAMS + j, row < num_rows, other=0.0)
        total = tl.fma(tl.load(at + j * D, mask, other=0.0).to(tl.float32), pre[:, None], total)
    return total


@triton.jit
def collapse_kernel(
    streams_ptr, pre_ptr, x_ptr, streams_stride, num_rows, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Weighted sums of ROWS rows and BLOCK_D columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = weighted_sum(streams_ptr, pre_ptr, row, col, num_rows, streams_stride, D)
    mask = (row < num_rows)[:, None] & (col < D)[None, :]
    at = x_ptr + row.to(tl.int64)[:, None] * D + col[None, :]
    tl.store(at, total.to(x_ptr.dtype.element_ty), mask)


@triton.jit
def expand_kernel(
    streams_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    new_ptr,
    streams_stride,
    y_stride,
    D,
    BLOCK_D: tl.constexpr,
):
    """``X'_k = post_k y + sum_j comb[j, k] X_j`` of one row and BLOCK_D columns, all four streams."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    y = tl.load(y_ptr + wide * y_stride + col, col < D, other=0.0).to(tl.float32)
    at = streams_ptr + wide * streams_stride + col
    x0 = tl.load(at, col < D, other=0.0).to(tl.float32)
    x1 = tl.load(at + D, col < D, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * D, col < D, other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * D, col < D, other=0.0).to(tl.float32)
    for k in tl.static_range(NUM_STREAMS):
        comb = comb_ptr + wide * (NUM_STREAMS * NUM_STREAMS) + k
        new = y * tl.load(post_ptr + wide * NUM_STREAMS + k)
        new = tl.fma(x0, tl.load(comb), new)
        new = tl.fma(x1, tl.load(comb + NUM_STREAMS), new)
        new = tl.fma(x2, tl.load(comb + 2 * NUM_STREAMS), new)
        new = tl.fma(x3, tl.load(comb + 3 * NUM_STREAMS), new)
        to = new_ptr + (wide * NUM_STREAMS + k) * D + col
        tl.store(to, new.to(new_ptr.dtype.element_ty), col < D)
