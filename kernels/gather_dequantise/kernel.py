"""Gather and dequantise, Triton. The contract is kernels/gather_dequantise/ref.py with ``store`` = BF16.

A program copies a few keys, 64 values a group and 16 bytes a load: 584 bytes are read and 1024 written for each.
Every value of a record is a BF16 number, so the buffer holds it exactly.
"""

from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT
from kernels.formats.kv_record import ROPE, RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.gather_dequantise.nvfp4_kernel import gather_nvfp4_kernel
from kernels.gather_dequantise.row_kernel import copy_rope, own_slots
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.sparse_attn.keys_kernel import check_keys, data_offset, widened_nope

# of a program, and its warps. H200, 2026-12-01, 64 and 128 rows of 640 keys that no launch before read: 8 keys and 2
# warps 21.8 and 42.0 us, 1 warp 21.8, 42.1, 4 warps 23.6, 45.9; 16 keys and 4 warps 22.2, 42.6; 4 and 2 23.3, 45.0
KEYS, WARPS = 8, 2
NVFP4_WARPS = 4
LAYOUTS = {"fp8": RecordLayout, "nvfp4": Nvfp4Layout}


@triton.jit
def _gather_kernel(
    pages_ptr,
    rope_ptr,
    idx_ptr,
    table_ptr,
    sequence_ptr,
    out_ptr,
    page_stride,
    table_stride,
    num_keys,
    NOPE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    FITS: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row, key, slot = own_slots(idx_ptr, table_ptr, sequence_ptr, num_keys, table_stride, PAGE, KEYS)
    width: tl.constexpr = NOPE + 64
    at = out_ptr + (row * num_keys + key) * width
    here = key < num_keys
    # rope apart: joined with the codes, 16 to a thread, its 8 values a thread would go through shared memory
    group = tl.arange(0, NOPE // 64 + 1)[None, :, None]
    column = tl.arange(0, 64)[None, None, :]
    values = widened_nope(pages_ptr, slot, page_stride, PAGE, NOPE, True, not FITS)
    nope_at = at[:, None, None] + group * 64 + column
    # the attention that follows reads the buffer: what of it is still in L2 need not come from memory. So it leaves
    # the caches last, and where all of it fits, the codes first. H200, 2026-12-01, B0 whole with 64 and 128 rows of
    # 640 keys, 128 of 1152: 50.1, 86.1, 179.3 us; codes first too 49.0, 86.9, 180.8; neither 50.6, 87.1, 180.0
    stored = here[:, None, None] & (group < NOPE // 64)
    tl.store(nope_at, values, mask=stored, eviction_policy="evict_last")
    start = data_offset(slot, page_stride, PAGE, NOPE + 128)
    copy_rope(rope_ptr + (start + NOPE) // 2, at, slot, here, NOPE)


def gather_dequantise(
    pages: Tensor,
    idx: Tensor,
    *,
    nope: int,
    kv_format: Literal["fp8", "nvfp4"] = "fp8",
    page_table: Tensor | None = None,
    sequence: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gather the records of an index list into a BF16 buffer: NVFP4's values rounded to nearest, FP8's as they are.

    Parameters
    ----------
    pages : (P, page_bytes) uint8
        Of :mod:`kernels.formats.kv_record` or, NVFP4, :mod:`kernels.formats.nvfp4_record`; rows may be strided by a
        multiple of 16 bytes.
    idx : (T, S) int32
        Slots (page * page_size + offset), or with a page table rows of the sequence; -1: no key.
    nope : int
        Nope values of a record: 192 or 448.
    kv_format : "fp8" or "nvfp4"
        Which record the pages hold.
    page_table : (B, M) int32 or None
    sequence : (T,) int32 or None
        Which sequence each row belongs to; with ``page_table`` only.
    out : (T, S, nope + 64) BF16 or None
        Written.

    Returns
    -------
    (T, S, nope + 64) BF16
        Zeros where idx is -1.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit, and the message has its name, shape, dtype and strides; or another record.
    """
    op = "gather_dequantise"
    check_option(op, LAYOUTS, kv_format=kv_format)
    page = check_keys(op, nope + ROPE, pages, idx, page_table, sequence, layout=LAYOUTS[kv_format])
    out = _buffer(idx, nope, out)
    if not idx.numel():
        return out
    rows, num_keys = idx.shape
    kernel, views = _gather_kernel, ()
    options: dict[str, Any] = {"num_warps": WARPS}
    if kv_format == "fp8":
        options |= {"FITS": out.nbytes <= _cache_bytes(out.device)}
    else:
        views = (pages.view(torch.int32), pages.view(torch.float32))
        kernel, options = gather_nvfp4_kernel, {"num_warps": NVFP4_WARPS, **EXACT}
    kernel[(rows, triton.cdiv(num_keys, KEYS))](
        pages,
        *views,
        pages.view(torch.bfloat16),
        idx,
        page_table,
        sequence,
        out,
        pages.stride(0),
        0 if page_table is None else page_table.stride(0),
        num_keys,
        NOPE=nope,
        PAGE=page,
        KEYS=KEYS,
        **options,
        **overlap(idx.device),
    )
    return out


@cache
def _cache_bytes(device: torch.device) -> int:
    """Bytes of a device's L2 cache; 0 off a GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _buffer(idx: Tensor, nope: int, out: Tensor | None) -> Tensor:
    """``out``, checked, or memory for the keys of an index list."""
    rows, num_keys = idx.shape
    if out is None:
        out = torch.empty(rows, num_keys, nope + ROPE, dtype=torch.bfloat16, device=idx.device)
    check(
        "gather_dequantise",
        dense=("out",),
        device=idx.device,
        out=(out, f"{rows} {num_keys} {nope + ROPE}", torch.bfloat16),
    )
    return out


def builds(sizes: Sizes) -> list[Build]:
    """The gathers at a real model's record and pages of 64."""
    pointers = {"pages_ptr": "*u8", "rope_ptr": "*bf16", "idx_ptr": "*i32", "out_ptr": "*bf16"}
    nvfp4_pointers = {"word_ptr": "*i32", "gsa_ptr": "*fp32", **pointers}
    integers = {"page_stride": "i32", "table_stride": "i32", "num_keys": "i32"}
    nope = sizes.head_dim - sizes.qk_rope_head_dim
    return [
        Build(
            name=f"gather_dequantise/{name}/{sizes.name}",
            kernel=kernel,
            signature={**from_pointers, **integers},
            constants={"table_ptr": None, "sequence_ptr": None, "NOPE": nope}
            | {"PAGE": 64, "KEYS": KEYS, "PDL": True, **more},
            aligned=(*from_pointers, "page_stride", "num_keys"),
            options={**options, **OVERLAPPED},
        )
        for name, kernel, from_pointers, more, options in (
            ("584", _gather_kernel, pointers, {"FITS": False}, {"num_warps": WARPS}),
            ("584_in_cache", _gather_kernel, pointers, {"FITS": True}, {"num_warps": WARPS}),
            ("nvfp4", gather_nvfp4_kernel, nvfp4_pointers, {}, {"num_warps": NVFP4_WARPS, **EXACT}),
        )
    ]
