"""The down product of one or few tokens on Hopper, Gluon: SwiGLU and its quantiser are made again in every program.

Between gate and up and down stands a launch whose six programs at one token do next to nothing, but everything waits
for it: 37.2 us for the three, 29.5 us without it (H200, CUDA graphs, Flash's experts). Here a program of the down
product makes its slot's row itself, 2048 values in 128 threads, while its weights are on their way. The bits are those
of :func:`kernels.swiglu_quantise_nvfp4.kernel.swiglu_quantise`: the same bodies.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT, nvfp4_gsa
from kernels.formats.nvfp4_kernel import by_divisions, by_steps, finite, in_top_bits, packed, steps
from kernels.linear.hopper_kernel import addressable, fits, here, plan
from kernels.linear.hopper_product_kernel import multiplied, stage_layout, stage_words, start
from kernels.overlap import OVERLAPPED
from kernels.rmsnorm.kernel import stored
from kernels.rmsnorm.row_kernel import group_max, row_top, widened
from kernels.swiglu.kernel import swiglu_of

WARPS = 4
REGISTERS = (
    96  # H200, 2026-12-01, the op with one token: 31.5 us, with 80 32.0, with 64 33.4, with 104 and more 44
)
# Steps in flight before the row is there; more hold registers that the launch before needs. H200, 2026-12-01, the op
# with one token: 31.8 us with one step, 41.7 with two, 40.1 with four; 36.0 us with SwiGLU in a launch of its own.
MOST_AHEAD = 1
MOST_SLOTS = (
    8  # with four tokens 99.5 us, but 95.3 with SwiGLU's own launch: a program's second turn waits for a row
)


@gluon.jit
def _halves_of_row(both_ptr, row, K: gl.constexpr, WARPS: gl.constexpr):
    """Gate and up of a slot, FP32 [K / 16, 2, 8] each: a group of sixteen a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 4], [32, 1, 1], [WARPS, 1, 1], [2, 1, 0])
    group = gl.arange(0, K // 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = group[:, None, None] * 8 + half[None, :, None] * 4 + pair[None, None, :]
    gate = gl.load(both_ptr + row * K + at)
    up = gl.load(both_ptr + row * K + K // 2 + at)
    return widened(gate, K // 16), widened(up, K // 16)


@gluon.jit
def _quantised(x, GROUPS: gl.constexpr):
    """As :func:`kernels.formats.nvfp4_kernel.nvfp4_row`, of whose parts it is: Gluon wants layouts named."""
    groups: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout))
    amax = gl.convert_layout(group_max(x, GROUPS), groups)
    gsa = nvfp4_gsa(finite(row_top(amax)))
    if by_steps(gsa):
        byte, live, high, low = steps(amax, gsa)
        word = packed(in_top_bits(x, high[:, None, None], low[:, None, None]), GROUPS)
        word = gl.where(gl.convert_layout(live[:, None], word.type.layout), word, 0)
        scale = byte.to(gl.uint8)
    else:
        word, scale = by_divisions(x, finite(amax), gsa, GROUPS)
    return word, scale, gsa


@gluon.jit
def _staged_row(words, scales, K: gl.constexpr, WARPS: gl.constexpr):
    """Words uint32 [K / 16, 2] and E4M3 bytes [K / 16] as :func:`stage_words` leaves them."""
    layout: gl.constexpr = stage_layout(WARPS, 1, K // 8)
    flat = gl.convert_layout(words.to(gl.int32, bitcast=True).reshape([1, K // 8]), layout)
    byte = scales.to(gl.int32)
    byte = byte.expand_dims(1).broadcast_to([K // 16, 2]).reshape([1, K // 8])
    byte = gl.convert_layout(byte, layout)
    word = gl.arange(0, K // 8, gl.SliceLayout(0, layout))[None, :]
    place = gl.where(word % 4 == 0, byte, gl.where(word % 4 == 2, byte << 8, 0))
    pair = gl.sum(place.reshape([1, K // 32, 4]), 2)
    pair = pair.expand_dims(2).broadcast_to([1, K // 32, 4]).reshape([1, K // 8])
    return stage_words(flat, gl.convert_layout(pair, layout), K // 8, 1)


@gluon.jit
def _swiglu_down_kernel(
    both_ptr,
    w_ptr,
    w_scale_ptr,
    scale_2_ptr,
    expert_ptr,
    out_ptr,
    N,
    limit,
    K: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
):
    BN: gl.constexpr = 16 * WARPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    slot = gl.program_id(1)
    expert = gl.load(expert_ptr + slot).to(gl.int32)
    first = gl.program_id(0) * BN
    w_row = expert.to(gl.int64) * N + first
    w_at, scale_at = w_ptr + w_row * (K // 8), w_scale_ptr + w_row * (K // 64)
    at, loaded = start(w_at, scale_at, K, AHEAD, WARPS)
    gdc_wait()
    gdc_launch_dependents()
    gate, up = _halves_of_row(both_ptr, slot.to(gl.int64), K, WARPS)
    y = stored(swiglu_of(gate, up, limit), gl.bfloat16)
    words, scales, gsa = _quantised(y, K // 16)
    staged = _staged_row(words, scales, K, WARPS)
    acc = multiplied(at, loaded, staged, w_at, scale_at, K // 8, AHEAD, 8, 1, WARPS)
    acc = acc * gsa * gl.load(scale_2_ptr + expert)
    n = first + gl.arange(0, BN, gl.SliceLayout(1, mma))
    t = gl.arange(0, 8, gl.SliceLayout(0, mma))
    out_at = slot.to(gl.int64) * N + n[:, None] + t[None, :] * 0
    gl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=(t < 1)[None, :])


def takes(both: Tensor, codes: Tensor, scales: Tensor) -> bool:
    """Whether a product of slots with these weights (E, N, F/2), (E, N, F/16) is for this kernel."""
    n, f = codes.shape[1], 2 * codes.shape[2]
    whole = both.dtype is torch.bfloat16 and f & (f - 1) == 0 and f >= 512 * WARPS  # a group or more a thread
    return (
        whole
        and len(both) <= MOST_SLOTS
        and here(both.device)
        and fits(n, f, 1, WARPS)
        and addressable(scales)
    )


def launch(
    both: Tensor, ids: Tensor, weight: tuple[Tensor, Tensor, Tensor], out: Tensor, *, limit: float
) -> None:
    """``out[slot] = W[expert of slot] . swiglu(both[slot])``, the row quantised as NVFP4.

    Parameters
    ----------
    both : (S, 2 F) BF16, dense
    ids : (S,) int32 or int64
        Written before the launch before this one, as is the weight.
    weight : words int32 (E, N, F/8), scales uint8 (E, N, F/16), scale_2
    out : (S, N)
    limit : ``swiglu_limit``
    """
    words, scales, scale_2 = weight
    n, f = words.shape[1], 8 * words.shape[2]
    _swiglu_down_kernel[(n // (16 * WARPS), len(both))](
        both.view(torch.int32),
        words,
        scales.view(torch.int32),
        scale_2,
        ids,
        out,
        n,
        limit,
        K=f,
        AHEAD=plan(f, 1, MOST_AHEAD).ahead,
        WARPS=WARPS,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        **EXACT,
        **OVERLAPPED,
    )


def builds(sizes: Sizes) -> list[Build]:
    """The down product, where its size fits."""
    d, f = sizes.hidden_size, sizes.moe_intermediate_size
    if f & (f - 1) or f < 512 * WARPS or not fits(d, f, 1, WARPS):
        return []
    pointers = {"both_ptr": "*i32", "w_ptr": "*i32", "w_scale_ptr": "*i32", "scale_2_ptr": "*fp32"}
    pointers |= {"expert_ptr": "*i32", "out_ptr": "*fp32"}
    return [
        Build(
            name=f"grouped_ffn/nvfp4_hopper/swiglu_down/T=1/{sizes.name}",
            kernel=_swiglu_down_kernel,
            signature=pointers | {"N": "i32", "limit": "fp32"},
            constants={"K": f, "AHEAD": plan(f, 1, MOST_AHEAD).ahead, "WARPS": WARPS},
            aligned=(*pointers, "N"),
            options={"num_warps": WARPS, "maxnreg": REGISTERS, **EXACT, **OVERLAPPED},
            only=("sm_90a",),
        )
    ]
