"""The product of FP8 rows with FP8 (W8A8) or MXFP4 weights, which linears and experts are built around.

A step is one block of 128 columns, under one activation scale a row. FP8 weights meet it on FP8 tensor cores, of which
Hopper's keep about 14 bits inside a block; MXFP4 weights are unpacked in registers to BF16, which holds their values
and E4M3's. Blocks are scaled and added in FP32.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.formats import device as fmt
from kernels.formats.fp8_block import GROUP

SQUARE = tl.constexpr(GROUP)  # and columns of a step


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


StoredWeight = Fp8Weight | Mxfp4Weight


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
    w_stride,
    ahead,
    first_step,
    steps,
    BN: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    FOUR_BIT: tl.constexpr,
):
    """FP32 sums [BN, BT] of rows ``n`` of a stack's matrix over ``steps`` blocks of columns from ``first_step`` on.

    ``matrix`` is int64; ``w_stride``: bytes of a row of the weight, which is dense; ``ahead``: how many such rows lie
    before the columns of ``x`` that meet it; ``n`` past N reads row 0, and ``x_row`` is inside.
    """
    row = tl.where(n < N, n, 0)
    K = w_stride * 2 if FOUR_BIT else w_stride
    acc = tl.zeros((BN, BT), tl.float32)
    x_at = x_ptr + x_row[:, None] * x_stride + (ahead * K + first_step * 128 + tl.arange(0, 128))[None, :]
    x_scale_at = x_scale_ptr + x_row * x_scale_stride + ahead * (K // SQUARE) + first_step
    if FOUR_BIT:
        pair = tl.arange(0, 64)[None, :]
        w_at = w_ptr + ((matrix * N + row) * w_stride + first_step * 64)[:, None] + pair
        w_scale_at = w_scale_ptr + ((matrix * N + row) * (K // 32) + first_step * 4)[:, None] + pair // 16
    else:
        w_at = w_ptr + ((matrix * N + row) * K + first_step * 128)[:, None] + tl.arange(0, 128)[None, :]
        squares = matrix * tl.cdiv(N, SQUARE) + row // SQUARE
        w_scale_at = w_scale_ptr + squares * (K // SQUARE) + first_step
    for step in tl.range(0, steps, num_stages=STAGES):
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


def check_weight(op: str, name: str, weight: StoredWeight) -> tuple[int, int, int]:
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


def operands(four_bit: bool) -> dict[str, str]:
    """Types of a product's operands."""
    weight = (
        {"w_ptr": "*u8", "w_scale_ptr": "*u8"} if four_bit else {"w_ptr": "*fp8e4nv", "w_scale_ptr": "*fp32"}
    )
    return {"x_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32", **weight}
