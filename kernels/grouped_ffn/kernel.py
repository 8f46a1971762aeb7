"""Routed and shared experts in NVFP4: see :func:`grouped_ffn` and :func:`dense_ffn`.

Five launches: slots by expert, gate and up, SwiGLU with its quantiser, down, the weighted sum. A block of slots of
one expert meets every tile of that expert's weights once; with one token each slot is a block and nothing is sorted.
SwiGLU is no epilogue of the first product: its quantiser needs the largest of a whole row, which 64 or more
programs hold, and the detour through memory is under 1% of the weight's bytes. On a Hopper blocks of up to 8 slots go
to :mod:`kernels.grouped_ffn.hopper_kernel` where the sizes fit; up to 8 tokens nothing is sorted there (two slots of
one expert read its weights at about the same time, the second from the L2 cache), and one token's SwiGLU is made in
the down product (:mod:`kernels.grouped_ffn.hopper_down_kernel`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, Wanted, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.grouped_ffn import fp8_kernel, group_kernel, hopper_down_kernel, hopper_kernel
from kernels.grouped_ffn.group_kernel import Blocks, combine, group, own_slots, store_slots
from kernels.linear.hopper_kernel import addressable, fits, here
from kernels.linear.kernel import Nvfp4Weight, nvfp4_linear, stacked_linear
from kernels.linear.nvfp4_kernel import codes_for, nvfp4_product, way
from kernels.linear.tiles import BATCH, DECODE, NATIVE_BATCH, NATIVE_DECODE, Tile, product_build
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.swiglu_quantise_nvfp4.kernel import swiglu_quantise


def tile_for(num_slots: int, num_experts: int, native: bool) -> Tile:
    """Tile of both products; the smaller one while an expert has two slots on average.

    A row's last bits differ between the two: other tensor-core instructions.
    """
    if num_slots <= 2 * num_experts:
        return NATIVE_DECODE if native else DECODE
    return NATIVE_BATCH if native else BATCH


@triton.jit(do_not_specialize=["steps"])
def _grouped_product(
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
    w_stride,
    w_scale_stride,
    steps,
    SLOTS_PER_ROW: tl.constexpr,
    SORTED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    WAY: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block).to(tl.int32)
    if expert < 0:
        return
    slot, held = own_slots(slots_ptr, first_ptr, count_ptr, block, SORTED, BT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w_row = expert.to(tl.int64) * N + tl.where(n < N, n, 0)
    x_row = (slot // SLOTS_PER_ROW).to(tl.int64)
    acc = nvfp4_product(
        w_ptr,
        w_scale_ptr,
        w_row,
        w_stride,
        w_scale_stride,
        x_ptr,
        x_scale_ptr,
        x_row,
        x_stride,
        x_scale_stride,
        0,
        0,
        steps,
        BN,
        BT,
        BK,
        STAGES,
        WHOLE,
        WAY,
    )
    acc = acc * tl.load(gsa_ptr + x_row)[None, :] * tl.load(scale_2_ptr + expert)
    store_slots(out_ptr, acc, slot, held, n, N)


def _product(
    x: Nvfp4Rows, weight: Nvfp4Weight, blocks: Blocks, tile: Tile, how: str, out: Tensor, *, per_row: int
) -> None:
    """``out[slot] = W[expert of slot] . x[slot // per_row]`` for all slots, both scales undone."""
    n, half = weight.codes.shape[1:]
    words, weight_words = codes_for(x.codes, "codes", how), codes_for(weight.codes, "weight", how)
    alone = blocks.slots is blocks.expert
    if _for_hopper(x, weight, tile):
        work = hopper_kernel.Work(tuple(blocks), per_row, alone, early=per_row == 1)
        hopper_kernel.launch(
            (words, x.scales, x.gsa), (weight_words, weight.scales, weight.scale_2), work, out
        )
        return
    _grouped_product[(triton.cdiv(n, tile.bn), len(blocks.expert))](
        words,
        x.scales,
        x.gsa,
        weight_words,
        weight.scales,
        weight.scale_2,
        *blocks,
        out,
        n,
        words.stride(0),
        x.scales.stride(0),
        weight_words.shape[2],
        weight.scales.shape[2],
        tile.steps(2 * half),
        SLOTS_PER_ROW=per_row,
        SORTED=not alone,
        **tile.constants(how, 2 * half),
        num_warps=tile.warps,
    )


def _for_hopper(x: Nvfp4Rows, weight: Nvfp4Weight, tile: Tile) -> bool:
    """Blocks of up to 8 slots and sizes that the Gluon kernel takes, on a Hopper."""
    n, half = weight.codes.shape[1:]
    return (
        tile.bt == hopper_kernel.MOST_SLOTS
        and here(x.codes.device)
        and fits(n, 2 * half, hopper_kernel.MOST_SLOTS)
        and addressable(x.scales, weight.scales)
    )


def _wanted(name: str, weight: Nvfp4Weight, rows: str, columns: str) -> dict[str, Wanted]:
    """What a stack of E matrices is to be; ``columns``: bytes of a row of codes, 8 a scale."""
    return {
        name: (weight.codes, f"E {rows} {columns}", torch.uint8),
        f"{name}_scales": (weight.scales, f"E {rows} {columns}/8", torch.uint8),
        f"{name}_scale_2": (weight.scale_2, "E", torch.float32),
    }


def grouped_ffn(
    x: Nvfp4Rows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Nvfp4Weight,
    down: Nvfp4Weight,
    *,
    limit: float,
    stored: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """``sum_k w[t, k] * expert[ids[t, k]](x[t])``, added in FP32 by ascending expert, stored once.

    Parameters
    ----------
    x : Nvfp4Rows, (T, D/2), (T, D/16), (T,)
    ids : (T, k) int32 or int64, ascending, each below E
    weights : (T, k) FP32
    gate_up : Nvfp4Weight, (E, 2F, D/2), (E, 2F, D/16), (E,): gate then up
    down : Nvfp4Weight, (E, D, F/2), (E, D, F/16), (E,)
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
    check_option("grouped_ffn", FLOATS, stored=stored, dtype=dtype)
    stacks = _wanted("gate_up", gate_up, "4*H", "C") | _wanted("down", down, "2*C", "H")
    sizes = check(  # C: D / 2, H: F / 2, bytes of a row of codes
        "grouped_ffn",
        dense=("ids", "weights", "gsa", "out", *stacks),
        codes=(x.codes, "T C", torch.uint8),
        scales=(x.scales, "T C/8", torch.uint8),
        gsa=(x.gsa, "T", torch.float32),
        ids=(ids, "T k", (torch.int32, torch.int64)),
        weights=(weights, "T k", torch.float32),
        out=(out, "T 2*C", dtype),
        **stacks,
    )
    T, k, E, D, F = sizes["T"], sizes["k"], sizes["E"], 2 * sizes["C"], 2 * sizes["H"]
    device = x.codes.device
    out = torch.empty(T, D, dtype=dtype, device=device) if out is None else out
    if T == 0:
        return out
    how = way(device)
    tile = tile_for(T * k, E, how == "native")
    flat = ids.view(-1)
    alone = T == 1 or (T <= hopper_kernel.MOST_ALONE and _for_hopper(x, gate_up, tile))
    blocks = Blocks(flat, flat, flat, flat) if alone else group(ids, E, tile.bt)
    both = torch.empty(T * k, 2 * F, dtype=stored, device=device)
    _product(x, gate_up, blocks, tile, how, both, per_row=k)
    y = torch.empty(T * k, D, dtype=torch.float32, device=device)
    if alone and hopper_down_kernel.takes(both, down.codes, down.scales):
        words = codes_for(down.codes, "down", how)
        hopper_down_kernel.launch(both, flat, (words, down.scales, down.scale_2), y, limit=limit)
    else:
        hidden = swiglu_quantise(both, limit=limit, between=stored)
        _product(hidden, down, blocks, tile, how, y, per_row=1)
    return combine(y, weights, out)


def dense_ffn(
    x: Nvfp4Rows,
    gate_up: Nvfp4Weight,
    down: Nvfp4Weight,
    *,
    limit: float,
    stored: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """The shared expert: gate and up in one launch, SwiGLU with its quantiser, down.

    Parameters
    ----------
    x : Nvfp4Rows, (T, D/2), (T, D/16), (T,)
    gate_up : Nvfp4Weight, (2, F, D/2), (2, F, D/16), (1,) or (2,): gate, up
    down : Nvfp4Weight, (D, F/2), (D, F/16), (1,)
    limit : float
    stored, dtype, out : as :func:`grouped_ffn`

    Returns
    -------
    (T, D) bfloat16 or float32
    """
    both = stacked_linear(x, gate_up, dtype=stored)
    hidden = swiglu_quantise(both, limit=limit, between=stored)
    return nvfp4_linear(hidden, down, dtype=dtype, out=out)


def builds(sizes: Sizes) -> list[Build]:
    """Both products at one token, at 64 and in a batch; grouping and the weighted sum."""
    d, f, k = sizes.hidden_size, sizes.moe_intermediate_size, sizes.num_experts_per_tok
    found = hopper_kernel.builds(sizes) + hopper_down_kernel.builds(sizes)
    for how in ("ptx", "native"):
        for T in (1, 64, 4096):
            found.append(_product_build(f"gate_up/T={T}", sizes, how, T, d, k, "*bf16"))
        found.append(_product_build("down/T=64", sizes, how, 64, f, 1, "*fp32"))
    return found + fp8_kernel.builds(sizes) + group_kernel.builds(sizes, DECODE.bt)


def _product_build(name: str, sizes: Sizes, how: str, T: int, k: int, per_row: int, store: str) -> Build:
    return product_build(
        f"grouped_ffn/nvfp4_{how}/{name}/{sizes.name}",
        _grouped_product,
        tile_for(T * sizes.num_experts_per_tok, sizes.n_routed_experts, how == "native"),
        how,
        k,
        store=store,
        constants={"SLOTS_PER_ROW": per_row, "SORTED": T > 1},
        blocks=("slots_ptr", "expert_ptr", "first_ptr", "count_ptr"),
    )
