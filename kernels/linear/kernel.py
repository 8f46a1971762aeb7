"""NVFP4 linear layers, W4A4, and block-diagonal ones: see :func:`nvfp4_linear`.

A launch with few rows is bound by the weight's bytes: each program reads 64 rows of the weight once, four or more
tiles ahead, and K is cut into parts where N alone gives too few programs. Parts and the order inside them follow
from (N, K) alone, and up to 16 rows the products run through the same instruction, so that a row's bits do not
depend on the rows beside it. More rows take larger tiles and another instruction, hence other last bits. On a Hopper
sizes that fit go to :mod:`kernels.linear.hopper_kernel` with up to 16 rows, in the same parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.linear import finish_kernel, fp8_kernel, hopper_kernel, wide_kernel
from kernels.linear.finish_kernel import finish
from kernels.linear.nvfp4_kernel import codes_for, nvfp4_product, way
from kernels.linear.tiles import DECODE, parts_of, product_build, tile_for
from kernels.nvfp4_quantise.ref import Nvfp4Rows


@triton.jit(do_not_specialize=["T", "steps"])
def _nvfp4_linear(
    x_ptr,
    x_scale_ptr,
    gsa_ptr,
    w_ptr,
    w_scale_ptr,
    scale_2_ptr,
    out_ptr,
    T,
    N,
    G,
    x_stride,
    x_scale_stride,
    w_stride,
    w_scale_stride,
    scale_2_stride,
    steps,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    WAY: tl.constexpr,
):
    tiles = tl.cdiv(N, BN)
    part = tl.program_id(1)
    group = tl.program_id(0) // tiles
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    w_row = (group.to(tl.int64) * N) + tl.where(n < N, n, 0)
    x_row = tl.where(t < T, t, 0).to(tl.int64)  # what lies past the end is computed and not stored
    acc = nvfp4_product(
        w_ptr,
        w_scale_ptr,
        w_row,
        w_stride,
        w_scale_stride,
        x_ptr,
        x_scale_ptr,
        x_row,
        x_stride,
        x_scale_stride,
        0 if SHARED else group,
        part * steps,
        steps,
        BN,
        BT,
        BK,
        STAGES,
        WHOLE,
        WAY,
    )
    acc = acc * tl.load(gsa_ptr + x_row)[None, :] * tl.load(scale_2_ptr + group * scale_2_stride)
    at = ((part * T + t[None, :].to(tl.int64)) * G + group) * N + n[:, None]
    inside = (n < N)[:, None] & (t < T)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


class Nvfp4Weight(NamedTuple):
    """A stored NVFP4 matrix, or a stack of them.

    Attributes
    ----------
    codes : (..., N, K/2) uint8, dense
        Two codes a byte, the even column in the low nibble.
    scales : (..., N, K/16) uint8, dense
        E4M3.
    scale_2 : (1,) or (G,) FP32
        One for all, or one a matrix.
    """

    codes: Tensor
    scales: Tensor
    scale_2: Tensor


def nvfp4_linear(
    x: Nvfp4Rows, weight: Nvfp4Weight, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """``(x @ W.T) * gsa * scale_2`` of NVFP4 codes, FP32 sums, stored once.

    Parameters
    ----------
    x : Nvfp4Rows, (T, K/2), (T, K/16), (T,)
        Rows of codes and scales may be strided.
    weight : Nvfp4Weight, (N, K/2), (N, K/16), (1,)
    dtype : bfloat16 or float32
        Of the result.
    out : (T, N), optional
        Dense, of ``dtype``; it is written and returned.

    Returns
    -------
    (T, N) bfloat16 or float32
        NaN rows where gsa is NaN.

    Raises
    ------
    TypeError, ValueError
        Another stored format, shape or stride (:func:`kernels.arguments.check`).
    """
    stack = Nvfp4Weight(weight.codes[None], weight.scales[None], weight.scale_2)
    return _grouped("nvfp4_linear", x, stack, dtype, out)


def grouped_linear(
    x: Nvfp4Rows, weight: Nvfp4Weight, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Block-diagonal :func:`nvfp4_linear`: columns of group g meet matrix g (o_a).

    Parameters
    ----------
    x : Nvfp4Rows, (T, G*K/2), (T, G*K/16), (T,)
    weight : Nvfp4Weight, (G, N, K/2), (G, N, K/16), (1,) or (G,)
    dtype, out : as :func:`nvfp4_linear`

    Returns
    -------
    (T, G*N) bfloat16 or float32
    """
    return _grouped("grouped_linear", x, weight, dtype, out)


def stacked_linear(
    x: Nvfp4Rows, weight: Nvfp4Weight, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Several matrices of one size on the same rows, in one launch: the shared expert's gate and up.

    Parameters
    ----------
    x : Nvfp4Rows, (T, K/2), (T, K/16), (T,)
    weight : Nvfp4Weight, (G, N, K/2), (G, N, K/16), (1,) or (G,)
    dtype, out : as :func:`nvfp4_linear`

    Returns
    -------
    (T, G*N) bfloat16 or float32
    """
    return _grouped("stacked_linear", x, weight, dtype, out, shared=True)


def _grouped(
    op: str,
    x: Nvfp4Rows,
    weight: Nvfp4Weight,
    dtype: torch.dtype,
    out: Tensor | None,
    *,
    shared: bool = False,
) -> Tensor:
    """One launch over G matrices: on columns of their own, or on the same ones."""
    check_option(op, FLOATS, dtype=dtype)
    groups, n, half = check(  # C: bytes of a row of codes, 16 of which have two scales
        op,
        dense=("weight", "weight_scales"),
        weight=(weight.codes, "G N C", torch.uint8),
        weight_scales=(weight.scales, "G N C/8", torch.uint8),
    ).values()
    k, wide = 2 * half, groups * n
    width = k if shared else groups * k
    check(
        op,
        dense=("gsa", "scale_2", "out"),
        device=weight.codes.device,
        codes=(x.codes, f"T {width // 2}", torch.uint8),
        scales=(x.scales, f"T {width // 16}", torch.uint8),
        gsa=(x.gsa, "T", torch.float32),
        scale_2=(weight.scale_2, "1" if weight.scale_2.numel() == 1 else f"{groups}", torch.float32),
        out=(out, f"T {wide}", dtype),
    )
    rows = len(x.codes)
    out = torch.empty(rows, wide, dtype=dtype, device=x.codes.device) if out is None else out
    if rows == 0 or n == 0:
        return out
    how = way(x.codes.device)
    tile = tile_for(rows, how == "native")
    parts = parts_of(groups, n, k, tile.bk) if rows <= 16 else 1
    target = out if parts == 1 else torch.empty(parts, rows, wide, dtype=torch.float32, device=x.codes.device)
    words, weight_words = codes_for(x.codes, "codes", how), codes_for(weight.codes, "weight", how)
    if _for_hopper(rows, n, k, parts, x, weight):
        hopper_weight = weight_words, weight.scales, weight.scale_2
        ahead = 0 if shared else k
        hopper_kernel.launch((words, x.scales, x.gsa), hopper_weight, target, parts=parts, ahead=ahead)
        if parts > 1:
            finish(target, out)
        return out
    _nvfp4_linear[(groups * triton.cdiv(n, tile.bn), parts, triton.cdiv(rows, tile.bt))](
        words,
        x.scales,
        x.gsa,
        weight_words,
        weight.scales,
        weight.scale_2,
        target,
        rows,
        n,
        groups,
        words.stride(0),
        x.scales.stride(0),
        weight_words.shape[2],
        weight.scales.shape[2],
        int(weight.scale_2.numel() > 1),
        tile.steps(k // parts),
        SHARED=shared,
        **tile.constants(how, k),
        num_warps=tile.warps,
    )
    if parts > 1:
        finish(target, out)
    return out


def _for_hopper(rows: int, n: int, k: int, parts: int, x: Nvfp4Rows, weight: Nvfp4Weight) -> bool:
    """Up to 16 rows of sizes that the Gluon kernel takes, whatever the number of rows, on a Hopper."""
    return (
        rows <= hopper_kernel.MOST_ROWS
        and hopper_kernel.here(x.codes.device)
        and hopper_kernel.fits(n, k // parts, hopper_kernel.MOST_ROWS)
        and hopper_kernel.addressable(x.scales, weight.scales)
    )


def builds(sizes: Sizes) -> list[Build]:
    """Every product of one model at decode and in batches, for Hopper by PTX and for Blackwell by block-scaled dots."""
    low_rank = sizes.o_groups * sizes.o_lora_rank
    heads = sizes.num_attention_heads * sizes.head_dim
    k_of_group = heads // sizes.o_groups
    shapes = [("q_b", 1, heads, sizes.q_lora_rank, rows) for rows in (1, 16, 64)]
    shapes += [
        ("o_a", sizes.o_groups, sizes.o_lora_rank, k_of_group, 1),
        ("o_b", 1, sizes.hidden_size, low_rank, 1),
    ]
    found = []
    for name, groups, n, k, rows in shapes:
        parts = parts_of(groups, n, k, DECODE.bk)
        if rows <= hopper_kernel.MOST_ROWS and hopper_kernel.fits(n, k // parts, hopper_kernel.MOST_ROWS):
            found.append(hopper_kernel.build(f"{name}/T={rows}/{sizes.name}", k, rows, parts, k))
        found += [
            _build(f"{name}/T={rows}/{sizes.name}", groups, n, k, rows, how) for how in ("ptx", "native")
        ]
    return found + wide_kernel.builds(sizes) + fp8_kernel.builds(sizes) + finish_kernel.builds(sizes)


def _build(name: str, groups: int, n: int, k: int, rows: int, how: str) -> Build:
    tile = tile_for(rows, how == "native")
    parts = parts_of(groups, n, k, tile.bk) if rows <= 16 else 1
    return product_build(
        f"linear/nvfp4_{how}/{name}",
        _nvfp4_linear,
        tile,
        how,
        k,
        store="*bf16" if parts == 1 else "*fp32",
        integers=("T", "G", "scale_2_stride"),
        constants={"SHARED": False},
    )
