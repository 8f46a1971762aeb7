"""What any experts' products share: slots sorted by expert, :func:`group`, and their weighted sum, :func:`combine`.

Fixed grids, no sync, the same order every time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.build_spec import Build, Sizes
from kernels.overlap import OVERLAPPED, follow, overlap

CHUNK = 1024  # ids read at once
# Columns and warps of a program of the weighted sum, of few tokens and of more. H200, 2026-12-01, one token, the whole
# op: 31.1 us, with 512 and 4 31.5.
FEW, FEW_COMBINED, COMBINED = 16, (128, 2), (512, 4)


class Blocks(NamedTuple):
    """Work of a grouped product: block b holds up to BT slots of one expert.

    Attributes
    ----------
    slots : (S,) int32
        Slot numbers ``token * k + place``, by expert, then ascending.
    expert : (M,) int32
        Of each block, ascending; -1 for the blocks that are not needed.
    first, count : (M,) int32
        Where its slots start in ``slots``, and how many they are.
    """

    slots: Tensor
    expert: Tensor
    first: Tensor
    count: Tensor


@triton.jit
def own_slots(slots_ptr, first_ptr, count_ptr, block, SORTED: tl.constexpr, BT: tl.constexpr):
    """Slots [BT] of a block, 0 where it has fewer, and which of them it has."""
    place = tl.arange(0, BT)
    if SORTED:
        held = place < tl.load(count_ptr + block)
        slot = tl.load(slots_ptr + tl.load(first_ptr + block) + place, mask=held, other=0)
    else:  # one token: block b is slot b, and its experts are the ids themselves
        held = place < 1
        slot = tl.where(held, block, 0)
    return slot, held


@triton.jit
def store_slots(out_ptr, acc, slot, held, n, N):
    """Store columns ``n`` of a block's products, FP32 [BN, BT], in the rows of its slots, each of N values."""
    at = slot[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & held[None, :])


def max_blocks(num_slots: int, num_experts: int, bt: int) -> int:
    """Most blocks that any choice of experts can need, to a multiple of 4."""
    active = min(num_slots, num_experts)
    return -(-(active + (num_slots - active) // bt) // 4) * 4  # rows of int32 that all start at 16 bytes


@triton.jit(do_not_specialize=["num_slots", "MAX_BLOCKS"])
def _group(
    ids_ptr,
    slots_ptr,
    expert_ptr,
    first_ptr,
    count_ptr,
    num_slots,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BT: tl.constexpr,
    MAX_BLOCKS,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    bins = tl.arange(0, E_BLOCK)
    counts = tl.zeros((E_BLOCK,), tl.int32)
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=E).to(
            tl.int32
        )  # E: a bin past all experts
        counts += tl.histogram(ids, E_BLOCK)
    blocks = tl.where(bins < E, (counts + BT - 1) // BT, 0)
    total = tl.sum(blocks)
    before = tl.sum(tl.where(bins < expert, blocks, 0))
    first = tl.sum(tl.where(bins < expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    rank = first
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=E).to(tl.int32)
        mine = (ids == expert).to(tl.int32)
        tl.store(slots_ptr + rank + tl.cumsum(mine, 0) - 1, slot, mask=mine != 0)
        rank += tl.sum(mine)
    for start in range(0, count, CHUNK * BT):
        block = start // BT + tl.arange(0, CHUNK)
        held = block * BT < count
        tl.store(expert_ptr + before + block, tl.zeros((CHUNK,), tl.int32) + expert, mask=held)
        tl.store(first_ptr + before + block, first + block * BT, mask=held)
        tl.store(count_ptr + before + block, tl.minimum(count - block * BT, BT), mask=held)
    if expert == E - 1:
        for start in range(total, MAX_BLOCKS, CHUNK):
            block = start + tl.arange(0, CHUNK)
            tl.store(expert_ptr + block, tl.full((CHUNK,), -1, tl.int32), mask=block < MAX_BLOCKS)


def group(ids: Tensor, num_experts: int, bt: int) -> Blocks:
    """Sort slots by expert and cut every expert's slots into blocks of ``bt``.

    Each program reads all ids and writes one expert's part: no atomics, so no order to depend on.

    Parameters
    ----------
    ids : (T, k) int32 or int64, dense, each from 0 to ``num_experts`` - 1
    num_experts : int
    bt : int

    Returns
    -------
    Blocks of (T*k,) and three of (:func:`max_blocks`,)
    """
    size = ids.numel()
    most = max_blocks(size, num_experts, bt)
    slots = torch.empty(size, dtype=torch.int32, device=ids.device)
    expert, first, count = torch.empty(3, most, dtype=torch.int32, device=ids.device).unbind()
    _group[(num_experts,)](
        ids,
        slots,
        expert,
        first,
        count,
        size,
        E=num_experts,
        E_BLOCK=triton.next_power_of_2(num_experts + 1),
        BT=bt,
        MAX_BLOCKS=most,
        CHUNK=min(CHUNK, max(32, triton.next_power_of_2(size))),
    )
    return Blocks(slots, expert, first, count)


@triton.jit
def _combine(y_ptr, weight_ptr, out_ptr, D, SLOTS: tl.constexpr, PDL: tl.constexpr, COLS: tl.constexpr):
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for place in tl.static_range(SLOTS):  # ids ascend, so this is by ascending expert
        y = tl.load(y_ptr + (token * SLOTS + place) * D + col, mask=col < D, other=0.0)
        total += y * tl.load(weight_ptr + token * SLOTS + place)
    tl.store(out_ptr + token * D + col, total.to(out_ptr.dtype.element_ty), mask=col < D)


def combine(y: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Weighted sum of each token's slots, FP32 by ascending expert, stored once.

    Parameters
    ----------
    y : (T * k, D) FP32
    weights : (T, k) FP32
    out : (T, D), written

    Returns
    -------
    ``out``
    """
    (T, k), D = weights.shape, y.shape[1]
    cols, warps = FEW_COMBINED if T <= FEW else COMBINED
    _combine[(T, triton.cdiv(D, cols))](
        y, weights, out, D, SLOTS=k, COLS=cols, num_warps=warps, **overlap(out.device)
    )
    return out


def builds(sizes: Sizes, bt: int) -> list[Build]:
    """Grouping into blocks of ``bt``, and the weighted sum."""
    experts = sizes.n_routed_experts
    ids = dict.fromkeys(("ids_ptr", "slots_ptr", "expert_ptr", "first_ptr", "count_ptr"), "*i32")
    values = {"y_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": "*bf16"}
    return [
        Build(
            name=f"grouped_ffn/group/{sizes.name}",
            kernel=_group,
            signature=ids | {"num_slots": "i32", "MAX_BLOCKS": "i32"},
            constants={"E": experts, "E_BLOCK": triton.next_power_of_2(experts + 1), "BT": bt, "CHUNK": 512},
            aligned=("ids_ptr", "slots_ptr"),
        ),
        *(
            Build(
                name=f"grouped_ffn/combine/{name}/{sizes.name}",
                kernel=_combine,
                signature=values | {"D": "i32"},
                constants={"SLOTS": sizes.num_experts_per_tok, "PDL": True, "COLS": cols},
                aligned=(*values, "D"),
                options={"num_warps": warps, **OVERLAPPED},
            )
            for name, (cols, warps) in (("few", FEW_COMBINED), ("many", COMBINED))
        ),
    ]
