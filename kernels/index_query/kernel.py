"""RoPE, Hadamard and quantisation of the indexer's query in one launch; the contract is kernels/index_query/ref.py.

A program owns a few heads of one token. RoPE and the Hadamard sums are FP64, as in the refs: products and sums of BF16
and FP32 values are exact there (a Hadamard sum while its terms lie within 2^38 of each other), so that bits are the
ref's whatever the order; but a sum of nothing but zeros may have the other zero's sign. On a GPU whose FP64 is slow
that shows in FP4's prefill alone.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt

Form = Literal["fp8", "fp4", "fp4_folded"]
FORMS = {"fp8": 0, "fp4": 1, "fp4_folded": 2}
HEAD_DIM = 128
ROPE_PAIRS = 32  # of the last 64 dims
HEADS_FP8, HEADS_FP4 = 16, 4  # heads a program; FP4's sums hold 16 FP64 a value in registers
WARPS = 4


@triton.jit
def rotated(x, cos_ptr, sin_ptr, token, D: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """RoPE of [ROWS, D] FP32 on the last PAIRS pairs, one token's cos and sin for all rows, or a token a row."""
    pair = tl.arange(0, D // 2) - (D // 2 - PAIRS)
    turns = pair >= 0
    at = token * PAIRS + pair[None, :]
    cos = tl.load(cos_ptr + at, turns[None, :], other=1.0).to(tl.float64)
    sin = tl.load(sin_ptr + at, turns[None, :], other=0.0).to(tl.float64)
    even, odd = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
    wide_even, wide_odd = even.to(tl.float64), odd.to(tl.float64)
    turned_even = (wide_even * cos - wide_odd * sin).to(tl.float32)
    turned_odd = (wide_odd * cos + wide_even * sin).to(tl.float32)
    even = tl.where(turns[None, :], turned_even, even)  # the rest passes through: -0 and NaN too
    odd = tl.where(turns[None, :], turned_odd, odd)
    return tl.reshape(tl.join(even, odd), (ROWS, D))


@triton.jit
def _signs(SIZE: tl.constexpr):
    """Sylvester's matrix of size up to 16, FP64: the parity of the common bits of row and column."""
    common = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float64)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, D: tl.constexpr):
    """:func:`kernels.hadamard.ref.hadamard` of [ROWS, D] FP32, D = 128 or 64: H_D is H_(D/8) x H_8."""
    OUTER: tl.constexpr = D // 8
    wide = tl.reshape(x, (ROWS, OUTER, 8)).to(tl.float64)
    inner = tl.sum(wide[:, :, :, None] * _signs(8)[None, None, :, :], 2)  # [ROWS, OUTER, 8]
    y = tl.sum(inner[:, :, None, :] * _signs(OUTER)[None, :, :, None], 1)
    return tl.reshape((y * D**-0.5).to(tl.float32), (ROWS, D))


@triton.jit
def _folded(codes, scales, ROWS: tl.constexpr, D: tl.constexpr):
    """Packed E2M1 [ROWS, D/2] and UE8M0 [ROWS, D/32] as E4M3 [ROWS, D] and the unit [ROWS] that multiplies it."""
    wide = codes.to(tl.int32)
    values = tl.reshape(tl.join(fmt.e2m1_value(wide & 15), fmt.e2m1_value(wide >> 4)), (ROWS, D // 32, 32))
    scale = fmt.ue8m0_value(scales)
    lost = tl.max((scale != scale).to(tl.int32), 1) > 0
    unit = tl.where(lost, float("nan"), tl.max(scale, 1)) * 0.015625
    share = tl.div_rn(scale, tl.broadcast_to(unit[:, None], scale.shape))
    return fmt.e4m3(tl.reshape(values * share[:, :, None], (ROWS, D))), unit


@triton.jit
def _query_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    code_ptr,
    scale_ptr,
    out_weight_ptr,
    q_stride,
    weight_stride,
    H,
    SCALE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # token * H * D outgrows int32 on a long prompt
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = heads < H
    dims = tl.arange(0, D)
    x = tl.load(q_ptr + token * q_stride + heads[:, None] * D + dims[None, :], there[:, None], other=0.0)
    x = rotated(x.to(tl.float32), cos_ptr, sin_ptr, token, D, PAIRS, ROWS)
    if q_ptr.dtype.element_ty == tl.bfloat16:
        x = x.to(tl.bfloat16).to(tl.float32)  # the query's store, kept in registers
    weights = tl.load(weight_ptr + token * weight_stride + heads, there, other=0.0)
    weights = (weights.to(tl.float64) * SCALE).to(tl.float32)
    row = token * H + heads
    if FORM == 0:
        codes, scale = fmt.fp8_scaled(x)
        weights *= scale
        tl.store(code_ptr + row[:, None] * D + dims[None, :], codes, there[:, None])
    else:
        packed, scales = fmt.mxfp4_block(hadamard(x, ROWS, D), ROWS, D)
        if FORM == 1:
            half, group = tl.arange(0, D // 2), tl.arange(0, D // 32)
            tl.store(code_ptr + row[:, None] * (D // 2) + half[None, :], packed, there[:, None])
            tl.store(scale_ptr + row[:, None] * (D // 32) + group[None, :], scales, there[:, None])
        else:
            codes, unit = _folded(packed, scales, ROWS, D)
            weights *= unit
            tl.store(code_ptr + row[:, None] * D + dims[None, :], codes, there[:, None])
    tl.store(out_weight_ptr + row, weights, there)


def index_query(
    q: Tensor, cos: Tensor, sin: Tensor, weights: Tensor, *, scale: float, form: Form = "fp8"
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Rotate and quantise queries; see the functions of :mod:`kernels.index_query.ref`.

    Parameters
    ----------
    q : (T, H, 128) BF16 or FP32
        The projection's result; rotated, it is stored as BF16. FP32 is a value that nothing stored, such as a
        reference's: it is quantised as it is. Tokens may be strided; a token's heads are dense.
    cos, sin : (T, 32) FP32
    weights : (T, H) BF16
        Tokens may be strided.
    scale : float
        ``128^-0.5 * H^-0.5``.
    form : "fp8", "fp4" (native FP4 products) or "fp4_folded" (the same values as E4M3)

    Returns
    -------
    codes : (T, H, 128) float8_e4m3fn; "fp4": (T, H, 64) uint8
    scales : (T, H, 4) uint8, with "fp4" alone
    weights : (T, H) FP32

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above; an unknown form.
    """
    check_option("index_query", FORMS, form=form)
    sizes = check(
        "index_query",
        dense=("cos", "sin"),
        q=(q, f"T H {HEAD_DIM}", (torch.bfloat16, torch.float32)),
        cos=(cos, f"T {ROPE_PAIRS}", torch.float32),
        sin=(sin, f"T {ROPE_PAIRS}", torch.float32),
        weights=(weights, "T H", torch.bfloat16),
    )
    T, H = sizes["T"], sizes["H"]
    if T and q.stride(1) != HEAD_DIM:
        raise ValueError(f"index_query: q of strides {q.stride()}: a token's heads must be dense")
    packed = form == "fp4"
    codes = torch.empty(
        T,
        H,
        HEAD_DIM // 2 if packed else HEAD_DIM,
        dtype=torch.uint8 if packed else torch.float8_e4m3fn,
        device=q.device,
    )
    scales = torch.empty(T, H, HEAD_DIM // 32, dtype=torch.uint8, device=q.device) if packed else codes
    out_weights = torch.empty(T, H, dtype=torch.float32, device=q.device)
    rows = HEADS_FP8 if form == "fp8" else HEADS_FP4
    if T and H:
        _query_kernel[(T, triton.cdiv(H, rows))](
            q,
            cos,
            sin,
            weights,
            codes,
            scales,
            out_weights,
            q.stride(0),
            weights.stride(0),
            H,
            SCALE=scale,
            D=HEAD_DIM,
            PAIRS=ROPE_PAIRS,
            FORM=FORMS[form],
            ROWS=rows,
            num_warps=WARPS,
            **fmt.EXACT,
        )
    return (codes, scales, out_weights) if packed else (codes, out_weights)


def builds(sizes: Sizes) -> list[Build]:
    """One build a form."""
    signature = {
        "q_ptr": "*bf16",
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
        "weight_ptr": "*bf16",
        "code_ptr": "*fp8e4nv",
        "scale_ptr": "*u8",
        "out_weight_ptr": "*fp32",
        "q_stride": "i32",
        "weight_stride": "i32",
        "H": "i32",
    }
    return [
        Build(
            name=f"index_query/{form}/{sizes.name}",
            kernel=_query_kernel,
            signature=signature | ({"code_ptr": "*u8"} if form == "fp4" else {}),
            constants={
                "SCALE": sizes.index_head_dim**-0.5 * sizes.index_n_heads**-0.5,
                "D": sizes.index_head_dim,
                "PAIRS": sizes.qk_rope_head_dim // 2,
                "FORM": number,
                "ROWS": HEADS_FP8 if form == "fp8" else HEADS_FP4,
            },
            aligned=tuple(signature),
            options={"num_warps": WARPS} | fmt.EXACT,
        )
        for form, number in FORMS.items()
    ]
