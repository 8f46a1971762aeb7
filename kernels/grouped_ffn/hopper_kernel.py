"""The grouped NVFP4 product on Hopper, Gluon: see :mod:`kernels.linear.hopper_product_kernel`.

One block of programs meets up to 8 slots of one expert with 128 rows of its weight (64 where there is one token), all
columns in one pass: each weight is read and unpacked once for those slots.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.build_spec import Build, Sizes
from kernels.linear.hopper_kernel import Plan, arguments, fits, plan
from kernels.linear.hopper_product_kernel import rest, stage_layout, start
from kernels.linear.nvfp4_kernel import operands

MOST_SLOTS = 8  # of a block
# Measured on an H200 (CUDA graphs, Flash's experts, 2026-11-30). Blocks of programs of 4, 8, 16 warps: 211, 208, 219 us
# with 8 tokens, 855, 840, 876 us with 64; with one token 39.2 (also with 2), 48.4 us with 4, 8. One step, two, four in
# flight: 882, 840, 931 us with 64 tokens; two take 80 registers, so that three blocks fit a multiprocessor.
WARPS, WARPS_ALONE = 8, 4
MOST_AHEAD = 2
# Up to so many tokens each slot is a block of its own, and a launch may begin while the one before it ends. H200,
# 2026-12-01: 55, 96, 177, 327 us with 2, 4, 8, 16 tokens, by expert 75, 125, 213, 362; with 32 769, 584. A block
# of one row unpacks one row, not eight, and needs 8 KB of shared memory, not 64.
MOST_ALONE = 16


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
    BT: gl.constexpr,
    ROWS: gl.constexpr,
    PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    BN: gl.constexpr = 16 * WARPS
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
        at, loaded = start(w_at, scale_at, K, AHEAD, WARPS)
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
        acc = rest(
            at,
            loaded,
            w_at,
            scale_at,
            x_ptr,
            x_scale_ptr,
            row,
            held,
            x_stride,
            x_scale_stride,
            0,
            K // 8,
            AHEAD,
            BT,
            ROWS,
            PADDED,
            WARPS,
        )
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
    tensors = arguments(x, weight)
    words, pairs, _, w_words, _, _ = tensors
    n, k = w_words.shape[1], 8 * w_words.shape[2]
    warps, planned = _plan(k, alone=work.alone)
    _grouped_hopper_kernel[(n // (16 * warps), len(work.blocks[1]))](
        *tensors,
        *work.blocks,
        out,
        n,
        words.stride(0),
        pairs.stride(0),
        SLOTS_PER_ROW=work.per_row,
        SORTED=not work.alone,
        EARLY=work.early,
        K=k,
        **planned.constants(warps),
        num_warps=warps,
        launch_pdl=work.alone,
    )


def _plan(k: int, *, alone: bool) -> tuple[int, Plan]:
    """Warps, and what follows from them and K."""
    warps, most = (WARPS_ALONE, 1) if alone else (WARPS, MOST_SLOTS)
    return warps, plan(k, most, MOST_AHEAD)


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
    warps, planned = _plan(k, alone=alone)
    pointers = operands("*i32", "*i16", "*i32", store)
    pointers |= dict.fromkeys(("slots_ptr", "expert_ptr", "first_ptr", "count_ptr"), "*i32")
    constants = {
        "SLOTS_PER_ROW": per_row,
        "SORTED": not alone,
        "EARLY": per_row == 1,
        "K": k,
    }
    return Build(
        name=f"grouped_ffn/nvfp4_hopper/{name}",
        kernel=_grouped_hopper_kernel,
        signature=pointers | dict.fromkeys(("N", "x_stride", "x_scale_stride"), "i32"),
        constants=constants | planned.constants(warps),
        aligned=(*pointers, "N", "x_stride", "x_scale_stride"),
        options={"num_warps": warps, "launch_pdl": alone},
        only=("sm_90a",),
    )
