"""A call that each kernel's function takes, for tests: CPU tensors, too small to be worth a launch."""

from typing import Any

import torch
from torch import Tensor

from kernels.compress.kernel import compress
from kernels.compress.step_kernel import compress_step
from kernels.formats.kv_record import RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.fp8_quantise.kernel import quantise as quantise_fp8
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.gather_dequantise.kernel import gather_dequantise
from kernels.grouped_ffn.fp8_kernel import fp8_grouped_ffn
from kernels.grouped_ffn.kernel import dense_ffn, grouped_ffn
from kernels.hc import kernel as hc
from kernels.hc.ref import Mix
from kernels.index_key.kernel import store_index_keys
from kernels.index_logits.kernel import index_logits, paged_index_logits, paged_index_logits_fp4
from kernels.index_query.kernel import index_query
from kernels.index_topk.kernel import index_topk
from kernels.kv_norm_rope_store.kernel import kv_norm_rope_store, kv_norm_rope_store_aligned
from kernels.kv_store.kernel import store, store_aligned, store_nvfp4
from kernels.linear import wide_kernel as wide
from kernels.linear.fp8_kernel import fp8_grouped_linear, fp8_linear, fp8_stacked_linear
from kernels.linear.fp8_product_kernel import Fp8Weight, Mxfp4Weight
from kernels.linear.kernel import Nvfp4Weight, grouped_linear, nvfp4_linear, stacked_linear
from kernels.mhc_rmsnorm_quantise_nvfp4.kernel import mhc_rmsnorm_quantise
from kernels.nvfp4_quantise.kernel import quantise
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.page_slots.kernel import key_slots, row_slots
from kernels.q_norm_rope_quantise.kernel import norm_rope, norm_rope_quantise
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rmsnorm_quantise_nvfp4.kernel import rmsnorm_quantise
from kernels.rmsnorm_quantise_nvfp4.ref import NormedRows
from kernels.rope.kernel import rope
from kernels.route.kernel import route, route_by_table, router_scores
from kernels.sparse_attn.combine_kernel import combine
from kernels.sparse_attn.kernel import room, sparse_attn_fp8, sparse_attn_gathered, sparse_attn_widened
from kernels.sparse_attn.product import sparse_attn_product
from kernels.swiglu.kernel import swiglu
from kernels.swiglu_quantise_nvfp4.kernel import swiglu_quantise

BF16, F32, I32, I64, U8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8
E4M3 = torch.float8_e4m3fn
T, D, H = 3, 256, 5


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def rows(count: int, width: int) -> Nvfp4Rows:
    return Nvfp4Rows(of(U8, count, width // 2), of(U8, count, width // 16), of(F32, count))


def rows_fp8(count: int, width: int) -> Fp8Rows:
    return Fp8Rows(of(E4M3, count, width), of(F32, count, width // 128))


def weight(*shape: int, scales: int = 1) -> Nvfp4Weight:
    *stack, k = shape
    return Nvfp4Weight(of(U8, *stack, k // 2), of(U8, *stack, k // 16), of(F32, scales))


def attention() -> dict[str, Any]:
    into = room(T, H, 9, 256, torch.device("cpu"), splits=2)
    return {"idx": of(I32, T, 9), "sinks": of(F32, H), "scale": 1.0, "into": into}


def scored(form: str) -> dict[str, Any]:
    native = form == "fp4"
    return {
        "q": of(U8, 2, 1, 16, 64) if native else of(E4M3, 2, 1, 16, 128),
        "pages": of(U8, 4, 64 * (132 if form == "fp8" else 68)),
        "page_table": of(I32, 2, 3),
        "weights": of(F32, 2, 1, 16),
        "limits": of(I32, 2, 1),
        "page_size": 64,
        "out": of(F32, 2, 1, 192),
    } | ({"q_scales": of(U8, 2, 1, 16, 4)} if native else {})


TABLE = {"page_table": of(I32, 2, 3), "sequence": of(I32, T)}
PAGES = of(U8, 4, RecordLayout(192).page_bytes(64))
TURN = {"cos": of(F32, T, 32), "sin": of(F32, T, 32)}
PAGES_NVFP4 = of(U8, 4, Nvfp4Layout(192).page_bytes(64))
KV = {"kv": of(BF16, T, 256), "slots": of(I64, T)}
NORM = {"weight": of(BF16, 256), "eps": 1e-6, **TURN}
DATA = {"data": of(U8, 4, 64, 320), "token_scale": of(F32, 4, 64)}
Q = {"q": of(BF16, T, H, 256)}
Q_FP8 = {"q": of(U8, T, H, 320), "q_scale": of(F32, T, H), "residual": of(U8, T, H, 192)}
STREAMS = {"streams": of(BF16, T, 4, D)}
MIX = Mix(of(F32, T, 4), of(F32, T, 4), of(F32, T, 4, 4))
NORMED = NormedRows(rows(T, D), of(BF16, T, D))
FP8_STACK = Fp8Weight(of(E4M3, 2, 64, D), of(F32, 2, 1, 2))
NORMED_FP8 = NormedRows(rows_fp8(T, D), of(BF16, T, D))
CHOSEN = {"ids": of(I32, T, 2), "weights": of(F32, T, 2)}
FFN = {"x": rows(T, D), "gate_up": weight(4, 128, D, scales=4), "down": weight(4, D, 64, scales=4)}
SHARED = {"gate_up": weight(2, 64, D, scales=2), "down": weight(D, 64)}
X = {"x": of(BF16, T, D), "weight": of(BF16, D)}
# name -> function and a call that it takes; together they have every argument
CALLS = {
    "compress": (
        compress,
        {"kv": of(F32, 12, 64), "gate": of(F32, 12, 64), "position_bias": of(F32, 4, 64), "ratio": 4}
        | {"overlap": True, "out": of(F32, 2, 32)},
    ),
    "compress_step": (
        compress_step,
        {"kv": of(F32, T, 64), "gate": of(F32, T, 64), "ring_kv": of(F32, T, 8, 64)}
        | {"ring_gate": of(F32, T, 8, 64), "position_bias": of(F32, 4, 64), "positions": of(I64, T)}
        | {"ratio": 4, "overlap_windows": True},
    ),
    "gather_dequantise": (
        gather_dequantise,
        {"pages": PAGES, "idx": of(I32, T, 9), "nope": 192, "out": of(BF16, T, 9, 256), **TABLE},
    ),
    "gather_dequantise_nvfp4": (
        gather_dequantise,
        {"pages": PAGES_NVFP4, "idx": of(I32, T, 9), "nope": 192, "out": of(BF16, T, 9, 256), **TABLE}
        | {"kv_format": "nvfp4"},
    ),
    "grouped_ffn": (grouped_ffn, {**FFN, **CHOSEN, "limit": 7.0, "out": of(BF16, T, D)}),
    "fp8_grouped_ffn": (
        fp8_grouped_ffn,
        {"x": rows_fp8(T, D), **CHOSEN, "limit": 7.0, "out": of(BF16, T, D)}
        | {"gate_up": Fp8Weight(of(E4M3, 4, 256, D), of(F32, 4, 2, 2))}
        | {"down": Mxfp4Weight(of(U8, 4, D, 64), of(U8, 4, D, 4))},
    ),
    "dense_ffn": (dense_ffn, {"x": rows(T, D), **SHARED, "limit": 7.0, "out": of(BF16, T, D)}),
    "mix": (
        hc.mix,
        {**STREAMS, "fn": of(F32, 24, 4 * D), "base": of(F32, 24), "scale": of(F32, 3), "norm_eps": 1e-6}
        | {"hc_eps": 1e-6, "iterations": 2, "out": MIX, "part": hc.partial_sums(T, D, "cpu")},
    ),
    "head_collapse": (
        hc.head_collapse,
        {**STREAMS, "fn": of(F32, 4, 4 * D), "base": of(F32, 4), "scale": of(F32, 1)}
        | {"norm_eps": 1e-6, "hc_eps": 1e-6},
    ),
    "collapse": (hc.collapse, {**STREAMS, "pre": of(F32, T, 4), "out": of(BF16, T, D)}),
    "expand": (
        hc.expand,
        {**STREAMS, "y": of(BF16, T, D), "post": of(F32, T, 4), "comb": of(F32, T, 4, 4)}
        | {"out": of(BF16, T, 4, D)},
    ),
    "store_index_keys": (
        store_index_keys,
        {"x": of(F32, T, 128), "weight": of(BF16, 128), **TURN, "slots": of(I64, T)}
        | {"pages": of(U8, 4, 64 * 132), "eps": 1e-6, "page_size": 64},
    ),
    "index_logits": (
        index_logits,
        {"q": of(E4M3, T, 8, 128), "k": of(E4M3, 9, 128), "key_scale": of(F32, 9)}
        | {"weights": of(F32, T, 8), "limits": of(I32, T), "out": of(F32, T, 9)},
    ),
    "paged_index_logits": (paged_index_logits, scored("fp8")),
    "paged_index_logits_fp4": (paged_index_logits_fp4, scored("fp4")),
    "paged_index_logits_fp4 folded": (paged_index_logits_fp4, scored("folded")),
    "index_query": (
        index_query,
        {"q": of(BF16, T, 8, 128), **TURN, "weights": of(BF16, T, 8), "scale": 1.0},
    ),
    "index_topk": (
        index_topk,
        {"scores": of(F32, T, 9), "visible": of(I32, T), "k": 4, "out": of(I32, T, 4)},
    ),
    "kv_norm_rope_store": (kv_norm_rope_store, {**KV, **NORM, "pages": PAGES}),
    "kv_norm_rope_store_aligned": (kv_norm_rope_store_aligned, {**KV, **NORM, **DATA}),
    "store": (store, {**KV, "pages": PAGES}),
    "store_aligned": (store_aligned, {**KV, **DATA}),
    "store_nvfp4": (store_nvfp4, {**KV, "pages": PAGES_NVFP4}),
    "nvfp4_linear": (nvfp4_linear, {"x": rows(T, D), "weight": weight(64, D), "out": of(BF16, T, 64)}),
    "grouped_linear": (
        grouped_linear,
        {"x": rows(T, 2 * D), "weight": weight(2, 64, D, scales=2), "out": of(BF16, T, 128)},
    ),
    "stacked_linear": (
        stacked_linear,
        {"x": rows(T, D), "weight": weight(2, 64, D, scales=2), "out": of(BF16, T, 128)},
    ),
    "bf16_linear": (
        wide.bf16_linear,
        {"x": of(BF16, T, D), "weight": of(BF16, 64, D), "out": of(BF16, T, 64)},
    ),
    "fp32_linear": (
        wide.fp32_linear,
        {"x": of(F32, T, D), "weight": of(F32, 64, D), "out": of(F32, T, 64)},
    ),
    "fp8_linear": (
        fp8_linear,
        {"x": rows_fp8(T, D), "weight": Fp8Weight(of(E4M3, 64, D), of(F32, 1, 2)), "out": of(BF16, T, 64)},
    ),
    "fp8_linear mxfp4": (
        fp8_linear,
        {"x": rows_fp8(T, D), "weight": Mxfp4Weight(of(U8, 64, D // 2), of(U8, 64, D // 32))}
        | {"out": of(BF16, T, 64)},
    ),
    "fp8_grouped_linear": (
        fp8_grouped_linear,
        {"x": rows_fp8(T, 2 * D), "weight": FP8_STACK, "out": of(BF16, T, 128)},
    ),
    "fp8_stacked_linear": (
        fp8_stacked_linear,
        {"x": rows_fp8(T, D), "weight": FP8_STACK, "out": of(BF16, T, 128)},
    ),
    "mhc_rmsnorm_quantise": (
        mhc_rmsnorm_quantise,
        {**STREAMS, "pre": of(F32, T, 4), "weight": of(BF16, D), "eps": 1e-6, "out": NORMED},
    ),
    "mhc_rmsnorm_quantise fp8": (
        mhc_rmsnorm_quantise,
        {**STREAMS, "pre": of(F32, T, 4), "weight": of(BF16, D), "eps": 1e-6, "form": "fp8"}
        | {"out": NORMED_FP8},
    ),
    "quantise": (quantise, {"x": of(BF16, T, D), "out": rows(T, D)}),
    "quantise fp8": (quantise_fp8, {"x": of(BF16, T, D), "out": rows_fp8(T, D)}),
    "row_slots": (
        row_slots,
        {"rows": of(I64, T), "tables": of(I32, 2, 3), "sequence": of(I32, T), "page_size": 64},
    ),
    "key_slots": (
        key_slots,
        {"positions": of(I64, T), "sequence": of(I32, T), "windows": of(I32, 2, 3), "entries": of(I32, 2, 4)}
        | {"chosen": of(I32, T, 4), "window": 8, "page_size": 64},
    ),
    "norm_rope": (norm_rope, {**Q, **TURN, "eps": 1e-6, "out": of(BF16, T, H, 256)}),
    "norm_rope_quantise": (
        norm_rope_quantise,
        {**Q, **TURN, "eps": 1e-6, "out": QuantisedQ(of(U8, T, H, 320), of(F32, T, H), of(U8, T, H, 192))},
    ),
    "rmsnorm": (rmsnorm, {**X, "eps": 1e-6, "out": of(BF16, T, D)}),
    "rmsnorm_quantise": (rmsnorm_quantise, {**X, "eps": 1e-6, "out": NORMED}),
    "rmsnorm_quantise fp8": (rmsnorm_quantise, {**X, "eps": 1e-6, "form": "fp8", "out": NORMED_FP8}),
    "rope": (rope, {"x": of(BF16, T, H, 256), **TURN, "out": of(BF16, T, H, 256)}),
    "router_scores": (
        router_scores,
        {"x": of(F32, T, D), "weight": of(F32, 8, D), "out": of(F32, T, 8)},
    ),
    "route": (route, {"scores": of(F32, T, 8), "bias": of(F32, 8), "k": 2, "scaling": 1.5, **CHOSEN}),
    "route_by_table": (
        route_by_table,
        {"scores": of(F32, T, 8), "tokens": of(I32, T), "table": of(I32, 20, 2), "scaling": 1.5, **CHOSEN},
    ),
    "sparse_attn_gathered": (sparse_attn_gathered, {**Q, **attention(), "keys": of(BF16, T, 9, 256)}),
    "sparse_attn_widened": (sparse_attn_widened, {**Q, **attention(), **TABLE, "pages": PAGES}),
    "sparse_attn_fp8": (sparse_attn_fp8, {**Q_FP8, **attention(), **TABLE, "pages": PAGES}),
    "sparse_attn_fp8 aligned": (
        sparse_attn_fp8,
        {**Q_FP8, **attention(), "pages": DATA["data"], "token_scale": DATA["token_scale"]},
    ),
    "sparse_attn_product": (
        sparse_attn_product,
        {**Q, **TURN, **attention(), "pages": PAGES, "eps": 1e-6}
        | {"codes": QuantisedQ(of(U8, T, H, 320), of(F32, T, H), of(U8, T, H, 192))},
    ),
    "sparse_attn_product aligned": (
        sparse_attn_product,
        {**Q, **TURN, **attention(), "pages": DATA["data"], "token_scale": DATA["token_scale"], "eps": 1e-6},
    ),
    "combine": (
        combine,
        {"part": of(BF16, 2, T, H, 64), "part_lse": of(F32, 2, T, H), "sinks": of(F32, H)}
        | {"out": of(BF16, T, H, 64), "lse": of(F32, T, H)},
    ),
    "swiglu": (swiglu, {"gate_up": of(BF16, T, 2 * D), "limit": 7.0, "out": of(BF16, T, D)}),
    "swiglu_quantise": (swiglu_quantise, {"gate_up": of(BF16, T, 2 * D), "limit": 7.0, "out": rows(T, D)}),
    "swiglu_quantise fp8": (
        swiglu_quantise,
        {"gate_up": of(BF16, T, 2 * D), "limit": 7.0, "form": "fp8", "out": rows_fp8(T, D)},
    ),
}
