"""Routed and shared experts on FP8 activations, in FP8 or MXFP4: see :func:`fp8_grouped_ffn`.

The launches are those of :mod:`kernels.grouped_ffn.kernel`: slots by expert (none for one token), gate and up, SwiGLU
with its quantiser, down, the weighted sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.fp8_block import GROUP
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.grouped_ffn.group_kernel import Blocks, combine, group, own_slots, store_slots
from kernels.linear.fp8_product_kernel import (
    BATCH,
    DECODE,
    Mxfp4Weight,
    StoredWeight,
    Tile,
    check_weight,
    fp8_product,
    operands,
)
from kernels.swiglu_quantise_nvfp4.kernel import swiglu_quantise


def tile_for(num_slots: int, num_experts: int) -> Tile:
    """Tile of both products; the smaller one while an expert has four slots on average."""
    return DECODE if num_slots <= 4 * num_experts else BATCH


@triton.jit(do_not_specialize=["steps"])
def _grouped_fp8_product(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    slots_ptr,
    expert_ptr,
    first_ptr,
    count_ptr,
    out_ptr,
    N,
    x_stride,
    x_scale_stride,
    w_stride,
    steps,
    SLOTS_PER_ROW: tl.constexpr,
    SORTED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    FOUR_BIT: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    slot, held = own_slots(slots_ptr, first_ptr, count_ptr, block, SORTED, BT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = fp8_product(
        x_ptr,
        x_scale_ptr,
        (slot // SLOTS_PER_ROW).to(tl.int64),
        x_stride,
        x_scale_stride,
        w_ptr,
        w_scale_ptr,
        expert,
        n,
        N,
        w_stride,
        0,
        0,
        steps,
        BN,
        BT,
        STAGES,
        FOUR_BIT,
    )
    store_slots(out_ptr, acc, slot, held, n, N)


def _product(
    x: Fp8Rows, weight: StoredWeight, blocks: Blocks, tile: Tile, out: Tensor, *, per_row: int
) -> None:
    """``out[slot] = W[expert of slot] . x[slot // per_row]`` for all slots."""
    n = out.shape[1]
    _grouped_fp8_product[(triton.cdiv(n, tile.bn), len(blocks.expert))](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        *blocks,
        out,
        n,
        x.codes.stride(0),
        x.scales.stride(0),
        weight.codes.shape[2],
        x.codes.shape[1] // GROUP,
        SLOTS_PER_ROW=per_row,
        SORTED=blocks.slots is not blocks.expert,
        **tile.constants(isinstance(weight, Mxfp4Weight)),
        num_warps=tile.warps,
    )


def fp8_grouped_ffn(
    x: Fp8Rows,
    ids: Tensor,
    weights: Tensor,
    gate_up: StoredWeight,
    down: StoredWeight,
    *,
    limit: float,
    stored: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """``sum_k w[t, k] * expert[ids[t, k]](x[t])``, added in FP32 by ascending expert, stored once.

    Parameters
    ----------
    x : Fp8Rows, (T, D), (T, D/128)
    ids : (T, k) int32 or int64, ascending, each below E
    weights : (T, k) FP32
    gate_up : Fp8Weight or Mxfp4Weight, (E, 2F, D): gate then up
    down : Fp8Weight or Mxfp4Weight, (E, D, F)
        128 divides D and F.
    limit : float
        ``swiglu_limit``.
    stored : bfloat16 or float32
        Store of gate and up, and of SwiGLU's result before its quantiser.
    dtype : bfloat16 or float32
        Of the result.
    out : (T, D), optional
        Dense, of ``dtype``.

    Returns
    -------
    (T, D) bfloat16 or float32

    Raises
    ------
    TypeError, ValueError
        Another stored format, shape or stride.
    """
    op = "fp8_grouped_ffn"
    check_option(op, FLOATS, stored=stored, dtype=dtype)
    E, wide, D = check_weight(op, "gate_up", gate_up)
    F = wide // 2
    if check_weight(op, "down", down) != (E, D, F) or wide % 2 or D % GROUP or F % GROUP:
        raise ValueError(
            f"{op}: down is of shape {tuple(down.codes.shape)} and gate_up of {tuple(gate_up.codes.shape)};"
            f" expected (E, D, F) and (E, 2 F, D), D and F multiples of {GROUP}"
        )
    if down.codes.device != gate_up.codes.device:
        raise ValueError(
            f"{op}: tensors on different devices: gate_up on {gate_up.codes.device}, down on {down.codes.device}"
        )
    T, k = check(
        op,
        dense=("ids", "weights", "out"),
        device=gate_up.codes.device,
        ids=(ids, "T k", (torch.int32, torch.int64)),
        weights=(weights, "T k", torch.float32),
        codes=(x.codes, f"T {D}", torch.float8_e4m3fn),
        scales=(x.scales, f"T {D // GROUP}", (torch.float32, torch.uint8)),
        out=(out, f"T {D}", dtype),
    ).values()
    device = x.codes.device
    out = torch.empty(T, D, dtype=dtype, device=device) if out is None else out
    if T == 0:
        return out
    tile = tile_for(T * k, E)
    flat = ids.view(-1)
    blocks = Blocks(flat, flat, flat, flat) if T == 1 else group(ids, E, tile.bt)
    both = torch.empty(T * k, wide, dtype=stored, device=device)
    _product(x, gate_up, blocks, tile, both, per_row=k)
    hidden = swiglu_quantise(both, limit=limit, form="fp8", between=stored)
    y = torch.empty(T * k, D, dtype=torch.float32, device=device)
    _product(hidden, down, blocks, tile, y, per_row=1)
    return combine(y, weights, out)


def builds(sizes: Sizes) -> list[Build]:
    """Both products at 64 tokens, and the first in a batch, in both stored formats."""
    k = sizes.num_experts_per_tok
    launches = [(f"gate_up/T={T}", T, k, "*bf16") for T in (64, 4096)] + [("down/T=64", 64, 1, "*fp32")]
    found = []
    for name, T, per_row, store in launches:
        tile = tile_for(T * k, sizes.n_routed_experts)
        for four_bit in (False, True):
            pointers = operands(four_bit)
            work = dict.fromkeys(("slots_ptr", "expert_ptr", "first_ptr", "count_ptr"), "*i32")
            found.append(
                Build(
                    name=f"grouped_ffn/{'mxfp4' if four_bit else 'fp8'}/{name}/{sizes.name}",
                    kernel=_grouped_fp8_product,
                    signature={**pointers, **work, "out_ptr": store}
                    | dict.fromkeys(("N", "x_stride", "x_scale_stride", "w_stride", "steps"), "i32"),
                    constants={"SLOTS_PER_ROW": per_row, "SORTED": True} | tile.constants(four_bit),
                    aligned=(*pointers, "slots_ptr", "expert_ptr", "out_ptr", "N", "x_stride", "w_stride"),
                    options={"num_warps": tile.warps},
                    native=() if four_bit else ("fp8",),
                )
            )
    return found
