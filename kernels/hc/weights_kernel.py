"""Launches that make mHC's weights: partial sums, then gates and Sinkhorn; their tiles by the number of rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.formats.device import EXACT
from kernels.hc import hopper_kernel as hopper
from kernels.hc.columns_hopper_kernel import partial_columns_kernel
from kernels.hc.finish_kernel import finish_kernel
from kernels.hc.mix_kernel import FOUR, SEGMENT, partial_kernel
from kernels.hc.ref import Mix
from kernels.overlap import overlap

STREAMS = 4
Path = Literal["hopper", "portable"]
SMS = 132  # of the H200; elsewhere only the speed depends on it
FAST = isinstance(finish_kernel, triton.JITFunction)  # compiled: the interpreter has no libdevice


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How both kernels are launched.

    Attributes
    ----------
    first, second : constexpr arguments and launch options.
    rows, splits : programs of the first.
    halves : whether BF16 streams go as int16, from registers to the tensor cores.
    early : whether the second kernel's programs may be placed while the first runs.
    steps : of 64 columns of a program of the Hopper kernels; 0: the portable kernel.
    walked : tiles of rows of a program that keeps its columns' weights; 0: the Hopper kernel that keeps rows.
    """

    first: Mapping[str, Any]
    second: Mapping[str, Any]
    rows: int
    splits: int
    halves: bool = False
    early: bool = True
    steps: int = 0
    walked: int = 0


def tiles(num_rows: int, K: int) -> Tiles:
    """Tiles for rows of K values.

    Few rows: a segment a program fills the SMs, and each reads all it needs at once, 3.6 us of 6.9 (one row of
    16384 values, H200, 2026-11-30; streams from shared memory: 7.6 in all). More: four segments, or sixteen, write
    less to add up, with three tiles under way. There streams come from shared memory: 67 us against 94 through
    registers (4096 rows of 16384). Rows of the second kernel share a warp where there are enough: a row a program
    of four warps would repeat the 20 passes in every thread.

    The second kernel may be placed early only where SMs are idle for it: else its programs crowd the few that are,
    14 us instead of 4 at 512 rows.
    """
    segments = triton.cdiv(K, SEGMENT)
    each = 1 if num_rows <= 256 else FOUR if num_rows < 2048 else FOUR * FOUR
    block = 128 if num_rows >= 2048 else 64
    rows = 1 if num_rows <= 64 else 4 if num_rows < 2048 else 16
    blocks, splits = triton.cdiv(num_rows, block), triton.cdiv(segments, each)
    return Tiles(
        first={
            "SEGMENTS": each,
            "SIZE": SEGMENT,
            "BLOCK_T": block,
            "BLOCK_K": 128,
            "STAGES": 3,
            "num_warps": block // 16,
            **EXACT,
        },
        second={
            "FOURS": FOUR if each < FOUR * FOUR else 1,
            "SINGLES": FOUR if each == 1 else 1,
            "GROUPS": triton.next_power_of_2(triton.cdiv(segments, FOUR * FOUR)),
            "ROWS": rows,
            "num_warps": 4 if rows == 1 else 1,
            **EXACT,
        },
        rows=blocks,
        splits=splits,
        halves=each == 1,
        early=num_rows <= SMS - blocks * splits,
    )


def hopper_tiles(num_rows: int, K: int) -> Tiles:
    """Tiles of the Hopper kernels.

    A segment is long enough that there are no more of them than SMs, and few rows get a program each. Hundreds of rows
    are walked by programs that keep their columns' weights, or, where a chain's outgrow shared memory, get a program a
    chain; thousands get a program four chains: two programs an SM.
    Measured (H200, 2026-12-01): 64 rows of 16384 values, first kernel alone 4.0 us, with the second 5.6; 4096 rows, 45
    and 49.

    The second kernel's programs may be placed early but where the first fills the SMs. They have a row and two warps,
    or rows enough to share one.
    """
    segment = 2
    while triton.cdiv(K, hopper.STEP * segment) > SMS:
        segment *= 2
    few, many = num_rows <= 256, num_rows >= 2048
    if not few and not many and segment == 2:
        return _column_tiles(num_rows, K, segment)
    steps = segment * (1 if few else 16 if many else hopper.SINGLES)
    block, rows = 64 if few else 128, 1 if num_rows <= 64 else 8 if many else 4
    splits, singles = triton.cdiv(K, hopper.STEP * steps), hopper.SINGLES if few else 1
    return Tiles(
        first={
            "SEGMENT": segment,
            "BLOCK_T": block,
            "STAGES": segment if few else 3,
            "ALONE": few,
            "num_warps": block // 16,
        },
        second=_second(splits, singles, rows),
        rows=triton.cdiv(num_rows, block),
        splits=splits,
        early=not many,
        steps=steps,
    )


def _column_tiles(num_rows: int, K: int, segment: int) -> Tiles:
    """Tiles of the kernel that keeps its columns' weights: a program an SM, a chain of four segments each.

    More stages would leave the second kernel's programs no shared memory beside the first. Measured (H200,
    2026-12-01), us of both kernels, 512 rows of 16384 values: 3 stages of rows' programs, as above, 16.3; 4, 5, 6, 7, 8
    here 13.0, 13.1, 13.5, 13.9, 15.5. 300 and 1024 rows: 11.4 and 18.7, before 12.6 and 21.7.
    """
    steps = segment * hopper.SINGLES
    splits = triton.cdiv(K, hopper.STEP * steps)
    walked = triton.cdiv(triton.cdiv(num_rows, 128), max(1, SMS // splits))
    return Tiles(
        first={"SEGMENT": segment, "SEGMENTS": hopper.SINGLES, "BLOCK_T": 128, "STAGES": 4, "num_warps": 8},
        second=_second(splits, 1, 4),
        rows=triton.cdiv(num_rows, 128 * walked),
        splits=splits,
        steps=steps,
        walked=walked,
    )


def _second(splits: int, singles: int, rows: int) -> dict[str, Any]:
    """Of the second kernel behind a Hopper one."""
    return {
        "FOURS": 1,
        "SINGLES": singles,
        "GROUPS": triton.next_power_of_2(triton.cdiv(splits, singles)),
        "ROWS": rows,
        "num_warps": 2 if rows == 1 else 1,
        "maxnreg": 128,
        **EXACT,
    }


def partial_sums(T: int, D: int, device: torch.device | str) -> Tensor:
    """Memory between the two launches of T rows: (splits + 1, T, 32) FP32, the last for the sums' own sum."""
    splits = max(tiles(T, STREAMS * D).splits, hopper_tiles(T, STREAMS * D).splits)
    return torch.empty(splits + 1, T, 32, dtype=torch.float32, device=device)


def weights(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    out: Mix,
    part: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    path: Path | None = None,
) -> None:
    """Launch both kernels on checked arguments; ``iterations`` 0: only pre, of the head."""
    T, D = streams.shape[0], streams.shape[2]
    check_option("hc_mix", (*get_args(Path), None), path=path)
    why_not = hopper.why_not(streams, fn)
    if path == "hopper" and why_not:
        raise ValueError(f"hc_mix: no Hopper kernel for this call: {why_not}")
    if T == 0:
        return
    K = STREAMS * D
    chosen = tiles(T, K) if path == "portable" or why_not else hopper_tiles(T, K)
    part = partial_sums(T, D, streams.device) if part is None else part
    check("hc_mix", dense=["part"], device=streams.device, part=(part, f"S {T} 32", torch.float32))
    if len(part) <= chosen.splits:
        raise ValueError(f"hc_mix: part of {len(part)} sums; expected {chosen.splits + 1} or more")
    _launch_first(chosen, streams, fn, part, K)
    finish_kernel[(triton.cdiv(T, chosen.second["ROWS"]),)](
        part,
        part[chosen.splits],
        base,
        scale,
        *out,
        T,
        chosen.splits,
        K,
        norm_eps,
        hc_eps,
        ITERATIONS=iterations,
        FAST=FAST,
        **(overlap(streams.device) if chosen.early else {"PDL": False}),
        **chosen.second,
    )


def _launch_first(chosen: Tiles, streams: Tensor, fn: Tensor, part: Tensor, K: int) -> None:
    grid, constants = (chosen.rows, chosen.splits), {"OUTPUTS": len(fn), **chosen.first}
    if chosen.steps:
        copied = hopper.descriptors(streams, fn, chosen.first["BLOCK_T"])
        constants |= overlap(streams.device) if chosen.early else {"PDL": False}
    if chosen.walked:
        partial_columns_kernel[grid](copied[0], fn, part, len(streams), K, chosen.walked, **constants)
    elif chosen.steps:
        hopper.partial_hopper_kernel[grid](*copied, part, len(streams), K, chosen.steps, **constants)
    else:
        halves = chosen.halves and streams.dtype is torch.bfloat16
        partial_kernel[grid](
            streams.view(torch.int16) if halves else streams,
            fn,
            part,
            streams.stride(0),
            len(streams),
            K,
            **overlap(streams.device),
            **constants,
        )
