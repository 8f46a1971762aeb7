"""RoPE, Triton; the contract is :func:`kernels.rope.ref.rope`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT
from kernels.rmsnorm.kernel import FLOATS


@triton.jit
def rotated(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate [ROWS, 2 * PAIRS] FP32 as neighbouring pairs by cos, sin [ROWS, PAIRS]: two products and a sum each."""
    even, odd = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, 2 * PAIRS))


@triton.jit
def load_cos_sin(cos_ptr, sin_ptr, token, held, PAIRS: tl.constexpr, INVERSE: tl.constexpr):
    """Rotation [ROWS, PAIRS] of the tokens ``token`` [ROWS]; backwards if INVERSE."""
    at = token.to(tl.int64)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    cos, sin = (
        tl.load(cos_ptr + at, held[:, None], other=0.0),
        tl.load(sin_ptr + at, held[:, None], other=0.0),
    )
    if INVERSE:
        sin = -sin
    return cos, sin


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    token_stride,
    head_stride,
    num_rows,
    heads,
    NOPE: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = row < num_rows
    token = row // heads
    x_at = x_ptr + (token.to(tl.int64) * token_stride + (row % heads).to(tl.int64) * head_stride)[:, None]
    y_at = y_ptr + row.to(tl.int64)[:, None] * (NOPE + 2 * PAIRS)
    if NOPE > 0:
        col = tl.arange(0, BLOCK)[None, :]
        mask = held[:, None] & (col < NOPE)
        tl.store(y_at + col, tl.load(x_at + col, mask).to(tl.float32).to(y_ptr.dtype.element_ty), mask)
    col = NOPE + tl.arange(0, 2 * PAIRS)[None, :]
    cos, sin = load_cos_sin(cos_ptr, sin_ptr, token, held, PAIRS, INVERSE)
    x = tl.load(x_at + col, held[:, None], other=0.0).to(tl.float32)
    y = rotated(x, cos, sin, ROWS, PAIRS)
    tl.store(y_at + col, y.to(y_ptr.dtype.element_ty), held[:, None])


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    inverse: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate the last P dims of each row; see :func:`kernels.rope.ref.rope`.

    Parameters
    ----------
    x : (T, H, D) or (T, D), BF16 or FP32
        Tokens and heads may be strided. P is a power of two and at most D.
    cos, sin : (T, P / 2) FP32, contiguous
    inverse : bool
        Rotate back.
    dtype : torch.dtype
        BF16 or FP32: how the result is stored, if ``out`` is not given.
    out : contiguous tensor of x's shape, optional

    Returns
    -------
    (T, H, D) or (T, D) of ``dtype``
        Within 2^-23 (|even| + |odd|) of the rotated value before it is stored.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    check_option("rope", FLOATS, dtype=dtype)
    axes = "T D" if x.ndim == 2 else "T H D"
    sizes = check(
        "rope",
        dense=["cos", "sin", "out"],
        x=(x, axes, FLOATS),
        cos=(cos, "T C", torch.float32),
        sin=(sin, "T C", torch.float32),
        out=(out, axes, FLOATS),
    )
    T, D, pairs, heads = sizes["T"], sizes["D"], sizes["C"], sizes.get("H", 1)
    check_pairs("rope", D, pairs)
    y = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    if y.numel():
        nope, rows = D - 2 * pairs, min(16, triton.next_power_of_2(T * heads))
        block = triton.next_power_of_2(max(nope, 1))
        _rope_kernel[(triton.cdiv(T * heads, rows),)](
            x,
            cos,
            sin,
            y,
            x.stride(0),
            x.stride(1) if x.ndim == 3 else 0,
            T * heads,
            heads,
            NOPE=nope,
            PAIRS=pairs,
            INVERSE=inverse,
            ROWS=rows,
            BLOCK=block,
            num_warps=8 if rows == 16 else 4,
            **EXACT,
        )
    return y


def check_pairs(op: str, D: int, pairs: int) -> None:
    """Refuse a rope part that is no power of two, or longer than the row."""
    if 2 * pairs > D or pairs < 1 or pairs & (pairs - 1):
        raise ValueError(
            f"{op}: {pairs} pairs of cos and sin do not fit rows of {D} values as a power of two"
        )


def builds(sizes: Sizes) -> list[Build]:
    """Attention's output turned back, and kv and q of the unfused path."""
    pointers = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "y_ptr": "*bf16"}
    integers = ("token_stride", "head_stride", "num_rows", "heads")
    return [
        Build(
            name=f"rope/{name}/{sizes.name}",
            kernel=_rope_kernel,
            signature={**pointers, **dict.fromkeys(integers, "i32")},
            constants={
                "NOPE": sizes.head_dim - sizes.qk_rope_head_dim,
                "PAIRS": sizes.qk_rope_head_dim // 2,
                "INVERSE": inverse,
                "ROWS": 16,
                "BLOCK": 512,
            },
            aligned=(*pointers, "token_stride", "head_stride"),
            options={"num_warps": 8, **EXACT},
        )
        for name, inverse in (("forward", False), ("inverse", True))
    ]
