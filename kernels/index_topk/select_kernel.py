"""The choice's kernels, Triton; :mod:`kernels.index_topk.kernel` says how they choose and launches them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.index_topk.order_kernel import ordered

INTERPOLATE = tl.constexpr(3)  # one in so many points is the middle instead


@triton.jit
def _await(PDL: tl.constexpr):
    """All earlier launches have ended, and what they wrote is there; the next may be set up."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _keys(ptr, present, MERGE: tl.constexpr):
    """Scores as ordered keys, 0 where absent. With MERGE they are such keys already."""
    if MERGE:
        return tl.load(ptr, present, other=0).to(tl.uint32, bitcast=True)
    return ordered(tl.load(ptr, present, other=0.0), present)


@triton.jit
def _cut(keys, k, most):
    """Interval [low, top] and a count: chosen are the keys over top and the first so many in the interval.

    These are the k largest, or up to ``most`` if so many keys were met that are larger than all others. All keys in
    the interval are equal unless that count is 0. Keys of 0 are absent; with at most k present all are chosen. Last
    comes how many are chosen.
    """
    present = tl.sum((keys != 0).to(tl.int32))
    largest = tl.max(keys)
    done = present <= most
    low = tl.where(done, 0, tl.min(tl.where(keys != 0, keys, largest))).to(tl.uint32)
    top = tl.where(done, 0, largest).to(tl.uint32)
    below = present  # keys that are at least low: over most
    above = tl.where(done, present, 0)  # keys over top: under k until done
    turn = 0
    while (top > low) & (not done):
        share = (below.to(tl.float32) - (k + most) * 0.5) / (below - above).to(tl.float32)
        share = tl.where(turn % INTERPOLATE == INTERPOLATE - 1, 0.5, share)
        span = top - low
        step = tl.minimum((span.to(tl.float32) * share).to(tl.uint32), span)
        point = low + tl.maximum(step, 1).to(tl.uint32)
        many = tl.sum((keys >= point).to(tl.int32))
        fits = many <= most
        done = fits & (many >= k)
        above = tl.where(fits, many, above)
        top = tl.where(fits, point - 1, top).to(tl.uint32)
        below = tl.where(fits, below, many)
        low = tl.where(fits, low, point).to(tl.uint32)
        turn += 1
    ties_wanted = tl.where(done, 0, k - above)
    return low, top, ties_wanted, above + ties_wanted


@triton.jit
def _choose(keys, k, most):
    """Choose k of the keys (any count up to 2^15, uint32), or up to ``most``, ties to the first.

    Gives which, their places in order, how many, and the smallest chosen key or one below it.
    """
    low, top, ties_wanted, found = _cut(keys, k, most)
    over = keys > top
    tie = (keys >= low) & (keys <= top) & (ties_wanted > 0)
    # both running counts in one scan, 16 bits each
    upto = tl.cumsum(over.to(tl.uint32) | (tie.to(tl.uint32) << 16), 0)
    ties = (upto >> 16).to(tl.int32)
    chosen = over | (tie & (ties <= ties_wanted))
    least = tl.where(ties_wanted > 0, low, top + 1)
    return chosen, (upto & 0xFFFF).to(tl.int32) + tl.minimum(ties, ties_wanted) - 1, found, least


@triton.jit
def maxima_kernel(
    score_ptr,
    visible_ptr,
    best_ptr,
    C,
    stride,
    runs,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest key of each run of a block of a row, 0 if none is visible."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
    at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    _await(PDL)
    limit = tl.minimum(tl.load(visible_ptr + row), C)
    best = tl.max(_keys(score_ptr + row * stride + at, at < limit, False), 1)
    tl.store(best_ptr + row * runs + run, best.to(tl.int32, bitcast=True), run < runs)


@triton.jit
def select_kernel(
    value_ptr,
    index_ptr,
    visible_ptr,
    best_ptr,
    run_ptr,
    out_ptr,
    out_key_ptr,
    C,
    value_stride,
    best_stride,
    out_stride,
    k,
    most,
    MERGE: tl.constexpr,
    BEST: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One segment of one row: FP32 scores, or with MERGE candidates (keys and their indices) of an earlier launch.

    With BEST its runs' largest are there already. At most ``most`` runs are chosen, and MOST have room.
    """
    row = tl.program_id(0).to(tl.int64)  # row * value_stride outgrows int32
    segment = tl.program_id(1)
    first = segment * BLOCK
    value_ptr += row * value_stride
    out_ptr += row * out_stride + segment * k
    run_ptr += (row * tl.num_programs(1) + segment) * MOST
    rank = tl.arange(0, BLOCK_K)
    _await(PDL)
    limit = C
    if not MERGE:
        limit = tl.minimum(tl.load(visible_ptr + row).to(tl.int32), C)

    if RUN == 1:
        entries = first + tl.arange(0, BLOCK)
        keys = _keys(value_ptr + entries, entries < limit, MERGE)
    else:
        runs, inside = tl.arange(0, BLOCK // RUN), tl.arange(0, RUN)
        if BEST:
            best = tl.load(best_ptr + row * best_stride + runs, runs * RUN < limit, other=0)
            best = best.to(tl.uint32, bitcast=True)
        else:
            at = first + runs[:, None] * RUN + inside[None, :]
            best = tl.max(_keys(value_ptr + at, at < limit, MERGE), 1)
        chosen, place, found, least = _choose(best, k, most)
        tl.store(run_ptr + place, runs, chosen)
        tl.debug_barrier()
        slot = tl.arange(0, MOST)
        run = tl.load(run_ptr + slot, slot < found, other=0)
        at = first + run[:, None] * RUN + inside[None, :]
        entries = tl.reshape(at, (MOST * RUN,))
        present = tl.reshape((at < limit) & (slot < found)[:, None], (MOST * RUN,))
        keys = _keys(value_ptr + entries, present, MERGE)
        # k entries at least are no smaller than the smallest of k runs' largest: fewer counts from there
        keys = tl.where(keys >= least, keys, 0).to(tl.uint32)
    chosen, place, found, _ = _choose(keys, k, k)
    index = entries
    if MERGE:
        index = tl.load(index_ptr + row * value_stride + entries, chosen, other=0)
    empty = (rank >= found) & (rank < k)
    tl.store(out_ptr + place, index, chosen)
    tl.store(out_ptr + rank, tl.full((BLOCK_K,), -1, tl.int32), empty)
    if KEEP_KEYS:
        out_key_ptr += row * out_stride + segment * k
        tl.store(out_key_ptr + place, keys.to(tl.int32, bitcast=True), chosen)
        tl.store(out_key_ptr + rank, tl.zeros((BLOCK_K,), tl.int32), empty)
