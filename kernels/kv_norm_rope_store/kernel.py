"""RMSNorm, RoPE, FP8 quantiser and cache write of kv in one launch, Triton: B3; see the ref beside this.

The bytes are those of the kernels rmsnorm, rope and kv_store in turn, with ``between`` as the dtype between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT
from kernels.kv_store.kernel import (
    PAGE_POINTERS,
    Place,
    aligned,
    record_constants,
    rows_of,
    seven_scales,
    store_record,
)
from kernels.rmsnorm.kernel import FLOATS, inverse_rms, stored
from kernels.rmsnorm_quantise_nvfp4.kernel import TRITON
from kernels.rope.kernel import load_cos_sin, rotated

F32 = torch.float32


@triton.jit
def _kv_norm_rope_store_kernel(
    kv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    data_ptr,
    scale_ptr,
    kv_stride,
    num_rows,
    page_stride,
    scale_stride,
    eps,
    BETWEEN: tl.constexpr,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + row, row < num_rows, other=-1)
    held = slot >= 0
    at = kv_ptr + row.to(tl.int64)[:, None] * kv_stride
    col = tl.arange(0, COLS)
    mask = held[:, None] & (col < NOPE + 64)[None, :]
    kv = tl.load(at + col[None, :], mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, col < NOPE, other=0.0).to(
        tl.float32
    )  # zeros beyond nope: it is not stored
    tail = NOPE + tl.arange(0, 64)
    rope = tl.load(at + tail[None, :], held[:, None], other=0.0).to(tl.float32)
    inverse = inverse_rms(kv, NOPE + 64, eps, ROWS, COLS)[:, None]
    nope = stored(kv * weight[None, :] * inverse, BETWEEN)
    nope = tl.where((col < NOPE)[None, :], nope, 0.0)  # a NaN in rope stays there
    rope = stored(rope * tl.load(weight_ptr + tail).to(tl.float32)[None, :] * inverse, BETWEEN)
    cos, sin = load_cos_sin(cos_ptr, sin_ptr, row, held, 32, False)
    rope = stored(rotated(rope, cos, sin, ROWS, 32), BETWEEN)
    store_record(
        nope,
        rope,
        slot,
        held,
        data_ptr,
        scale_ptr,
        page_stride,
        scale_stride,
        PAGE,
        NOPE,
        ALIGNED,
        SCALE_BYTES,
        ROWS,
        COLS,
    )


def kv_norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    eps: float,
    between: torch.dtype = torch.float32,
) -> None:
    """Normalise, rotate and write rows as records of one scale per 64 nope, in place.

    Parameters
    ----------
    kv : (T, nope + 64) BF16 or FP32
        Rows may be strided.
    weight : (nope + 64,) BF16 or FP32
    cos, sin : (T, 32) FP32, contiguous
    pages : (P, page_bytes) uint8
        Pages may be strided by a multiple of 16 bytes.
    slots : (T,) int64, contiguous
        Negative: skipped. Not checked: that they are inside the pages, each once.
    eps : float
        Positive.
    between : torch.dtype
        What the norm and the turned row pass through: FP32 is none, BF16 is what three launches would.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    place = seven_scales("kv_norm_rope_store", kv, pages)
    _launch(kv, weight, cos, sin, slots, place, eps, between)


def kv_norm_rope_store_aligned(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    data: Tensor,
    token_scale: Tensor,
    slots: Tensor,
    *,
    eps: float,
    between: torch.dtype = torch.float32,
) -> None:
    """Normalise, rotate and write rows as aligned records, in place.

    Parameters
    ----------
    data : (P, p, nope + 128) uint8
        Pages may be strided by a multiple of 16 bytes.
    token_scale : (P, p) FP32
        Pages may be strided.
    kv, weight, cos, sin, slots, eps, between
        As in :func:`kv_norm_rope_store`.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    place = aligned("kv_norm_rope_store", kv, data, token_scale)
    _launch(kv, weight, cos, sin, slots, place, eps, between)


def _launch(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    place: Place,
    eps: float,
    between: torch.dtype,
) -> None:
    check_option("kv_norm_rope_store", TRITON, between=between)
    check(
        "kv_norm_rope_store",
        dense=["cos", "sin", "slots"],
        device=place.data.device,
        kv=(kv, "T Z", FLOATS),
        weight=(weight, "Z", FLOATS),
        cos=(cos, "T 32", F32),
        sin=(sin, "T 32", F32),
        slots=(slots, "T", torch.int64),
    )
    T = len(kv)
    if T == 0:
        return
    rows, warps = rows_of(T)
    _kv_norm_rope_store_kernel[(triton.cdiv(T, rows),)](
        kv,
        weight,
        cos,
        sin,
        slots,
        place.data,
        place.scale,
        kv.stride(0),
        T,
        place.page_stride,
        place.scale_stride,
        eps,
        BETWEEN=TRITON[between],
        **place.constants,
        ROWS=rows,
        COLS=triton.next_power_of_2(kv.shape[1]),
        num_warps=warps,
        **EXACT,
    )


def builds(sizes: Sizes) -> list[Build]:
    """B3's cache write into either record, as decode and prefill launch it."""
    pointers = dict.fromkeys(("kv_ptr", "weight_ptr"), "*bf16") | dict.fromkeys(
        ("cos_ptr", "sin_ptr"), "*fp32"
    )
    found = []
    for name, is_aligned in (("seven_scales", False), ("aligned", True)):
        for phase, T in (("decode", 1), ("prefill", 4096)):
            rows, warps = rows_of(T)
            places = PAGE_POINTERS if is_aligned else PAGE_POINTERS | {"scale_ptr": "*u8"}
            integers = ("kv_stride", "num_rows", "page_stride", "scale_stride")
            found.append(
                Build(
                    name=f"kv_norm_rope_store/{name}_{phase}/{sizes.name}",
                    kernel=_kv_norm_rope_store_kernel,
                    signature={
                        **pointers,
                        "slot_ptr": "*i64",
                        **places,
                        **dict.fromkeys(integers, "i32"),
                        "eps": "fp32",
                    },
                    constants={"BETWEEN": tl.float32, **record_constants(sizes, is_aligned, rows)},
                    aligned=(*pointers, "slot_ptr", *places, "kv_stride", "page_stride"),
                    options={"num_warps": warps, **EXACT},
                )
            )
    return found
