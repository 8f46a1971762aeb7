"""Slots behind page tables in one launch, Triton; the contract is kernels/page_slots/ref.py.

Torch's operators make some ten launches of a row's slot, and some thirty of a token's keys, in every layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.overlap import OVERLAPPED, follow, overlap

INTEGERS = (torch.int32, torch.int64)
BLOCK = 256
PAGE = 64  # of a build


@triton.jit
def paged_slot(table_ptr, row, PAGE: tl.constexpr):
    """Slots of rows of one sequence, int64; -1 where ``row`` is negative."""
    held = row >= 0
    page = tl.load(table_ptr + row // PAGE, mask=held, other=0).to(tl.int64)
    return tl.where(held, page * PAGE + row % PAGE, -1)


@triton.jit
def _row_slots_kernel(
    row_ptr,
    table_ptr,
    sequence_ptr,
    out_ptr,
    T,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + at, at < T, other=-1)
    table = table_ptr + tl.load(sequence_ptr + at, at < T, other=0).to(tl.int64) * table_stride
    tl.store(out_ptr + at, paged_slot(table, row, PAGE), at < T)


@triton.jit
def _key_slots_kernel(
    position_ptr,
    sequence_ptr,
    window_ptr,
    entry_ptr,
    chosen_ptr,
    out_ptr,
    window_stride,
    entry_stride,
    chosen_stride,
    width,
    window,
    ratio,
    ENTRIES: tl.constexpr,
    CHOSEN: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)  # token * width outgrows int32 on a long prompt
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(position_ptr + token)
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    row = tl.where(column < window, position - window + 1 + column, -1)
    slot = paged_slot(window_ptr + sequence * window_stride, row, PAGE)
    if ENTRIES:
        entry = (column - window).to(tl.int64)
        seen = (entry >= 0) & (column < width)
        if CHOSEN:
            entry = tl.load(chosen_ptr + token * chosen_stride + entry, seen, other=-1).to(tl.int64)
        else:
            entry = tl.where(seen & (entry < (position + 1) // ratio), entry, -1)
        slot = tl.maximum(slot, paged_slot(entry_ptr + sequence * entry_stride, entry, PAGE))
    tl.store(out_ptr + token * width + column, slot.to(tl.int32), column < width)


def row_slots(rows: Tensor, tables: Tensor, sequence: Tensor, page_size: int) -> Tensor:
    """Slots of one row of each of several sequences: (T,) int64; see :func:`kernels.page_slots.ref.row_slots`.

    Parameters
    ----------
    rows, sequence : (T,) int32 or int64, contiguous
        Not checked: that they are within the tables.
    tables : (B, M) int32 or int64

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    T = check(
        "row_slots",
        dense=("rows", "sequence"),
        rows=(rows, "T", INTEGERS),
        sequence=(sequence, "T", INTEGERS),
        tables=(tables, "B M", INTEGERS),
    )["T"]
    out = torch.empty(T, dtype=torch.int64, device=rows.device)
    if T:
        args = rows, tables, sequence, out, T, tables.stride(0)
        grid = (triton.cdiv(T, BLOCK),)
        _row_slots_kernel[grid](*args, PAGE=page_size, BLOCK=BLOCK, **overlap(rows.device))
    return out


def key_slots(
    positions: Tensor,
    sequence: Tensor,
    windows: Tensor,
    entries: Tensor | None = None,
    chosen: Tensor | None = None,
    *,
    window: int,
    page_size: int,
    ratio: int = 0,
    count: int = 0,
) -> Tensor:
    """Slots of the keys of tokens, (T, window + k or count) int32; see :func:`kernels.page_slots.ref.key_slots`.

    Parameters
    ----------
    positions, sequence : (T,) int32 or int64, contiguous
        Not checked: that what they name is within the tables.
    windows, entries : (B, M), (B, L) int32 or int64
    chosen : (T, k) int32 or int64

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit, or entries are neither chosen nor of a ratio.
    """
    sizes = check(
        "key_slots",
        dense=("positions", "sequence"),
        positions=(positions, "T", INTEGERS),
        sequence=(sequence, "T", INTEGERS),
        windows=(windows, "B M", INTEGERS),
        entries=(entries, "B L", INTEGERS),
        chosen=(chosen, "T k", INTEGERS),
    )
    if entries is not None and chosen is None and ratio < 1:
        raise ValueError(f"key_slots: ratio = {ratio} of entries that are not chosen; expected 1 or more")
    T = sizes["T"]
    more = 0 if entries is None else count if chosen is None else sizes["k"]
    width = window + more
    out = torch.empty(T, width, dtype=torch.int32, device=positions.device)
    if T and width:
        _key_slots_kernel[(T, triton.cdiv(width, BLOCK))](
            positions,
            sequence,
            windows,
            windows if entries is None else entries,
            sequence if chosen is None else chosen,
            out,
            windows.stride(0),
            0 if entries is None else entries.stride(0),
            0 if chosen is None else chosen.stride(0),
            width,
            window,
            max(ratio, 1),
            ENTRIES=more > 0,
            CHOSEN=chosen is not None,
            PAGE=page_size,
            BLOCK=BLOCK,
            **overlap(positions.device),
        )
    return out


def builds(sizes: Sizes) -> list[Build]:
    """Slots of written rows; keys of window-only, CSA and HCA layers."""
    constants = {"PAGE": PAGE, "BLOCK": BLOCK, "PDL": True}
    pointers = {"row_ptr": "*i64", "table_ptr": "*i32", "sequence_ptr": "*i32", "out_ptr": "*i64"}
    found = [
        Build(
            name=f"page_slots/rows/{sizes.name}",
            kernel=_row_slots_kernel,
            signature={**pointers, "T": "i32", "table_stride": "i32"},
            constants=constants,
            aligned=tuple(pointers),
            options=OVERLAPPED,
        )
    ]
    pointers = {"position_ptr": "*i64", "sequence_ptr": "*i32", "window_ptr": "*i32", "entry_ptr": "*i32"}
    pointers |= {"chosen_ptr": "*i32", "out_ptr": "*i32"}
    numbers = ("window_stride", "entry_stride", "chosen_stride", "width", "window", "ratio")
    for name, entries, chosen in (("window", False, False), ("csa", True, True), ("hca", True, False)):
        found.append(
            Build(
                name=f"page_slots/{name}/{sizes.name}",
                kernel=_key_slots_kernel,
                signature={**pointers, **dict.fromkeys(numbers, "i32")},
                constants={"ENTRIES": entries, "CHOSEN": chosen, **constants},
                aligned=tuple(pointers),
                options=OVERLAPPED,
            )
        )
    return found
