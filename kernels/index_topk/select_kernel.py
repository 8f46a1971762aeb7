"""The choice's kernels, Triton; :mod:`kernels.index_topk.kernel` says how they choose and launches them."""

import triton
import triton.language as tl

from kernels.overlap import follow

INTERPOLATE = tl.constexpr(3)  # one in so many points is the middle instead


@triton.jit
def _keys(ptr, present, MERGE: tl.constexpr):
    """Scores as uint32 in the same order: 0 where absent, -0 as 0, NaN over infinity (as torch sorts).

    With MERGE they are such keys already.
    """
    if MERGE:
        return tl.load(ptr, present, other=0).to(tl.uint32, bitcast=True)
    score = tl.load(ptr, present, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    key = tl.where(score == score, key, 0xFFFFFFFF)
    return tl.where(present, key, 0).to(tl.uint32)


@triton.jit
def _cut(keys, k):
    """Interval [low, top] and a count: the k largest are the keys over top and the first so many in the interval.

    All keys in the interval are equal unless that count is 0. Keys of 0 are absent; with at most k present all are
    chosen. Last comes how many are chosen.
    """
    present = tl.sum((keys != 0).to(tl.int32))
    largest = tl.max(keys)
    done = present <= k
    low = tl.where(done, 0, tl.min(tl.where(keys != 0, keys, largest))).to(tl.uint32)
    top = tl.where(done, 0, largest).to(tl.uint32)
    below = present  # keys that are at least low: over k
    above = tl.where(done, present, 0)  # keys over top: under k until done
    turn = 0
    while (top > low) & (not done):
        share = (below - k).to(tl.float32) / (below - above).to(tl.float32)
        share = tl.where(turn % INTERPOLATE == INTERPOLATE - 1, 0.5, share)
        span = top - low
        step = tl.minimum((span.to(tl.float32) * share).to(tl.uint32), span)
        point = low + tl.maximum(step, 1).to(tl.uint32)
        many = tl.sum((keys >= point).to(tl.int32))
        fits = many <= k
        done = many == k
        above = tl.where(fits, many, above)
        top = tl.where(fits, point - 1, top).to(tl.uint32)
        below = tl.where(fits, below, many)
        low = tl.where(fits, low, point).to(tl.uint32)
        turn += 1
    ties_wanted = tl.where(done, 0, k - above)
    return low, top, ties_wanted, above + ties_wanted


@triton.jit
def _choose(keys, k):
    """Choose the k largest keys (of any count up to 2^15, uint32), ties to the first.

    Gives which, their places in order, how many, and the smallest chosen key or one below it.
    """
    low, top, ties_wanted, found = _cut(keys, k)
    over = keys > top
    tie = (keys >= low) & (keys <= top) & (ties_wanted > 0)
    # both running counts in one scan, 16 bits each
    upto = tl.cumsum(over.to(tl.uint32) | (tie.to(tl.uint32) << 16), 0)
    ties = (upto >> 16).to(tl.int32)
    chosen = over | (tie & (ties <= ties_wanted))
    least = tl.where(ties_wanted > 0, low, top + 1)
    return chosen, (upto & 0xFFFF).to(tl.int32) + tl.minimum(ties, ties_wanted) - 1, found, least


@triton.jit
def _members(place_ptr, runs, chosen, place, found, BLOCK_K: tl.constexpr, RUN: tl.constexpr):
    """What the chosen runs hold, in order, and whether it is there: [BLOCK_K * RUN]; through places of the program."""
    tl.store(place_ptr + place, runs, chosen)
    tl.debug_barrier()
    slot = tl.arange(0, BLOCK_K)
    run = tl.load(place_ptr + slot, slot < found, other=0)
    members = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    there = (members >= 0) & (slot < found)[:, None]
    return tl.reshape(members, (BLOCK_K * RUN,)), tl.reshape(there, (BLOCK_K * RUN,))


@triton.jit
def maxima_kernel(
    score_ptr,
    visible_ptr,
    best_ptr,
    coarse_ptr,
    C,
    stride,
    runs,
    coarse_runs,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    COARSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest key of each run of a block of a row, 0 if none is visible; with COARSE, of each run of runs too."""
    row = tl.program_id(0).to(tl.int64)
    RUNS: tl.constexpr = BLOCK // RUN
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    follow(PDL)
    limit = tl.minimum(tl.load(visible_ptr + row), C)
    best = tl.max(_keys(score_ptr + row * stride + at, at < limit, False), 1)
    tl.store(best_ptr + row * runs + run, best.to(tl.int32, bitcast=True), run < runs)
    if COARSE:
        coarse = tl.max(tl.reshape(best, (RUNS // RUN, RUN)), 1)
        run = tl.program_id(1) * (RUNS // RUN) + tl.arange(0, RUNS // RUN)
        tl.store(coarse_ptr + row * coarse_runs + run, coarse.to(tl.int32, bitcast=True), run < coarse_runs)


@triton.jit
def select_kernel(
    value_ptr,
    index_ptr,
    visible_ptr,
    best_ptr,
    coarse_ptr,
    place_ptr,
    out_ptr,
    out_key_ptr,
    C,
    value_stride,
    best_stride,
    coarse_stride,
    out_stride,
    k,
    MERGE: tl.constexpr,
    LEVELS: tl.constexpr,
    BEST: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One segment of one row: FP32 scores, or with MERGE candidates (keys and their indices) of an earlier launch.

    LEVELS of runs are chosen from first. With BEST their largest are there already, and the segment is the row.
    """
    row = tl.program_id(0).to(tl.int64)  # row * value_stride outgrows int32
    segment = tl.program_id(1)
    first = segment * BLOCK
    value_ptr += row * value_stride
    out_ptr += row * out_stride + segment * k
    place_ptr += (row * tl.num_programs(1) + segment) * (2 * BLOCK_K)
    rank = tl.arange(0, BLOCK_K)
    follow(PDL)
    limit = C
    if not MERGE:
        limit = tl.minimum(tl.load(visible_ptr + row).to(tl.int32), C)

    if LEVELS == 0:
        entries = first + tl.arange(0, BLOCK)
        keys = _keys(value_ptr + entries, entries < limit, MERGE)
    else:
        if LEVELS == 2:
            coarse = tl.arange(0, BLOCK // (RUN * RUN))
            best = _keys(coarse_ptr + row * coarse_stride + coarse, coarse * (RUN * RUN) < limit, True)
            chosen, place, found, least = _choose(best, k)
            runs, there = _members(place_ptr + BLOCK_K, coarse, chosen, place, found, BLOCK_K, RUN)
            best = _keys(best_ptr + row * best_stride + runs, there & (runs * RUN < limit), True)
            best = tl.where(best >= least, best, 0).to(tl.uint32)
        else:
            runs = tl.arange(0, BLOCK // RUN)
            if BEST:
                best = _keys(best_ptr + row * best_stride + runs, runs * RUN < limit, True)
            else:
                at = first + runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
                best = tl.max(_keys(value_ptr + at, at < limit, MERGE), 1)
        chosen, place, found, least = _choose(best, k)
        entries, there = _members(place_ptr, runs, chosen, place, found, BLOCK_K, RUN)
        entries += first
        keys = _keys(value_ptr + entries, there & (entries < limit), MERGE)
        # k entries at least are no smaller than the smallest of k runs' largest: fewer counts from there
        keys = tl.where(keys >= least, keys, 0).to(tl.uint32)
    chosen, place, found, _ = _choose(keys, k)
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
