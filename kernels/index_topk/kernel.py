"""Causal top-k, Triton. The contract is kernels/index_topk/ref.py; indices are int32, and k is at most 16384.

Scores become unsigned integers that order alike. The k largest of a block of them, and their places in ascending
order of index, come from a search that narrows an interval of integers, counting what lies above a point inside,
until exactly k do. The point is interpolated from the counts at both ends, and every third is the middle, so that 12
counts or so suffice on scores that differ, and 100 or so whatever the scores are.

A program does not look at all entries of a row that often. It first chooses the k best runs of 8 entries by their
largest, ties to the smaller run: each run left out is beaten by one entry in each of k others, so the k best entries
are in the chosen runs, and only those are looked at again. In longer rows the runs are chosen from runs of 8 runs in
the same way, so that no program ever searches more than 8192 keys. A launch before it finds the runs' largest, in as
many programs as there are blocks, at the memory's speed. Rows over LONGEST entries, and choices of more than MOST,
are cut into segments that each keep k entries with their keys; further launches choose among those.

Programs write to places of their own and never wait for each other: no atomics, no locks, and the number of launches
depends on shapes alone. Launches overlap (:mod:`kernels.overlap`): one reads and writes nothing before the last ends.

Measured on an H200 (2026-11-30), us for 512 of 1 x 32K, 64 x 32K: 14.6, 20.4; with up to 1024 runs chosen, which takes
fewer counts but has 8192 entries to search again, 18.5, 24.8; in one launch, the interval always halved, 23.8, 27.3.
Runs of 16 and no runs of runs took 30.9 for 1 x 256K and 59.1 for 64 x 256K.
"""

import torch
import triton
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.index_topk.select_kernel import maxima_kernel, select_kernel
from kernels.overlap import OVERLAPPED, overlap

LONGEST = 2**18  # entries of a row that one program chooses from
MOST = 1024  # entries that it chooses
SEGMENT = 2**15  # entries of one program of several; of a row without runs of runs
RUN = 8  # entries of a run, and runs of a run of runs
MIN_RUNS = 2  # times k; with fewer runs, choosing among them first saves nothing
MIN_BLOCK = 128
MAX_K = SEGMENT // 2  # so that every further launch has at most half as many candidates
WARPS = 8  # of a program that chooses from runs: 1 x 32K takes 15.5 us with 4
STREAM = 2048  # entries whose runs' largest one program finds


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
    largest = _largest(scores, visible, k) if alone(C, k) else None
    value, index, count = scores, visible, C
    while True:
        segments = max(triton.cdiv(count, block_of(count, k)), 1)
        shape = (T, segments * k)
        to = out if segments == 1 else torch.empty(shape, dtype=torch.int32, device=scores.device)
        to_key = out if segments == 1 else torch.empty(shape, dtype=torch.int32, device=scores.device)
        _select(value, index, visible, largest, to, to_key, k, segments)
        if segments == 1:
            return out
        value, index, count = to_key, to, segments * k


def _largest(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Launch what finds each run's largest key, and of each run of runs where they are needed, else the same again."""
    T, C = scores.shape
    coarse = levels_of(C, k) == 2
    runs, coarse_runs = triton.cdiv(C, RUN), triton.cdiv(C, RUN * RUN)
    best = torch.empty(T, runs, dtype=torch.int32, device=scores.device)
    of_runs = torch.empty(T, coarse_runs, dtype=torch.int32, device=scores.device) if coarse else best
    maxima_kernel[(T, triton.cdiv(C, STREAM))](
        scores,
        visible,
        best,
        of_runs,
        C,
        scores.stride(0),
        runs,
        coarse_runs,
        BLOCK=STREAM,
        RUN=RUN,
        COARSE=coarse,
        num_warps=4,
        **overlap(scores.device),
    )
    return best, of_runs


def _select(
    value: Tensor,
    index: Tensor,
    visible: Tensor,
    largest: tuple[Tensor, Tensor] | None,
    to: Tensor,
    to_key: Tensor,
    k: int,
    segments: int,
) -> None:
    """Launch one choice over all rows and segments: of scores, or of int32 keys and their indices."""
    T, count = value.shape
    block, levels = block_of(count, k), levels_of(count, k)
    best, coarse = largest or (visible, visible)
    room = triton.next_power_of_2(k)
    places = (
        torch.empty(2 * room * T * segments, dtype=torch.int32, device=value.device) if levels else visible
    )
    select_kernel[(T, segments)](
        value,
        index,
        visible,
        best,
        coarse,
        places,
        to,
        to_key,
        count,
        value.stride(0),
        best.stride(0),
        coarse.stride(0),
        segments * k,
        k,
        MERGE=value.dtype == torch.int32,
        LEVELS=levels,
        BEST=largest is not None,
        KEEP_KEYS=segments > 1,
        BLOCK=block,
        RUN=RUN,
        BLOCK_K=room,
        num_warps=warps_of(block, levels, best=largest is not None),
        **overlap(value.device),
    )


def alone(count: int, k: int) -> bool:
    """Whether one program a row chooses, and a launch before it finds the runs' largest."""
    return k <= MOST and count <= LONGEST and levels_of(count, k) > 0


def block_of(count: int, k: int) -> int:
    """Entries a program owns in a row of ``count``: a power of two."""
    most = LONGEST if k <= MOST and count <= LONGEST else SEGMENT
    return max(MIN_BLOCK, min(most, triton.next_power_of_2(max(count, 1))))


def levels_of(count: int, k: int) -> int:
    """How often runs are chosen before entries."""
    block = block_of(count, k)
    if block // RUN < MIN_RUNS * k:
        return 0
    return 1 if block <= SEGMENT or block // (RUN * RUN) < MIN_RUNS * k else 2


def warps_of(block: int, levels: int, *, best: bool) -> int:
    """Warps of a program: as many as keep 64 entries a thread in registers at most, where all are looked at 32."""
    if best:
        return WARPS
    return max(4, min(16, block // (2048 if levels else 1024)))


def builds(sizes: Sizes) -> list[Build]:
    """The runs' largest; the choice from them; segments of a long row, and their candidates."""
    k = sizes.index_topk
    pointers = ("visible_ptr", "best_ptr", "coarse_ptr")
    whole = ("C", "stride", "runs", "coarse_runs")
    made = [
        Build(
            name=f"index_topk/maxima_{name}/{sizes.name}",
            kernel=maxima_kernel,
            signature={
                "score_ptr": "*fp32",
                **dict.fromkeys(pointers, "*i32"),
                **dict.fromkeys(whole, "i32"),
            },
            constants={"BLOCK": STREAM, "RUN": RUN, "COARSE": coarse, "PDL": True},
            aligned=("score_ptr", *pointers, *whole),
            options={"num_warps": 4, **OVERLAPPED},
        )
        for name, coarse in (("row", False), ("long_row", True))
    ]
    pointers = ("index_ptr", *pointers, "place_ptr", "out_ptr", "out_key_ptr")
    whole = ("C", "value_stride", "best_stride", "coarse_stride", "out_stride", "k")
    signature = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(whole, "i32")}
    variants = {
        "row": (SEGMENT, False, True, False),
        "long_row": (LONGEST, False, True, False),
        "segments": (SEGMENT, False, False, True),
        "candidates": (8 * k, True, False, False),
    }
    for name, (block, merge, best, keep) in variants.items():
        levels = levels_of(block, k)
        made.append(
            Build(
                name=f"index_topk/{name}/{sizes.name}",
                kernel=select_kernel,
                signature={"value_ptr": "*i32" if merge else "*fp32", **signature},
                constants={
                    "MERGE": merge,
                    "LEVELS": levels,
                    "BEST": best,
                    "KEEP_KEYS": keep,
                    "BLOCK": block,
                    "RUN": RUN,
                    "BLOCK_K": triton.next_power_of_2(k),
                    "PDL": True,
                },
                aligned=("value_ptr", *signature),
                options={"num_warps": warps_of(block, levels, best=best), **OVERLAPPED},
            )
        )
    return made
