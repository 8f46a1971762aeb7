"""The indexer's scores on a GPU: what is called, and which kernel runs. The contract is kernels/index_logits/ref.py."""

from dataclasses import replace
from typing import Literal, get_args

import torch
import triton
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.index_logits import fp4_kernel as fp4
from kernels.index_logits import fp8_kernel as fp8
from kernels.index_logits import hopper_kernel as hopper
from kernels.index_logits import paged_kernel as paged
from kernels.overlap import overlap

Path = Literal["hopper", "portable"]
HEAD_DIM = paged.HEAD_DIM


def index_logits(
    q: Tensor,
    k: Tensor,
    key_scale: Tensor,
    weights: Tensor,
    limits: Tensor,
    *,
    fill: bool = True,
    out: Tensor | None = None,
    path: Path | None = None,
) -> Tensor:
    """Compute :func:`kernels.index_logits.ref.index_logits` of queries over one sequence's contiguous keys.

    Parameters
    ----------
    q : (T, H, 128) float8_e4m3fn
    k : (C, 128) float8_e4m3fn
    key_scale : (C,) FP32
    weights : (T, H) FP32
        Times q's scale, as :mod:`kernels.index_query` writes them.
    limits : (T,) int32
        Row t sees entries ``s < limits[t]``; over C means C.
    fill : bool
        Hidden entries are set to -inf; else they are left as they were: :mod:`kernels.index_topk` does not read them.
    out : (T, C) FP32 or None
        Rows may be strided. None: a new tensor.
    path : "hopper", "portable" or None
        None: the Hopper kernel where it can run, which :func:`kernels.index_logits.hopper_kernel.why_not` tells.

    Returns
    -------
    (T, C) FP32
        On Hopper FP8 products are summed with about 14 bits. A row's bits do not depend on its batch, an entry's not
        on the other entries.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above; a path that cannot run.
    """
    check_option("index_logits", (*get_args(Path), None), path=path)
    sizes = check(
        "index_logits",
        dense=("q", "k", "key_scale", "weights", "limits"),
        q=(q, f"T H {HEAD_DIM}", torch.float8_e4m3fn),
        k=(k, f"C {HEAD_DIM}", torch.float8_e4m3fn),
        key_scale=(key_scale, "C", torch.float32),
        weights=(weights, "T H", torch.float32),
        limits=(limits, "T", torch.int32),
        out=(out, "T C", torch.float32),
    )
    T, H, C = sizes["T"], sizes["H"], sizes["C"]
    why_not = hopper.why_not(q, k)
    if path == "hopper" and why_not:
        raise ValueError(f"index_logits: no Hopper kernel for this call: {why_not}")
    out = torch.empty(T, C, dtype=torch.float32, device=q.device) if out is None else out
    if T == 0 or C == 0:
        return out
    if path != "portable" and not why_not:
        hopper.launch(q, k, key_scale, weights, limits, out, fill=fill)
    else:
        grid = (triton.cdiv(C, fp8.PREFILL.keys), triton.cdiv(T, fp8.ROWS))
        fp8.prefill_kernel[grid](
            q,
            k,
            key_scale,
            weights,
            limits,
            out,
            T,
            C,
            out.stride(0),
            H=H,
            D=HEAD_DIM,
            FILL=fill,
            BLOCK_H=_block(H),
            BLOCK_N=fp8.PREFILL.keys,
            BLOCK_T=fp8.ROWS,
            num_warps=fp8.PREFILL.warps,
            num_stages=fp8.PREFILL.stages,
        )
    return out


def paged_index_logits(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    weights: Tensor,
    limits: Tensor,
    *,
    page_size: int,
    fill: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Compute :func:`kernels.index_logits.ref.index_logits` of a few queries a sequence over a paged key cache.

    Parameters
    ----------
    q : (B, N, H, 128) float8_e4m3fn
        N queries of each of B sequences.
    pages : (num_pages, page_bytes) uint8
        A page is ``page_size`` x 128 E4M3 codes, then ``page_size`` FP32 scales (the layout of DeepGEMM's paged
        kernel too). ``page_bytes`` may be more than that; the row stride is a multiple of 16.
    page_table : (B, M) int32
        Page of entries ``i * page_size`` and on; only those under a limit are read. Rows may be strided.
    weights : (B, N, H) FP32
    limits : (B, N) int32
        Entries each query sees; over ``M * page_size`` means that.
    page_size : int
    fill, out
        As :func:`index_logits`; out is (B, N, M * page_size), its rows ``out.stride(1)`` apart throughout.

    Returns
    -------
    (B, N, M * page_size) FP32

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above.
    """
    sizes = check(
        "paged_index_logits",
        dense=("q", "weights", "limits"),
        aligned={"pages": 16},
        q=(q, f"B N H {HEAD_DIM}", torch.float8_e4m3fn),
        pages=(pages, "num_pages page_bytes", torch.uint8),
        page_table=(page_table, "B M", torch.int32),
        weights=(weights, "B N H", torch.float32),
        limits=(limits, "B N", torch.int32),
        out=(out, "B N W", torch.float32),
    )
    B, N, H = sizes["B"], sizes["N"], sizes["H"]
    paged.check_pages("paged_index_logits", pages, page_size, HEAD_DIM + 4)
    out = paged.paged_out("paged_index_logits", out, B, N, sizes["M"] * page_size, q.device)
    paged.launch(
        fp8.paged_kernel,
        (q, pages.view(torch.float8_e4m3fn), pages.view(torch.float32)),
        (page_table, weights, limits),
        out,
        pages.stride(0),
        fp8.DECODE,
        fp8.PLACES,
        {"H": H, "BLOCK_H": _block(H), "PAGE": page_size, "FILL": fill, **overlap(q.device)},
    )
    return out


def paged_index_logits_fp4(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    weights: Tensor,
    limits: Tensor,
    *,
    page_size: int,
    q_scales: Tensor | None = None,
    fill: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Score queries over a paged cache of MXFP4 keys; see :func:`kernels.index_logits.kernel.paged_index_logits`.

    A prefill is one sequence of many queries.

    Parameters
    ----------
    q : (B, N, H, 128) float8_e4m3fn, folded; or (B, N, H, 64) uint8, MXFP4 codes for a GPU with FP4 products
    pages : (num_pages, page_bytes) uint8
        ``page_size`` x 64 bytes of codes, then ``page_size`` x 4 UE8M0 scales; the row stride is a multiple of 16.
    page_table : (B, M) int32
    weights : (B, N, H) FP32
        Of the same form as q.
    limits : (B, N) int32
    page_size : int
    q_scales : (B, N, H, 4) uint8 or None
        With MXFP4 codes; H is then a power of two from 16 on.
    fill, out
        As there.

    Returns
    -------
    (B, N, M * page_size) FP32
        A group's products are exact; scores are sums of those in FP32.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above.
    """
    native = q_scales is not None
    sizes = check(
        "paged_index_logits_fp4",
        dense=("q", "q_scales", "weights", "limits"),
        aligned={"pages": 16},
        q=(
            q,
            f"B N H {HEAD_DIM // 2 if native else HEAD_DIM}",
            torch.uint8 if native else torch.float8_e4m3fn,
        ),
        q_scales=(q_scales, f"B N H {fp4.GROUPS}", torch.uint8),
        pages=(pages, "num_pages page_bytes", torch.uint8),
        page_table=(page_table, "B M", torch.int32),
        weights=(weights, "B N H", torch.float32),
        limits=(limits, "B N", torch.int32),
        out=(out, "B N W", torch.float32),
    )
    B, N, H = sizes["B"], sizes["N"], sizes["H"]
    paged.check_pages("paged_index_logits_fp4", pages, page_size, fp4.ENTRY_BYTES)
    if native and (H < paged.MIN_HEADS or H & (H - 1)):
        raise ValueError(
            f"paged_index_logits_fp4: q of {H} heads; expected a power of two from {paged.MIN_HEADS} on"
        )
    out = paged.paged_out("paged_index_logits_fp4", out, B, N, sizes["M"] * page_size, q.device)
    rows, constants = (page_table, weights, limits), {"H": H, "PAGE": page_size, "FILL": fill}
    rest = (rows, out, pages.stride(0), fp4.TILE, fp4.PLACES)
    if q_scales is None:
        paged.launch(fp4.folded_kernel, (q, pages), *rest, {**constants, "BLOCK_H": _block(H)})
    else:
        paged.launch(fp4.native_kernel, (q, q_scales, pages), *rest, constants)
    return out


def _block(H: int) -> int:
    """Heads of a product: a power of two, and not too few for the tensor cores."""
    return max(paged.MIN_HEADS, triton.next_power_of_2(H))


def builds(sizes: Sizes) -> list[Build]:
    """Every specialisation of all kernels here at one model's shapes, hidden entries left or filled."""
    left = [*fp8.builds(sizes), *hopper.builds(sizes), *fp4.builds(sizes)]
    tail = f"/{sizes.name}"
    filled = [
        replace(
            build,
            name=f"{build.name.removesuffix(tail)}_fill{tail}",
            constants={**build.constants, "FILL": True},
        )
        for build in left
    ]
    return left + filled
