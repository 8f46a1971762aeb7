"""Cache write of kv, Triton; the contracts are in :mod:`kernels.kv_store.ref`, bit for bit."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.formats.kv_record import GROUP, ROPE, RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.kv_store.nvfp4_kernel import kv_store_nvfp4_kernel
from kernels.rmsnorm.kernel import FLOATS, row_constants

PAGE_POINTERS = {"data_ptr": "*u8", "scale_ptr": "*fp32"}


class Place(NamedTuple):
    """Where records go: what the kernels take, in their order, and their constants."""

    data: Tensor
    scale: Tensor
    page_stride: int
    scale_stride: int
    constants: dict[str, Any]


@triton.jit
def store_record(
    nope,
    rope,
    slot,
    held,
    data_ptr,
    scale_ptr,
    page_stride,
    scale_stride,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Encode and store ``nope`` [ROWS, COLS] FP32, zeros beyond NOPE, and ``rope`` [ROWS, 64] FP32."""
    code, scale = fmt.fp8_block(tl.reshape(nope, (ROWS, COLS // 64, 64)))
    group = tl.arange(0, COLS // 64)
    byte = code.to(tl.uint8, bitcast=True)
    page, offset = slot // PAGE, slot % PAGE  # int64: page * stride passes 2^31
    if ALIGNED:
        token_scale = fmt.abs_max(tl.where((group < NOPE // 64)[None, :], scale, 0.0), 1)
        whole = tl.broadcast_to(token_scale[:, None], scale.shape)
        shifted = fmt.e4m3_value(byte.to(tl.int32)) * tl.div_rn(scale, whole)[:, :, None]
        byte = fmt.e4m3(shifted).to(tl.uint8, bitcast=True)
        inverse = tl.div_rn(tl.full(token_scale.shape, 1.0, tl.float32), token_scale)
        rope = rope.to(tl.bfloat16).to(tl.float32) * inverse[:, None]
        tl.store(scale_ptr + page * scale_stride + offset, token_scale, held)
    else:
        scales_at = data_ptr + page * page_stride + PAGE * (NOPE + 128) + offset * SCALE_BYTES
        scale_byte = tl.where((group < NOPE // 64)[None, :], fmt.ue8m0_byte(scale), 0)
        own = held[:, None] & (group < SCALE_BYTES)[None, :]
        tl.store(scales_at[:, None] + group[None, :], scale_byte.to(tl.uint8), own)
        if COLS // 64 < SCALE_BYTES:
            rest = tl.arange(0, SCALE_BYTES)[None, :]
            zero = tl.zeros((ROWS, SCALE_BYTES), tl.uint8)
            tl.store(scales_at[:, None] + rest, zero, held[:, None] & (rest >= COLS // 64))
    at = data_ptr + (page * page_stride + offset * (NOPE + 128))[:, None]
    col = tl.arange(0, COLS)[None, :]
    tl.store(at + col, tl.reshape(byte, (ROWS, COLS)), held[:, None] & (col < NOPE))
    rope_at = (at + NOPE).to(tl.pointer_type(tl.uint16)) + tl.arange(0, 64)[None, :]
    tl.store(rope_at, fmt.bf16_bits(rope), held[:, None])


@triton.jit
def _kv_store_kernel(
    kv_ptr,
    slot_ptr,
    data_ptr,
    scale_ptr,
    kv_stride,
    num_rows,
    page_stride,
    scale_stride,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + row, row < num_rows, other=-1)
    at = kv_ptr + row.to(tl.int64)[:, None] * kv_stride
    col = tl.arange(0, COLS)[None, :]
    nope = tl.load(at + col, (slot >= 0)[:, None] & (col < NOPE), other=0.0).to(tl.float32)
    col = NOPE + tl.arange(0, 64)[None, :]
    rope = tl.load(at + col, (slot >= 0)[:, None], other=0.0).to(tl.float32)
    store_record(
        nope,
        rope,
        slot,
        slot >= 0,
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


def store(kv: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write rows as records of one scale per 64 nope; see :func:`kernels.kv_store.ref.store`.

    Parameters
    ----------
    kv : (T, nope + 64) BF16 or FP32
        Rows may be strided.
    pages : (P, page_bytes) uint8
        Pages may be strided by a multiple of 16 bytes.
    slots : (T,) int64, contiguous
        Negative: skipped. Not checked: that they are inside the pages, each once.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    _launch(kv, slots, seven_scales("kv_store", kv, pages))


def store_aligned(kv: Tensor, data: Tensor, token_scale: Tensor, slots: Tensor) -> None:
    """Write rows as aligned records; see :func:`kernels.kv_store.ref.store_aligned`.

    Parameters
    ----------
    kv : (T, nope + 64) BF16 or FP32
        Rows may be strided.
    data : (P, p, nope + 128) uint8
        Pages may be strided by a multiple of 16 bytes.
    token_scale : (P, p) FP32
        Pages may be strided.
    slots : (T,) int64, contiguous
        As in :func:`store`.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    _launch(kv, slots, aligned("kv_store", kv, data, token_scale))


def store_nvfp4(kv: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write rows as records of NVFP4; see :func:`kernels.kv_store.ref.store_nvfp4`.

    Parameters
    ----------
    kv : (T, nope + 64) BF16 or FP32
        Rows may be strided.
    pages : (P, page_bytes) uint8
        Of :mod:`kernels.formats.nvfp4_record`; they may be strided by a multiple of 16 bytes.
    slots : (T,) int64, contiguous
        As in :func:`store`.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    layout, page = _page_of("kv_store", kv, pages, Nvfp4Layout)
    _check_rows(kv, slots, pages.device)
    if len(kv) == 0:
        return
    constants, options = row_constants(layout.nope)
    kv_store_nvfp4_kernel[(len(kv),)](
        kv, slots, pages, kv.stride(0), pages.stride(0), PAGE=page, NOPE=layout.nope, **constants, **options
    )


def seven_scales(op: str, kv: Tensor, pages: Tensor) -> Place:
    """Pages of the record with a scale per 64 nope, for the rows of kv."""
    layout, page = _page_of(op, kv, pages, RecordLayout)
    constants = {"PAGE": page, "NOPE": layout.nope, "ALIGNED": False, "SCALE_BYTES": layout.scale_bytes}
    return Place(pages, pages, pages.stride(0), 0, constants)


def _page_of(op: str, kv: Tensor, pages: Tensor, layout_of: type[RecordLayout]) -> tuple[RecordLayout, int]:
    """Layout of the records of kv's rows, and tokens a page; pages that hold none are refused."""
    check(op, aligned={"pages": 16}, kv=(kv, "T K", FLOATS), pages=(pages, "P Z", torch.uint8))
    layout = layout_of(_nope(op, kv))
    page = pages.shape[1] // layout.token_bytes
    if page < 1 or layout.page_bytes(page) != pages.shape[1]:
        shape, strides = tuple(pages.shape), pages.stride()
        raise ValueError(
            f"{op}: pages is torch.uint8 of shape {shape} and strides {strides}: no page of {layout}"
        )
    return layout, page


def aligned(op: str, kv: Tensor, data: Tensor, token_scale: Tensor) -> Place:
    """Pages of the aligned record, for the rows of kv."""
    check(
        op,
        aligned={"data": 16},
        kv=(kv, f"T Z-{ROPE}", FLOATS),
        data=(data, "P S Z", torch.uint8),
        token_scale=(token_scale, "P S", torch.float32),
    )
    nope = _nope(op, kv)
    if data.numel() and data.stride(1) != data.shape[2]:
        raise ValueError(
            f"{op}: data of shape {tuple(data.shape)} and strides {data.stride()}: tokens not dense"
        )
    constants = {"PAGE": data.shape[1], "NOPE": nope, "ALIGNED": True, "SCALE_BYTES": 0}
    return Place(data, token_scale, data.stride(0), token_scale.stride(0), constants)


def _nope(op: str, kv: Tensor) -> int:
    """Values without RoPE of a row."""
    width = kv.shape[1]
    if width < GROUP + ROPE or width % GROUP:
        raise ValueError(f"{op}: rows of {width} values are not nope (a multiple of {GROUP}) and {ROPE} rope")
    return width - ROPE


def rows_of(num_rows: int) -> tuple[int, int]:
    """Rows and warps of a program: decode spreads its rows over the SMs, a warp or more a row."""
    return (1, 2) if num_rows <= 264 else (4, 4)


def _check_rows(kv: Tensor, slots: Tensor, device: torch.device) -> None:
    check("kv_store", dense=["slots"], device=device, kv=(kv, "T Z", FLOATS), slots=(slots, "T", torch.int64))


def _launch(kv: Tensor, slots: Tensor, place: Place) -> None:
    _check_rows(kv, slots, place.data.device)
    T = len(kv)
    if T == 0:
        return
    rows, warps = rows_of(T)
    _kv_store_kernel[(triton.cdiv(T, rows),)](
        kv,
        slots,
        place.data,
        place.scale,
        kv.stride(0),
        T,
        place.page_stride,
        place.scale_stride,
        **place.constants,
        ROWS=rows,
        COLS=triton.next_power_of_2(kv.shape[1]),
        num_warps=warps,
        **fmt.EXACT,
    )


def record_constants(sizes: Sizes, is_aligned: bool, rows: int, page: int = 64) -> dict[str, Any]:
    """Constants of a build that stores records."""
    layout = RecordLayout(sizes.head_dim - ROPE)
    scale_bytes = 0 if is_aligned else layout.scale_bytes
    return {
        "PAGE": page,
        "NOPE": layout.nope,
        "ALIGNED": is_aligned,
        "SCALE_BYTES": scale_bytes,
        "ROWS": rows,
        "COLS": triton.next_power_of_2(sizes.head_dim),
    }


def builds(sizes: Sizes) -> list[Build]:
    """The unfused path's cache write, and that of the compressed rows."""
    pointers = {"kv_ptr": "*bf16", "slot_ptr": "*i64", **PAGE_POINTERS}
    found = [
        Build(
            name=f"kv_store/{name}/{sizes.name}",
            kernel=_kv_store_kernel,
            signature={
                **(pointers if is_aligned else pointers | {"scale_ptr": "*u8"}),
                "kv_stride": "i32",
                "num_rows": "i32",
                "page_stride": "i32",
                "scale_stride": "i32",
            },
            constants=record_constants(sizes, is_aligned, 1),
            aligned=(*pointers, "kv_stride", "page_stride"),
            options={"num_warps": 2, **fmt.EXACT},
        )
        for name, is_aligned in (("seven_scales", False), ("aligned", True))
    ]
    return [*found, *_nvfp4_builds(sizes)]


def _nvfp4_builds(sizes: Sizes) -> list[Build]:
    """NVFP4 records of window rows, BF16, and of compressed rows, FP32."""
    nope = sizes.head_dim - ROPE
    constants, options = row_constants(nope)
    return [
        Build(
            name=f"kv_store/nvfp4_{name}/{sizes.name}",
            kernel=kv_store_nvfp4_kernel,
            signature={"kv_ptr": pointer, "slot_ptr": "*i64", "pages_ptr": "*u8"}
            | {"kv_stride": "i32", "page_stride": "i32"},
            constants={"PAGE": 64, "NOPE": nope, **constants},
            aligned=("kv_ptr", "slot_ptr", "pages_ptr", "kv_stride", "page_stride"),
            options=options,
        )
        for name, pointer in (("bf16", "*bf16"), ("fp32", "*fp32"))
    ]
