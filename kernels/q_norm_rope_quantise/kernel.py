"""Norm of each head of q, RoPE, and the form in which attention reads q, Triton; see the ref beside this.

One launch between q_b's product and attention. The values are those of the kernels rmsnorm (to FP32) and rope (to
BF16), and the quantiser is the ref's, bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.formats.kv_record import GROUP, ROPE
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.rmsnorm.kernel import FLOATS, inverse_rms, stored
from kernels.rope.kernel import load_cos_sin, rotated

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8


@triton.jit
def _load(
    q_ptr, cos_ptr, sin_ptr, row, held, heads, token_stride, eps, NOPE, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Nope [ROWS, COLS] and rope [ROWS, 64] after the norm, the turn and the BF16 store; zeros beyond nope."""
    token = row // heads
    at = q_ptr + (token.to(tl.int64) * token_stride + (row % heads) * (NOPE + 64))[:, None]
    col = tl.arange(0, COLS)[None, :]
    q = tl.load(at + col, held[:, None] & (col < NOPE + 64), other=0.0).to(tl.float32)
    tail = NOPE + tl.arange(0, 64)[None, :]
    rope = tl.load(at + tail, held[:, None], other=0.0).to(tl.float32)
    inverse = inverse_rms(q, NOPE + 64, eps, ROWS, COLS)[:, None]
    cos, sin = load_cos_sin(cos_ptr, sin_ptr, token, held, 32, False)
    nope = tl.where(col < NOPE, q * inverse, 0.0)
    return stored(nope, tl.bfloat16), stored(rotated(rope * inverse, cos, sin, ROWS, 32), tl.bfloat16)


@triton.jit
def _norm_rope_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    token_stride,
    num_rows,
    heads,
    eps,
    NOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = row < num_rows
    nope, rope = _load(q_ptr, cos_ptr, sin_ptr, row, held, heads, token_stride, eps, NOPE, ROWS, COLS)
    at = y_ptr + row.to(tl.int64)[:, None] * (NOPE + 64)
    col = tl.arange(0, COLS)[None, :]
    tl.store(at + col, nope.to(tl.bfloat16), held[:, None] & (col < NOPE))
    tl.store(at + NOPE + tl.arange(0, 64)[None, :], rope.to(tl.bfloat16), held[:, None])


@triton.jit
def _norm_rope_quantise_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    record_ptr,
    scale_ptr,
    residual_ptr,
    token_stride,
    num_rows,
    heads,
    eps,
    NOPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = row < num_rows
    nope, rope = _load(q_ptr, cos_ptr, sin_ptr, row, held, heads, token_stride, eps, NOPE, ROWS, COLS)
    scale = fmt.power_of_two_scale(fmt.floored(fmt.abs_max(nope, 1), fmt.AMAX_FLOOR), 448.0)
    # a power of two from 2^-119 to 2^22: a product with it is the quotient
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)[:, None]
    scaled = nope * inverse
    byte = fmt.e4m3(scaled).to(tl.uint8, bitcast=True)
    at = record_ptr + row.to(tl.int64)[:, None] * (NOPE + 128)
    col = tl.arange(0, COLS)[None, :]
    own = held[:, None] & (col < NOPE)
    tl.store(at + col, byte, own)
    rope_at = (at + NOPE).to(tl.pointer_type(tl.uint16)) + tl.arange(0, 64)[None, :]
    tl.store(rope_at, fmt.bf16_bits(rope * inverse), held[:, None])
    tl.store(scale_ptr + row, scale, held)
    if RESIDUAL:
        # the code's value by integer work: old ptxas miscompile a conversion down and up again (fmt.e4m3_value)
        rest = fmt.e4m3(scaled - fmt.e4m3_value(byte.to(tl.int32))).to(tl.uint8, bitcast=True)
        tl.store(residual_ptr + row.to(tl.int64)[:, None] * NOPE + col, rest, own)


def norm_rope(q: Tensor, cos: Tensor, sin: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Give q as BF16 attention reads it (B0, B1a); see :func:`kernels.q_norm_rope_quantise.ref.norm_rope`.

    Parameters
    ----------
    q : (T, H, K) BF16 or FP32
        Tokens may be strided, their heads are dense. K is nope (a multiple of 64) + 64.
    cos, sin : (T, 32) FP32, contiguous
    eps : float
        Positive.
    out : (T, H, K) BF16, contiguous, optional

    Returns
    -------
    (T, H, K) BF16

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    T, H, K = _check("q_norm_rope", q, cos, sin)
    check("q_norm_rope", dense=["out"], device=q.device, out=(out, f"{T} {H} {K}", BF16))
    y = torch.empty(T, H, K, dtype=BF16, device=q.device) if out is None else out
    if T * H:
        rows, warps = _rows(T * H)
        _norm_rope_kernel[(triton.cdiv(T * H, rows),)](
            q,
            cos,
            sin,
            y,
            q.stride(0),
            T * H,
            H,
            eps,
            NOPE=K - ROPE,
            ROWS=rows,
            COLS=triton.next_power_of_2(K),
            num_warps=warps,
            **fmt.EXACT,
            **overlap(q.device),
        )
    return y


def norm_rope_quantise(
    q: Tensor, cos: Tensor, sin: Tensor, *, eps: float, residual: bool = False, out: QuantisedQ | None = None
) -> QuantisedQ:
    """Give q as FP8 attention reads it (B1); see :func:`kernels.q_norm_rope_quantise.ref.norm_rope_quantise`.

    Parameters
    ----------
    q, cos, sin, eps
        As in :func:`norm_rope`.
    residual : bool
        Make the second term.
    out : QuantisedQ, contiguous, optional
        Has a residual or not, whatever ``residual`` says.

    Returns
    -------
    QuantisedQ of (T, H, K)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    op = "q_norm_rope_quantise"
    T, H, K = _check(op, q, cos, sin)
    if out is None:
        shapes = ((T, H, K + ROPE), U8), ((T, H), F32)
        record, scale = (torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in shapes)
        rest = torch.empty(T, H, K - ROPE, dtype=U8, device=q.device) if residual else None
        out = QuantisedQ(record, scale, rest)
    check(
        op,
        dense=["record", "scale", "residual"],
        device=q.device,
        record=(out.record, f"{T} {H} {K + ROPE}", U8),
        scale=(out.scale, f"{T} {H}", F32),
        residual=(out.residual, f"{T} {H} {K - ROPE}", U8),
    )
    if T * H:
        rows, warps = _rows(T * H)
        _norm_rope_quantise_kernel[(triton.cdiv(T * H, rows),)](
            q,
            cos,
            sin,
            out.record,
            out.scale,
            out.record if out.residual is None else out.residual,
            q.stride(0),
            T * H,
            H,
            eps,
            NOPE=K - ROPE,
            RESIDUAL=out.residual is not None,
            ROWS=rows,
            COLS=triton.next_power_of_2(K),
            num_warps=warps,
            **fmt.EXACT,
            **overlap(q.device),
        )
    return out


def _check(op: str, q: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
    sizes = check(
        op, dense=["cos", "sin"], q=(q, "T H K", FLOATS), cos=(cos, "T 32", F32), sin=(sin, "T 32", F32)
    )
    K = sizes["K"]
    if K < GROUP + ROPE or K % GROUP or (q.numel() and q.stride(1) != K):
        shape, strides = tuple(q.shape), q.stride()
        raise ValueError(
            f"{op}: q of shape {shape} and strides {strides}: heads not dense, or K no multiple of 64"
        )
    return sizes["T"], sizes["H"], K


def _rows(num_rows: int) -> tuple[int, int]:
    """Heads and warps of a program: a head a warp, four a program once that fills the SMs, two a warp for many.

    Measured on an H200 (2026-11-30, us of one term, (1, 1) (4, 4) (4, 2)): 128 heads 1.2, 1.4, 1.5; 4096 heads 5.3,
    3.2, 3.5; 8192 heads 10.2, 4.9, 4.7; 16384 heads 20.6, 10.1, 9.5: programs are launched one after another.
    """
    if num_rows < 1024:
        return 1, 1
    return (4, 4) if num_rows < 8192 else (4, 2)


def builds(sizes: Sizes) -> list[Build]:
    """Forms of q for BF16 and for FP8 attention with one term and two, as decode launches them."""
    pointers = {"q_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    tail = {**dict.fromkeys(("token_stride", "num_rows", "heads"), "i32"), "eps": "fp32"}
    rows, warps = _rows(1024)
    constants = {
        "NOPE": sizes.head_dim - ROPE,
        "ROWS": rows,
        "COLS": triton.next_power_of_2(sizes.head_dim),
        "PDL": True,
    }
    options = {"num_warps": warps, **fmt.EXACT, **OVERLAPPED}
    found = [
        Build(
            name=f"q_norm_rope_quantise/bf16/{sizes.name}",
            kernel=_norm_rope_kernel,
            signature={**pointers, "y_ptr": "*bf16", **tail},
            constants=constants,
            aligned=(*pointers, "y_ptr", "token_stride", "heads"),
            options=options,
        )
    ]
    written = {"record_ptr": "*u8", "scale_ptr": "*fp32", "residual_ptr": "*u8"}
    for name, residual in (("one_term", False), ("two_terms", True)):
        found.append(
            Build(
                name=f"q_norm_rope_quantise/{name}/{sizes.name}",
                kernel=_norm_rope_quantise_kernel,
                signature={**pointers, **written, **tail},
                constants={**constants, "RESIDUAL": residual},
                aligned=(*pointers, *written, "token_stride", "heads"),
                options=options,
            )
        )
    return found
