"""Causal top-k, Triton. The contract is kernels/index_topk/ref.py; indices are int32, and k is at most 16384.

Scores become unsigned integers that order alike. The k largest of a block of them, and their places in ascending
order of index, come from a search that narrows an interval of integers, counting what lies above a point
inside, until exactly k do. The point is interpolated from the counts at both ends, and every third is the middle, so
that 6 counts or so suffice on scores that differ, and about 100 whatever the scores are.

A program does not look at all entries of a row that often. It first chooses runs of neighbouring entries by their
largest, ties to the smaller run: each run left out is beaten by one entry in each of k others, so the k best entries
are in the chosen runs, and only those are looked at again. A few runs more than k do no harm, and are found in fewer
counts. The runs' largest come from the kernel that wrote the scores, or from a launch of their own over as many
programs as there are blocks, at the memory's speed. Rows over LONGEST entries, and choices of more than MOST, are cut
into segments that each keep k entries with their keys; further launches choose among those.

Programs write to places of their own and never wait for each other: no atomics, no locks, and the number of launches
depends on shapes alone. A launch may begin before the one before it ends (programmatic dependent launch), but reads
and writes nothing until that has ended.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.index_topk.select_kernel import maxima_kernel, select_kernel

LONGEST = 2**18  # entries of a row that one program chooses from
MOST = 1024  # entries that it chooses
SEGMENT = 2**15  # entries of one program of several
RUN = 8  # entries of a run
MOST_RUNS = 8192  # of a row; longer rows have longer runs
MIN_RUNS = 2  # times k; with fewer runs, choosing among them first saves nothing
FEW_AGAIN = 8192  # entries looked at again if more runs than k are chosen
MIN_BLOCK = 128
MAX_K = SEGMENT // 2  # so that every further launch has at most half as many candidates
WARPS = 8  # of a program that chooses from runs, at least
STREAM = 4096  # entries whose runs' largest one program finds


def index_topk(
    scores: Tensor, visible: Tensor, k: int, *, best: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute :func:`kernels.index_topk.ref.index_topk` on the GPU.

    Parameters
    ----------
    scores : (T, C) FP32
        Rows may be strided. Entries at ``visible[t]`` and beyond are not read. A visible NaN ranks above infinity.
    visible : (T,) int32
    k : int
        1 to 16384.
    best : (T, R) int32 or None
        The ordered keys (:func:`kernels.index_topk.order_kernel.ordered`) of the largest visible entries of each run of
        ``run_of(C, k)``, which is then over 1, and R the number of runs: written with the scores by
        :func:`kernels.index_logits.kernel.paged_index_logits`. None: a launch finds them.
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
    C = scores.shape[-1]
    T = check(
        "index_topk",
        dense=("visible", "best", "out"),
        scores=(scores, "T C", torch.float32),
        visible=(visible, "T", torch.int32),
        best=(best, f"T {runs_of(C, k)}", torch.int32),
        out=(out, f"T {k}", torch.int32),
    )["T"]
    if best is not None and not alone(C, k):
        raise ValueError(f"index_topk: best is given, but the choice of {k} of {C} does not begin with runs")
    out = torch.empty(T, k, dtype=torch.int32, device=scores.device) if out is None else out
    if T == 0:
        return out
    if best is None and alone(C, k):
        best = _best(scores, visible, k)
    value, index, count = scores, visible, C
    while True:
        segments = max(triton.cdiv(count, block_of(count, k)), 1)
        shape = (T, segments * k)
        to = out if segments == 1 else torch.empty(shape, dtype=torch.int32, device=scores.device)
        to_key = out if segments == 1 else torch.empty(shape, dtype=torch.int32, device=scores.device)
        _select(value, index, visible, best, to, to_key, k, segments, merge=value is not scores)
        if segments == 1:
            return out
        value, index, count = to_key, to, segments * k


def _best(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Launch what finds each run's largest."""
    (T, C), run = scores.shape, run_of(scores.shape[1], k)
    runs = runs_of(C, k)
    best = torch.empty(T, runs, dtype=torch.int32, device=scores.device)
    grid = (T, triton.cdiv(C, STREAM))
    early = _early(scores.device)
    maxima_kernel[grid](
        scores, visible, best, C, scores.stride(0), runs, BLOCK=STREAM, RUN=run, num_warps=4, **early
    )
    return best


def _select(
    value: Tensor,
    index: Tensor,
    visible: Tensor,
    best: Tensor | None,
    to: Tensor,
    to_key: Tensor,
    k: int,
    segments: int,
    *,
    merge: bool,
) -> None:
    """Launch one choice over all rows and segments."""
    T, count = value.shape
    block = block_of(count, k)
    run = run_of(count, k)
    room, most = room_of(run, k)
    runs = torch.empty(T * segments * (room if run > 1 else 0), dtype=torch.int32, device=value.device)
    select_kernel[(T, segments)](
        value,
        index,
        visible,
        visible if best is None else best,
        runs if run > 1 else visible,
        to,
        to_key,
        count,
        value.stride(0),
        0 if best is None else best.shape[1],
        segments * k,
        k,
        most,
        MERGE=merge,
        BEST=best is not None,
        KEEP_KEYS=segments > 1,
        BLOCK=block,
        RUN=run,
        BLOCK_K=triton.next_power_of_2(k),
        MOST=room,
        num_warps=warps_of(block, run, k, best=best is not None),
        **_early(value.device),
    )


def _early(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may begin early: from Hopper on."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": able, "launch_pdl": True} if able else {"PDL": False}


def block_of(count: int, k: int) -> int:
    """Entries a program owns in a row of ``count``: a power of two."""
    most = LONGEST if k <= MOST and count <= LONGEST else SEGMENT
    return max(MIN_BLOCK, min(most, triton.next_power_of_2(max(count, 1))))


def run_of(count: int, k: int) -> int:
    """Entries that are first looked at as one."""
    block = block_of(count, k)
    run = max(RUN, block // MOST_RUNS)
    return run if block // run >= MIN_RUNS * k else 1


def runs_of(count: int, k: int) -> int:
    """Runs of a row of ``count``."""
    return triton.cdiv(count, run_of(count, k))


def room_of(run: int, k: int) -> tuple[int, int]:
    """Places for chosen runs, a power of two; and how many may be chosen."""
    room = triton.next_power_of_2(k)
    return (2 * room, 2 * room) if 2 * room * run <= FEW_AGAIN else (room, k)


def warps_of(block: int, run: int, k: int, *, best: bool) -> int:
    """Warps of a program: so many that 64 entries a thread at most are in registers, or 32 where there are no runs."""
    if run == 1:
        return max(4, min(16, block // 1024))
    return max(WARPS, min(16, max(room_of(run, k)[0] * run, 0 if best else block) // 2048))


def alone(count: int, k: int) -> bool:
    """Whether one program chooses from runs that a launch before it has looked through."""
    return block_of(count, k) >= count and run_of(count, k) > 1 and k <= MOST and count <= LONGEST


def builds(sizes: Sizes) -> list[Build]:
    """The runs' largest; the choice from them; segments of a long row, and their candidates."""
    signature = {name: "*i32" for name in ("index_ptr", "visible_ptr", "best_ptr", "run_ptr", "out_ptr")}
    signature |= {"value_ptr": "*fp32", "out_key_ptr": "*i32"}
    signature |= {name: "i32" for name in ("C", "value_stride", "best_stride", "out_stride", "k", "most")}
    k = sizes.index_topk
    made = [
        Build(
            name=f"index_topk/maxima/{sizes.name}",
            kernel=maxima_kernel,
            signature={
                "score_ptr": "*fp32",
                "visible_ptr": "*i32",
                "best_ptr": "*i32",
                "C": "i32",
                "stride": "i32",
                "runs": "i32",
            },
            constants={"BLOCK": STREAM, "RUN": RUN, "PDL": True},
            aligned=("score_ptr", "visible_ptr", "best_ptr", "C", "stride", "runs"),
            options={"num_warps": 4},
        )
    ]
    variants = {
        "row": (SEGMENT, False, True, False),
        "long_row": (LONGEST, False, True, False),
        "segments": (SEGMENT, False, False, True),
        "candidates": (8 * k, True, False, False),
    }
    for name, (block, merge, best, keep) in variants.items():
        run = run_of(block, k)
        made.append(
            Build(
                name=f"index_topk/{name}/{sizes.name}",
                kernel=select_kernel,
                signature=signature | {"value_ptr": "*i32" if merge else "*fp32"},
                constants={
                    "MERGE": merge,
                    "BEST": best,
                    "KEEP_KEYS": keep,
                    "BLOCK": block,
                    "RUN": run,
                    "BLOCK_K": triton.next_power_of_2(k),
                    "MOST": room_of(run, k)[0],
                    "PDL": True,
                },
                aligned=tuple(signature),
                options={"num_warps": warps_of(block, run, k, best=best)},
            )
        )
    return made
