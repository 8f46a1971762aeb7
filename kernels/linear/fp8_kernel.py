"""Linear layers on FP8 activations, with weights in FP8 (W8A8) or MXFP4: see :func:`fp8_linear`.

Around the product of :mod:`kernels.linear.fp8_product_kernel`; at decode K is cut into parts, as NVFP4's is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.fp8_block import GROUP
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.linear.finish_kernel import finish, num_parts
from kernels.linear.fp8_product_kernel import (
    DECODE,
    Mxfp4Weight,
    StoredWeight,
    check_weight,
    fp8_product,
    operands,
    tile_for,
)


@triton.jit(do_not_specialize=["T", "steps"])
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
    w_stride,
    steps,
    SHARED: tl.constexpr,
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
        w_stride,
        0 if SHARED else group,
        part * steps,
        steps,
        BN,
        BT,
        STAGES,
        FOUR_BIT,
    )
    at = ((part * T + t[None, :].to(tl.int64)) * G + group) * N + n[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (t < T)[None, :])


def fp8_linear(
    x: Fp8Rows, weight: StoredWeight, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
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
    x: Fp8Rows, weight: StoredWeight, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
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
    x: Fp8Rows, weight: StoredWeight, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
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


def _grouped(
    op: str,
    x: Fp8Rows,
    weight: StoredWeight,
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
    parts = num_parts(groups * triton.cdiv(n, DECODE.bn), k, GROUP) if tile is DECODE else 1
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
        weight.codes.shape[2],
        k // parts // GROUP,
        SHARED=shared,
        **tile.constants(isinstance(weight, Mxfp4Weight)),
        num_warps=tile.warps,
    )
    if parts > 1:
        finish(target, out)
    return out


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
    parts = num_parts(triton.cdiv(n, DECODE.bn), k, GROUP) if tile is DECODE else 1
    pointers = operands(four_bit) | {"out_ptr": "*bf16" if parts == 1 else "*fp32"}
    return Build(
        name=f"linear/{'mxfp4' if four_bit else 'fp8'}/{name}",
        kernel=_fp8_linear,
        signature=pointers
        | dict.fromkeys(("T", "N", "G", "x_stride", "x_scale_stride", "w_stride", "steps"), "i32"),
        constants={"SHARED": False, **tile.constants(four_bit)},
        aligned=(*pointers, "N", "x_stride", "w_stride"),
        options={"num_warps": tile.warps},
        native=() if four_bit else ("fp8",),
    )
