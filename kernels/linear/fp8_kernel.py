"""Linear layers on FP8 activations, with weights in FP8 (W8A8) or MXFP4: see :func:`fp8_linear`.

A step is one block of 128 columns, under one activation scale a row. FP8 weights meet it on FP8 tensor cores, of which
Hopper's keep about 14 bits inside a block; MXFP4 weights are unpacked in registers to BF16, which holds their values
and E4M3's. Blocks are scaled and added in FP32.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.fp8_quantise.ref import GROUP, Fp8Rows
from kernels.linear.finish_kernel import finish

ENOUGH_PROGRAMS = 256  # two a multiprocessor
LEAST_K = 256  # of one part
SQUARE = tl.constexpr(GROUP)  # rows and columns of a weight under one scale, and columns of a step


class Fp8Weight(NamedTuple):
    """A matrix stored in FP8, or a stack of them.

    Attributes
    ----------
    codes : (..., N, K) float8_e4m3fn, dense
    scales : (..., ceil(N / 128), K / 128) FP32, dense
    """

    codes: Tensor
    scales: Tensor


class Mxfp4Weight(NamedTuple):
    """A matrix stored in MXFP4, or a stack of them.

    Attributes
    ----------
    codes : (..., N, K/2) uint8, dense
        Two codes a byte, the even column in the low nibble.
    scales : (..., N, K/32) uint8, dense
        UE8M0.
    """

    codes: Tensor
    scales: Tensor


class Tile(NamedTuple):
    """Rows of the weight, rows of the activation; warps; tiles in flight."""

    bn: int
    bt: int
    warps: int
    stages: int

    def constants(self, four_bit: bool) -> dict[str, Any]:
        """Of a kernel around :func:`fp8_product`."""
        return {"BN": self.bn, "BT": self.bt, "STAGES": self.stages, "FOUR_BIT": four_bit}


DECODE, BATCH = Tile(64, 16, 4, 4), Tile(128, 64, 8, 3)


def tile_for(num_rows: int) -> Tile:
    """Tile of a product with ``num_rows`` activation rows."""
    return DECODE if num_rows <= DECODE.bt else BATCH


def num_parts(tiles: int, k: int) -> int:
    """Parts that K is cut into at decode: from N and K alone, so that a row's bits do not depend on its batch."""
    parts = 1
    while tiles * parts < ENOUGH_PROGRAMS and k % (2 * parts * GROUP) == 0 and k // (2 * parts) >= LEAST_K:
        parts *= 2
    return parts


@triton.jit
def fp8_product(
    x_ptr,
    x_scale_ptr,
    x_row,
    x_stride,
    x_scale_stride,
    w_ptr,
    w_scale_ptr,
    matrix,
    n,
    N,
    first,
    ahead,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    FOUR_BIT: tl.constexpr,
):
    """FP32 sums [BN, BT] of rows ``n`` of a stack's matrix over STEPS blocks of columns from ``first`` on.

    ``matrix`` is int64, ``first`` and ``ahead`` (what the activation's columns are ahead of the weight's) are
    multiples of 128; ``n`` past N reads row 0, and ``x_row`` is inside.
    """
    row = tl.where(n < N, n, 0)
    acc = tl.zeros((BN, BT), tl.float32)
    x_at = x_ptr + x_row[:, None] * x_stride + (ahead + first + tl.arange(0, 128))[None, :]
    x_scale_at = x_scale_ptr + x_row * x_scale_stride + (ahead + first) // SQUARE
    if FOUR_BIT:
        pair = tl.arange(0, 64)[None, :]
        w_at = w_ptr + ((matrix * N + row) * (K // 2) + first // 2)[:, None] + pair
        w_scale_at = w_scale_ptr + ((matrix * N + row) * (K // 32) + first // 32)[:, None] + pair // 16
    else:
        w_at = w_ptr + ((matrix * N + row) * K + first)[:, None] + tl.arange(0, 128)[None, :]
        squares = matrix * tl.cdiv(N, SQUARE) + row // SQUARE
        w_scale_at = w_scale_ptr + squares * (K // SQUARE) + first // SQUARE
    for step in tl.range(0, STEPS, num_stages=STAGES):
        x = tl.load(x_at + step * 128)
        x_scale = tl.load(x_scale_at + step)
        if x_scale_ptr.dtype.element_ty == tl.uint8:
            x_scale = fmt.ue8m0_value(x_scale)
        if FOUR_BIT:
            byte = tl.load(w_at + step * 64).to(tl.int32)
            scale = fmt.ue8m0_value(tl.load(w_scale_at + step * 4))
            pairs = tl.join(fmt.e2m1_value(byte & 15) * scale, fmt.e2m1_value(byte >> 4) * scale)
            w = tl.reshape(pairs, (BN, 128)).to(tl.bfloat16)
            acc += tl.dot(w, tl.trans(x.to(tl.float32).to(tl.bfloat16))) * x_scale[None, :]
        else:
            w = tl.load(w_at + step * 128)
            acc += tl.dot(w, tl.trans(x)) * (tl.load(w_scale_at + step)[:, None] * x_scale[None, :])
    return acc


@triton.jit(do_not_specialize=["T"])
def _fp8_linear(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    T,
    N,
    G,
    x_stride,
    x_scale_stride,
    K: tl.constexpr,
    X_AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    FOUR_BIT: tl.constexpr,
):
    tiles = tl.cdiv(N, BN)
    part, group = tl.program_id(1), tl.program_id(0) // tiles
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    acc = fp8_product(
        x_ptr,
        x_scale_ptr,
        tl.where(t < T, t, 0).to(tl.int64),  # what lies past the end is computed and not stored
        x_stride,
        x_scale_stride,
        w_ptr,
        w_scale_ptr,
        group.to(tl.int64),
        n,
        N,
        part * (K // PARTS),
        group * X_AHEAD,
        K,
        K // PARTS // 128,
        BN,
        BT,
        STAGES,
        FOUR_BIT,
    )
    at = ((part * T + t[None, :].to(tl.int64)) * G + group) * N + n[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (t < T)[None, :])


def fp8_linear(
    x: Fp8Rows,
    weight: Fp8Weight | Mxfp4Weight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W.T`` of FP8 rows, FP32 sums over blocks of 128 columns, stored once.

    Parameters
    ----------
    x : Fp8Rows, (T, K), (T, K/128)
        Rows may be strided; 128 divides K. Scales may be uint8, UE8M0, instead of FP32.
    weight : Fp8Weight or Mxfp4Weight, (N, K)
    dtype : bfloat16 or float32
        Of the result.
    out : (T, N), optional
        Dense, of ``dtype``.

    Returns
    -------
    (T, N) bfloat16 or float32

    Raises
    ------
    TypeError, ValueError
        Another stored format, shape or stride.
    """
    stack = type(weight)(weight.codes[None], weight.scales[None])
    return _grouped("fp8_linear", x, stack, dtype, out)


def fp8_grouped_linear(
    x: Fp8Rows,
    weight: Fp8Weight | Mxfp4Weight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Block-diagonal :func:`fp8_linear`: columns of group g meet matrix g (o_a).

    Parameters
    ----------
    x : Fp8Rows, (T, G*K), (T, G*K/128)
    weight : Fp8Weight or Mxfp4Weight, (G, N, K)
    dtype, out : as :func:`fp8_linear`

    Returns
    -------
    (T, G*N) bfloat16 or float32
    """
    return _grouped("fp8_grouped_linear", x, weight, dtype, out)


def fp8_stacked_linear(
    x: Fp8Rows,
    weight: Fp8Weight | Mxfp4Weight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Several matrices of one size on the same rows, in one launch: the shared expert's gate and up.

    Parameters
    ----------
    x : Fp8Rows, (T, K), (T, K/128)
    weight : Fp8Weight or Mxfp4Weight, (G, N, K)
    dtype, out : as :func:`fp8_linear`

    Returns
    -------
    (T, G*N) bfloat16 or float32
    """
    return _grouped("fp8_stacked_linear", x, weight, dtype, out, shared=True)


def check_weight(op: str, name: str, weight: Fp8Weight | Mxfp4Weight) -> tuple[int, int, int]:
    """Matrices of a stack, and rows and columns of one; a stack that does not fit is refused."""
    if isinstance(weight, Mxfp4Weight):
        given = {
            name: (weight.codes, "G N C", torch.uint8),
            f"{name}_scales": (weight.scales, "G N C/16", torch.uint8),
        }
        sizes = check(op, dense=tuple(given), **given)
        return sizes["G"], sizes["N"], 2 * sizes["C"]
    groups, n, k = check(op, **{name: (weight.codes, "G N K", torch.float8_e4m3fn)}).values()
    given = {
        name: (weight.codes, "G N K", torch.float8_e4m3fn),
        f"{name}_scales": (weight.scales, f"{groups} {triton.cdiv(n, GROUP)} K/{GROUP}", torch.float32),
    }
    check(op, dense=tuple(given), **given)
    return groups, n, k


def _grouped(
    op: str,
    x: Fp8Rows,
    weight: Fp8Weight | Mxfp4Weight,
    dtype: torch.dtype,
    out: Tensor | None,
    *,
    shared: bool = False,
) -> Tensor:
    """One launch over G matrices: on columns of their own, or on the same ones."""
    check_option(op, FLOATS, dtype=dtype)
    groups, n, k = check_weight(op, "weight", weight)
    if k % GROUP:
        raise ValueError(f"{op}: weight has {k} columns, no multiple of FP8's {GROUP} values a scale")
    width = k if shared else groups * k
    check(
        op,
        dense=("out",),
        device=weight.codes.device,
        codes=(x.codes, f"T {width}", torch.float8_e4m3fn),
        scales=(x.scales, f"T {width // GROUP}", (torch.float32, torch.uint8)),
        out=(out, f"T {groups * n}", dtype),
    )
    rows, device = len(x.codes), x.codes.device
    out = torch.empty(rows, groups * n, dtype=dtype, device=device) if out is None else out
    if rows == 0 or n == 0:
        return out
    tile = tile_for(rows)
    parts = num_parts(groups * triton.cdiv(n, DECODE.bn), k) if tile is DECODE else 1
    target = out if parts == 1 else torch.empty(parts, rows, groups * n, dtype=torch.float32, device=device)
    _fp8_linear[(groups * triton.cdiv(n, tile.bn), parts, triton.cdiv(rows, tile.bt))](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        target,
        rows,
        n,
        groups,
        x.codes.stride(0),
        x.scales.stride(0),
        K=k,
        X_AHEAD=0 if shared else k,
        PARTS=parts,
        **tile.constants(isinstance(weight, Mxfp4Weight)),
        num_warps=tile.warps,
    )
    if parts > 1:
        finish(target, out)
    return out


def operands(four_bit: bool) -> dict[str, str]:
    """Types of a product's operands."""
    weight = (
        {"w_ptr": "*u8", "w_scale_ptr": "*u8"} if four_bit else {"w_ptr": "*fp8e4nv", "w_scale_ptr": "*fp32"}
    )
    return {"x_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32", **weight}


def builds(sizes: Sizes) -> list[Build]:
    """A product of attention at decode and one in batches, in both stored formats."""
    heads = sizes.num_attention_heads * sizes.head_dim
    shapes = (("q_b", heads, sizes.q_lora_rank, 16), ("kv", sizes.head_dim, sizes.hidden_size, 64))
    return [
        _build(f"{name}/T={rows}/{sizes.name}", n, k, rows, four_bit=four_bit)
        for name, n, k, rows in shapes
        for four_bit in (False, True)
    ]


def _build(name: str, n: int, k: int, rows: int, *, four_bit: bool) -> Build:
    tile = tile_for(rows)
    parts = num_parts(triton.cdiv(n, DECODE.bn), k) if tile is DECODE else 1
    pointers = operands(four_bit) | {"out_ptr": "*bf16" if parts == 1 else "*fp32"}
    return Build(
        name=f"linear/{'mxfp4' if four_bit else 'fp8'}/{name}",
        kernel=_fp8_linear,
        signature=pointers | dict.fromkeys(("T", "N", "G", "x_stride", "x_scale_stride"), "i32"),
        constants={"K": k, "X_AHEAD": k, "PARTS": parts, **tile.constants(four_bit)},
        aligned=(*pointers, "N", "x_stride"),
        options={"num_warps": tile.warps},
        native=() if four_bit else ("fp8",),
    )
