"""The grouped NVFP4 product on Hopper, Gluon: see :mod:`kernels.linear.hopper_product_kernel`.

One block of programs meets up to 8 slots of one expert with 128 rows of its weight (64 where there is one token), all
columns in one pass: each weight is read and unpacked once for those slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.build_spec import Build, Sizes
from kernels.linear.hopper_kernel import fits, plan
from kernels.linear.hopper_product_kernel import load_step, offsets, product, stage_layout, stage_rows

MOST_SLOTS = 8  # of a block
# Measured on an H200 (CUDA graphs, Flash's experts, 2026-11-30). Blocks of programs of 4, 8, 16 warps: 211, 208, 219 us
# with 8 tokens, 855, 840, 876 us with 64; with one token 39.2 (also with 2), 48.4 us with 4, 8. One step, two, four in
# flight: 882, 840, 931 us with 64 tokens; two take 80 registers, so that three blocks fit a multiprocessor.
WARPS, WARPS_ALONE = 8, 4
MOST_AHEAD = 2
# Up to so many blocks of slots a launch may begin while the one before it ends: in an earlier form 43.2 us, not 45.5,
# with one token, but 217 us, not 209, with eight.
MOST_OVERLAPPED = 8


@gluon.jit
def _grouped_hopper_kernel(
    x_ptr,
    x_scale_ptr,
    gsa_ptr,
    w_ptr,
    w_scale_ptr,
    scale_2_ptr,
    slots_ptr,
    expert_ptr,
    first_ptr,
    count_ptr,
    out_ptr,
    N,
    x_stride,
    x_scale_stride,
    SLOTS_PER_ROW: gl.constexpr,
    SORTED: gl.constexpr,
    EARLY: gl.constexpr,
    K: gl.constexpr,
    AHEAD: gl.constexpr,
    ROWS: gl.constexpr,
    PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    BN: gl.constexpr = 16 * WARPS
    BT: gl.constexpr = 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    rows: gl.constexpr = gl.SliceLayout(1, stage_layout(WARPS, ROWS, PADDED))
    block = gl.program_id(1)
    if not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = gl.load(expert_ptr + block).to(gl.int32)
    if expert >= 0:
        first = gl.program_id(0) * BN
        w_row = expert.to(gl.int64) * N + first
        w_at = w_ptr + w_row * (K // 8)
        scale_at = w_scale_ptr + w_row * (K // 64)
        at = offsets(K, WARPS)
        loaded = ()
        for step in gl.static_range(AHEAD):
            loaded = loaded + (load_step(w_at, scale_at, at, step),)  # noqa: RUF005
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        place = gl.arange(0, ROWS, rows)
        t = gl.arange(0, BT, gl.SliceLayout(0, mma))
        if SORTED:
            count = gl.load(count_ptr + block)
            slots = slots_ptr + gl.load(first_ptr + block)
            held, kept = place < count, t < count
            row = gl.load(slots + place, mask=held, other=0) // SLOTS_PER_ROW
            slot = gl.load(slots + t, mask=kept, other=0)
        else:  # one token: block b is slot b, and expert_ptr holds the ids themselves
            held, kept = place < 1, t < 1
            row = place * 0 + block // SLOTS_PER_ROW
            slot = t * 0 + block
        staged = stage_rows(
            x_ptr, x_scale_ptr, row, held, x_stride, x_scale_stride, 0, K // 8, PADDED, ROWS, WARPS
        )
        gl.thread_barrier()
        acc = product(loaded, staged, w_at, scale_at, at, K // 256, AHEAD, BT, ROWS, WARPS)
        n = first + gl.arange(0, BN, gl.SliceLayout(1, mma))
        gsa = gl.load(gsa_ptr + slot // SLOTS_PER_ROW)
        acc = acc * gsa[None, :] * gl.load(scale_2_ptr + expert)
        out_at = slot[None, :].to(gl.int64) * N + n[:, None]
        gl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=kept[None, :])


class Work(NamedTuple):
    """What a launch multiplies: slots, expert, first, count of its blocks; slots a row of x; whether one token is all.

    ``early``: the blocks were written before the launch before this one, so that the weight may be read at once (a
    launch here lets the next one begin only after its own wait).
    """

    blocks: tuple[Tensor, Tensor, Tensor, Tensor]
    per_row: int
    alone: bool
    early: bool


def launch(
    x: tuple[Tensor, Tensor, Tensor], weight: tuple[Tensor, Tensor, Tensor], work: Work, out: Tensor
) -> None:
    """``out[slot] = W[expert of slot] . x[slot // per_row]``, both scales undone.

    Parameters
    ----------
    x : words int32 (R, ...), scales uint8 (R, ...), gsa (R,)
    weight : words int32 (E, N, K/8), scales uint8 (E, N, K/16), scale_2 (E,)
    work : Work
    out : (S, N)
    """
    (words, scales, gsa), (w_words, w_scales, scale_2) = x, weight
    n, k = w_words.shape[1], 8 * w_words.shape[2]
    warps, most = (WARPS_ALONE, 1) if work.alone else (WARPS, MOST_SLOTS)
    _, rows, padded, ahead = plan(k, most, MOST_AHEAD)
    pairs = scales.view(torch.int16)
    _grouped_hopper_kernel[(n // (16 * warps), len(work.blocks[1]))](
        words,
        pairs,
        gsa,
        w_words,
        w_scales.view(torch.int32),
        scale_2,
        *work.blocks,
        out,
        n,
        words.stride(0),
        pairs.stride(0),
        SLOTS_PER_ROW=work.per_row,
        SORTED=not work.alone,
        EARLY=work.early,
        K=k,
        AHEAD=ahead,
        ROWS=rows,
        PADDED=padded,
        WARPS=warps,
        num_warps=warps,
        launch_pdl=len(work.blocks[1]) <= MOST_OVERLAPPED,
    )


def builds(sizes: Sizes) -> list[Build]:
    """Both products of one token and of blocks, where they fit."""
    d, f, k = sizes.hidden_size, sizes.moe_intermediate_size, sizes.num_experts_per_tok
    found = []
    for name, n, columns, per_row, store in (("gate_up", 2 * f, d, k, "*bf16"), ("down", d, f, 1, "*fp32")):
        if fits(n, columns, MOST_SLOTS):
            for T in (1, 64):
                found.append(
                    _build(f"{name}/T={T}/{sizes.name}", columns, per_row, alone=T == 1, store=store)
                )
    return found


def _build(name: str, k: int, per_row: int, *, alone: bool, store: str) -> Build:
    warps, most = (WARPS_ALONE, 1) if alone else (WARPS, MOST_SLOTS)
    _, rows, padded, ahead = plan(k, most, MOST_AHEAD)
    pointers = {"x_ptr": "*i32", "x_scale_ptr": "*i16", "gsa_ptr": "*fp32", "w_ptr": "*i32"}
    pointers |= {"w_scale_ptr": "*i32", "scale_2_ptr": "*fp32", "slots_ptr": "*i32", "expert_ptr": "*i32"}
    pointers |= {"first_ptr": "*i32", "count_ptr": "*i32", "out_ptr": store}
    constants = {"SLOTS_PER_ROW": per_row, "SORTED": not alone, "EARLY": per_row == 1, "K": k}
    return Build(
        name=f"grouped_ffn/nvfp4_hopper/{name}",
        kernel=_grouped_hopper_kernel,
        signature=pointers | dict.fromkeys(("N", "x_stride", "x_scale_stride"), "i32"),
        constants=constants | {"AHEAD": ahead, "ROWS": rows, "PADDED": padded, "WARPS": warps},
        aligned=(*pointers, "N", "x_stride", "x_scale_stride"),
        options={"num_warps": warps, "launch_pdl": alone},
        only=("sm_90a",),
    )
