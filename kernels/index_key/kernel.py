"""RMSNorm, RoPE, Hadamard, quantisation and paged write of index keys in one launch.

The contract is kernels/index_key/ref.py; the norm's bits are :mod:`kernels.rmsnorm.kernel`'s (FP32, a tree of
neighbours), the rest follows the ref bit for bit.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.index_query.kernel import HEAD_DIM, ROPE_PAIRS, hadamard, rotated
from kernels.rmsnorm.kernel import load_weight, normalised

Form = Literal["fp8", "fp4"]
ENTRY_BYTES = {"fp8": HEAD_DIM + 4, "fp4": HEAD_DIM // 2 + HEAD_DIM // 32}
ROWS = 4  # keys a program
WARPS = 4


@triton.jit
def _key_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    page_ptr,
    scale_ptr,
    E,
    x_stride,
    page_stride,
    eps,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < E
    slot = tl.load(slot_ptr + row, live, other=-1).to(tl.int64)  # slot // PAGE * page_stride outgrows int32
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    start, inside = slot // PAGE * page_stride, slot % PAGE
    dims = tl.arange(0, D)
    weight = load_weight(weight_ptr, dims, D, True)
    x = tl.load(x_ptr + row[:, None] * x_stride + dims[None, :], live[:, None], other=0.0)
    x = normalised(x, weight, D, eps, ROWS, D)
    x = rotated(x, cos_ptr, sin_ptr, tl.minimum(row, E - 1)[:, None], D, PAIRS, ROWS)
    if FP4:
        codes, scales = fmt.mxfp4_block(hadamard(x, ROWS, D), ROWS, D)
        half, group = tl.arange(0, D // 2), tl.arange(0, D // 32)
        at = start + inside * (D // 2)
        tl.store(page_ptr + at[:, None] + half[None, :], codes, there[:, None])
        at = start + PAGE * (D // 2) + inside * (D // 32)
        tl.store(scale_ptr + at[:, None] + group[None, :], scales, there[:, None])
    else:
        codes, scale = fmt.fp8_scaled(x)
        tl.store(page_ptr + (start + inside * D)[:, None] + dims[None, :], codes, there[:, None])
        tl.store(scale_ptr + start // 4 + PAGE * D // 4 + inside, scale, there)


def store_index_keys(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    eps: float,
    page_size: int,
    form: Form = "fp8",
) -> None:
    """Write index keys into a paged cache; see the functions of :mod:`kernels.index_key.ref`.

    Parameters
    ----------
    x : (E, 128) FP32
        The compressor's pooling; rows may be strided.
    weight : (128,) BF16 or FP32
    cos, sin : (E, 32) FP32
    slots : (E,) int64
        ``page * page_size + offset`` of each key; -1 writes nothing. No slot twice.
    pages : (num_pages, page_bytes) uint8
        Written in place: ``page_size`` x 128 (FP4: 64) bytes of codes, then ``page_size`` x 4 of scales. The row
        stride is a multiple of 4.
    eps : float
    page_size : int
    form : "fp8" or "fp4"

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above; an unknown form.
    """
    check_option("store_index_keys", ENTRY_BYTES, form=form)
    sizes = check(
        "store_index_keys",
        dense=("weight", "cos", "sin", "slots"),
        aligned={"pages": 4},
        x=(x, f"E {HEAD_DIM}", torch.float32),
        weight=(weight, f"{HEAD_DIM}", (torch.bfloat16, torch.float32)),
        cos=(cos, f"E {ROPE_PAIRS}", torch.float32),
        sin=(sin, f"E {ROPE_PAIRS}", torch.float32),
        slots=(slots, "E", torch.int64),
        pages=(pages, "num_pages page_bytes", torch.uint8),
    )
    need = page_size * ENTRY_BYTES[form]
    if page_size < 1 or pages.shape[1] < need:
        raise ValueError(
            f"store_index_keys: pages of shape {tuple(pages.shape)}; expected rows of {need} bytes or more,"
            f" page_size = {page_size} entries"
        )
    if sizes["E"] == 0:
        return
    fp4 = form == "fp4"
    _key_kernel[(triton.cdiv(sizes["E"], ROWS),)](
        x,
        weight,
        cos,
        sin,
        slots,
        pages if fp4 else pages.view(torch.float8_e4m3fn),
        pages if fp4 else pages.view(torch.float32),
        sizes["E"],
        x.stride(0),
        pages.stride(0),
        eps,
        D=HEAD_DIM,
        PAIRS=ROPE_PAIRS,
        PAGE=page_size,
        FP4=fp4,
        ROWS=ROWS,
        num_warps=WARPS,
        **fmt.EXACT,
    )


def builds(sizes: Sizes) -> list[Build]:
    """One build a form."""
    signature = {
        "x_ptr": "*fp32",
        "weight_ptr": "*bf16",
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
        "slot_ptr": "*i64",
        "page_ptr": "*fp8e4nv",
        "scale_ptr": "*fp32",
        "E": "i32",
        "x_stride": "i32",
        "page_stride": "i32",
        "eps": "fp32",
    }
    return [
        Build(
            name=f"index_key/{form}/{sizes.name}",
            kernel=_key_kernel,
            signature=signature | ({"page_ptr": "*u8", "scale_ptr": "*u8"} if form == "fp4" else {}),
            constants={
                "D": sizes.index_head_dim,
                "PAIRS": sizes.qk_rope_head_dim // 2,
                "PAGE": 64,
                "FP4": form == "fp4",
                "ROWS": ROWS,
            },
            aligned=tuple(name for name in signature if name not in ("E", "eps")),
            options={"num_warps": WARPS} | fmt.EXACT,
        )
        for form in ENTRY_BYTES
    ]
