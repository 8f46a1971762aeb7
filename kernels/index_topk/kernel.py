"""Causal top-k, Triton. The contract is kernels/index_topk/ref.py; indices are int32, and k is at most 16384.

Scores become unsigned integers that order alike. The k largest of a block of them, and their places in ascending
order of index, come from :func:`_choose`: an interval of integers is halved, counting what lies above its middle,
until exactly k do, which takes about 14 counts on scores that differ, and 32 at most whatever the scores are.

A program owns a segment of a row. It first chooses the k best runs of 8 entries by their largest, ties to the
smaller run: each run left out is beaten by one entry in each of k others, so the k best entries are in the chosen
runs, and only those are looked at again. Rows of several segments take a second launch over the segments' choices.
Programs write to places of their own and never wait for each other: no atomics, no locks, and the number of launches
depends on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes

SEGMENT = 32768  # entries of one program: 64 a thread, in registers
RUN = 8  # near the square root of SEGMENT / k: as many runs to look at first as entries of runs afterwards
MIN_RUNS = 2  # times k; with fewer runs, choosing among them first saves nothing
MIN_BLOCK = 128
MAX_K = SEGMENT // 2  # so that every further launch has at most half as many candidates


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

    All keys in the interval are equal unless that count is 0. Keys of 0 are absent; with at most k present, top is 0.
    Last comes how many are chosen.
    """
    present = tl.sum((keys != 0).to(tl.int32))
    largest = tl.max(keys)
    low = tl.min(tl.where(keys != 0, keys, largest)).to(tl.int64)
    few = present <= k
    high = tl.where(few, 1, largest.to(tl.int64) + 1)
    above = tl.where(few, k, 0)  # keys that are at least high
    while (high - low > 1) & (above != k):
        middle = (low + high) >> 1
        many = tl.sum((keys >= middle.to(tl.uint32)).to(tl.int32))
        fits = many <= k
        above = tl.where(fits, many, above)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    return low.to(tl.uint32), (high - 1).to(tl.uint32), k - above, tl.minimum(present, k)


@triton.jit
def _choose(keys, k):
    """Which of the keys (any count up to 2^15, uint32) are the k largest, ties to the first; their places; how many."""
    low, top, ties_wanted, found = _cut(keys, k)
    over = keys > top
    tie = (keys >= low) & (keys <= top)
    # both running counts in one scan, 16 bits each
    upto = tl.cumsum(over.to(tl.uint32) | (tie.to(tl.uint32) << 16), 0)
    ties = (upto >> 16).to(tl.int32)
    chosen = over | (tie & (ties <= ties_wanted))
    return chosen, (upto & 0xFFFF).to(tl.int32) + tl.minimum(ties, ties_wanted) - 1, found


@triton.jit
def _select_kernel(
    value_ptr,
    index_ptr,
    visible_ptr,
    out_ptr,
    out_key_ptr,
    C,
    value_stride,
    out_stride,
    k,
    MERGE: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One segment of one row: FP32 scores, or with MERGE candidates (keys and their indices) of an earlier launch."""
    row = tl.program_id(0).to(tl.int64)  # row * value_stride outgrows int32
    segment = tl.program_id(1)
    first = segment * BLOCK
    limit = C
    if not MERGE:
        limit = tl.minimum(tl.load(visible_ptr + row).to(tl.int32), C)
    value_ptr += row * value_stride
    out_ptr += row * out_stride + segment * k
    rank = tl.arange(0, BLOCK_K)

    if RUN == 1:
        entries = first + tl.arange(0, BLOCK)
        present = entries < limit
    else:
        runs, inside = tl.arange(0, BLOCK // RUN), tl.arange(0, RUN)
        at = first + runs[:, None] * RUN + inside[None, :]
        best = tl.max(_keys(value_ptr + at, at < limit, MERGE), 1)
        chosen, place, found = _choose(best, k)
        tl.store(out_ptr + place, runs, chosen)  # out holds the runs between two barriers
        tl.debug_barrier()
        run = tl.load(out_ptr + rank, rank < found, other=0)
        tl.debug_barrier()
        at = first + run[:, None] * RUN + inside[None, :]
        entries = tl.reshape(at, (BLOCK_K * RUN,))
        present = tl.reshape((at < limit) & (rank < found)[:, None], (BLOCK_K * RUN,))
    keys = _keys(value_ptr + entries, present, MERGE)
    chosen, place, found = _choose(keys, k)
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


def index_topk(scores: Tensor, visible: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    """Compute :func:`kernels.index_topk.ref.index_topk` on the GPU.

    Parameters
    ----------
    scores : (T, C) FP32
        Rows may be strided. Entries at ``visible[t]`` and beyond are not read. A visible NaN ranks above infinity.
    visible : (T,) int32
    k : int
        1 to 16384.
    out : (T, k) int32 or None
        Dense. None: a new tensor.

    Returns
    -------
    (T, k) int32
        Indices in ascending order, then -1 where fewer than k are visible. Ties go to the smaller index.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape, stride or k that is not the above.
    """
    if not 1 <= k <= MAX_K:
        raise ValueError(f"index_topk: k = {k} is not in 1 to {MAX_K}")
    T, C = check(
        "index_topk",
        dense=("visible", "out"),
        scores=(scores, "T C", torch.float32),
        visible=(visible, "T", torch.int32),
        out=(out, f"T {k}", torch.int32),
    ).values()
    out = torch.empty(T, k, dtype=torch.int32, device=scores.device) if out is None else out
    if T == 0:
        return out
    value, index, stride, count = scores, visible, scores.stride(0), C
    while True:
        block = block_of(count)
        segments = max(triton.cdiv(count, block), 1)
        last = segments == 1
        shape = (T, segments * k)
        to = out if last else torch.empty(shape, dtype=torch.int32, device=scores.device)
        to_key = out if last else torch.empty(shape, dtype=torch.int32, device=scores.device)
        _select_kernel[(T, segments)](
            value,
            index,
            visible,
            to,
            to_key,
            count,
            stride,
            segments * k,
            k,
            MERGE=value is not scores,
            KEEP_KEYS=not last,
            BLOCK=block,
            RUN=run_of(block, k),
            BLOCK_K=triton.next_power_of_2(k),
            num_warps=warps_of(block, run_of(block, k)),
        )
        if last:
            return out
        value, index, stride, count = to_key, to, segments * k, segments * k


def block_of(count: int) -> int:
    """Entries a program owns in a row of ``count``: a power of two."""
    return max(MIN_BLOCK, min(SEGMENT, triton.next_power_of_2(max(count, 1))))


def run_of(block: int, k: int) -> int:
    """Entries that are first looked at as one."""
    return RUN if block // RUN >= MIN_RUNS * k else 1


def warps_of(block: int, run: int) -> int:
    """Warps of a program: 64 entries a thread at most, or 32 that are all looked at; 4 warps at least."""
    return max(4, min(16, block // (1024 if run == 1 else 2048)))


def builds(sizes: Sizes) -> list[Build]:
    """Scores of one segment, of several, and their candidates."""
    signature = {
        "value_ptr": "*fp32",
        "index_ptr": "*i32",
        "visible_ptr": "*i32",
        "out_ptr": "*i32",
        "out_key_ptr": "*i32",
        "C": "i32",
        "value_stride": "i32",
        "out_stride": "i32",
        "k": "i32",
    }
    k = sizes.index_topk
    variants = {
        "one_segment": (SEGMENT, False, False),
        "segments": (SEGMENT, False, True),
        "candidates": (8 * k, True, False),
    }
    return [
        Build(
            name=f"index_topk/{name}/{sizes.name}",
            kernel=_select_kernel,
            signature=signature | {"value_ptr": "*i32" if merge else "*fp32"},
            constants={
                "MERGE": merge,
                "KEEP_KEYS": keep,
                "BLOCK": block,
                "RUN": run_of(block, k),
                "BLOCK_K": triton.next_power_of_2(k),
            },
            aligned=tuple(signature),
            options={"num_warps": warps_of(block, run_of(block, k))},
        )
        for name, (block, merge, keep) in variants.items()
    ]
