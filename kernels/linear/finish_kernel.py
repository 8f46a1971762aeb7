"""A product whose K is split over programs: into how many parts, and its second half.

Partial sums are added in one order, then stored.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.build_spec import Build, Sizes
from kernels.overlap import OVERLAPPED, follow, overlap

BLOCK = 256  # of 4 warps. o_b with one row and with 16, H200, 2026-12-01: 7.4 and 9.1 us; 512 7.6, 9.2; 1024 8.7, 10.8

ENOUGH_PROGRAMS = 256  # of a launch: two a multiprocessor of an H200 or B200
LEAST_COLUMNS = 256  # of a part


def num_parts(
    tiles: int, k: int, step: int, *, enough: int = ENOUGH_PROGRAMS, least: int = LEAST_COLUMNS
) -> int:
    """Parts that K is cut into at decode: from N and K alone, so that a row's bits do not depend on its batch.

    Parameters
    ----------
    tiles : programs of a launch that is not cut.
    k, step : columns, and those of a step, of which each part has a whole number.
    enough : programs from which on nothing is cut.
    least : columns of a part, or more.
    """
    parts = 1
    while tiles * parts < enough and k % (2 * parts * step) == 0 and k // (2 * parts) >= least:
        parts *= 2
    return parts


@triton.jit
def sqrt_softplus(x):
    """``sqrt(log(1 + e^x))`` of FP64: under -17 the logarithm is e^x; else by log(w) * u / (w - 1) with w = 1 + u."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    rounded = w - 1.0
    log1p = tl.where(rounded == 0.0, u, tl.log(w) * (u / tl.where(rounded == 0.0, 1.0, rounded)))
    root = tl.sqrt(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)
    return tl.where(x < -17.0, tl.exp(tl.minimum(x, 0.0) * 0.5), root)


@triton.jit
def _finish(
    part_ptr,
    out_ptr,
    size,
    PARTS: tl.constexpr,
    SCORES: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(part_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_ptr + part * size + at, mask=inside, other=0.0)
    if SCORES:
        total = sqrt_softplus(total.to(tl.float64)).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def finish(parts: Tensor, out: Tensor, *, scores: bool = False) -> None:
    """Add parts [P, T, N] FP32, first to last, into dense ``out`` [T, N]; ``scores``: sqrt(softplus) of the sums."""
    size = out.numel()
    constants = {"PARTS": parts.shape[0], "SCORES": scores, "BLOCK": BLOCK, **overlap(out.device)}
    _finish[(triton.cdiv(size, BLOCK),)](parts, out, size, **constants)


def builds(sizes: Sizes) -> list[Build]:
    """The sum of eight parts, and the router's of sixteen with its scores."""
    found = []
    for name, parts, scores, store in (("sum", 8, False, "*bf16"), ("scores", 16, True, "*fp32")):
        pointers = {"part_ptr": "*fp32", "out_ptr": store}
        found.append(
            Build(
                name=f"linear/finish/{name}/{sizes.name}",
                kernel=_finish,
                signature=pointers | {"size": "i32"},
                constants={"PARTS": parts, "SCORES": scores, "PDL": True, "BLOCK": BLOCK},
                aligned=(*pointers, "size"),
                options=OVERLAPPED,
            )
        )
    return found
