"""From a plan to rounding points: where each stage rounds, and to what.

The one place that says what a plan's words mean. :func:`plain` and :func:`trained` are the two
references; :func:`of_plan` is a variant.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dsv4.model.config import ModelConfig
from dsv4.model.records import (
    AlignedRecord,
    ExactRecord,
    Fp4Key,
    Fp8Key,
    Fp8Record,
    Nvfp4Record,
    Record,
)
from dsv4.plan import Plan, in_fp32
from kernels.formats import bf16, e4m3, fp8_block, fp8_scaled, mxfp4
from kernels.grouped_ffn.ref import EQUATIONS as FFN_EQUATIONS
from kernels.grouped_ffn.ref import FfnRounding
from kernels.hadamard.ref import hadamard
from kernels.linear.ref import Gsa
from kernels.rounding import Round, exact
from kernels.sparse_attn.ref import EQUATIONS as ATTN_EQUATIONS
from kernels.sparse_attn.ref import AttnRounding

_GSA: dict[str, Gsa] = {"fused_scalar_gsa": "undone_by_launch", "fused_launch_gsa": "launch"}
QuantisedQuery = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _plain_query(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return q, weights


def _fp8_query(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes; the scale of each (row, head) moves into the head's weight, as it passes the ReLU."""
    codes, scale = fp8_scaled.quantise(q)
    return e4m3.decode(codes), weights * scale.squeeze(-1)


def _fp4_query(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return mxfp4.round(hadamard(q)), weights


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Rounding points of every stage; the defaults are the equations (``plain``).

    Attributes
    ----------
    name : for labels.
    activations : GEMM inputs are stored in the format of their weight.
    gsa : whose gsa NVFP4 activations use, at the attn_in and moe_in sites.
    gemm : store of a GEMM's result.
    hc_collapse : store of mHC's weighted sum before the norm.
    norm : store of the block's input norm before its quantiser.
    side : what BF16 consumers of a norm read (compressor, indexer).
    router : what the router reads.
    qr_norm : store of q_a's norm before q_b's quantiser.
    q : store of q after its head norm and RoPE.
    kv_norm, kv_rope : stores after kv's norm and after its RoPE.
    record : bytes of a KV row; of a compressed row too.
    read : store of a gathered row before attention reads it.
    attn : rounding points of attention; ``attn.out`` is its store before the inverse RoPE.
    attn_out : store after the inverse RoPE.
    index_q : store of the indexer's query; index_w : of its head weights.
    index_record : bytes of an index key.
    index_query : the query as the scores read it, with head weights rescaled.
    index_narrow : both operands of the scores are narrow.
    ffn : rounding points inside experts; moe_sum : store of routed + shared.
    head_collapse, head : stores before and after the final norm.
    residual : store of the streams, by layer.
    """

    name: str = "plain"
    record: Record
    index_record: Record
    activations: bool = False
    gsa: Gsa = "row"
    gemm: Round = exact
    hc_collapse: Round = exact
    norm: Round = exact
    side: Round = exact
    router: Round = exact
    qr_norm: Round = exact
    q: Round = exact
    kv_norm: Round = exact
    kv_rope: Round = exact
    read: Round = exact
    attn: AttnRounding = ATTN_EQUATIONS
    attn_out: Round = exact
    index_q: Round = exact
    index_w: Round = exact
    index_query: QuantisedQuery = _plain_query
    index_narrow: bool = False
    ffn: FfnRounding = FFN_EQUATIONS
    moe_sum: Round = exact
    head_collapse: Round = exact
    head: Round = exact
    residual: Callable[[int], Round] = lambda layer: exact


def plain(config: ModelConfig) -> Numerics:
    """No rounding at all: the equations on the dequantised stored weights."""
    return Numerics(record=ExactRecord(config.head_dim), index_record=ExactRecord(config.index_head_dim))


def trained(config: ModelConfig) -> Numerics:
    """The rounding that the model was trained with, and nothing else.

    K nope in FP8 with a power-of-two scale per 64, rope in BF16; the indexer's q and k rotated
    by Hadamard and in MXFP4 per 32.
    """
    return replace(
        plain(config),
        name="trained",
        record=Fp8Record(config.nope_head_dim),
        index_record=Fp4Key(config.index_head_dim),
        index_query=_fp4_query,
        index_narrow=True,
    )


def of_plan(plan: Plan, config: ModelConfig) -> Numerics:
    """Rounding points of a variant; each plan field acts in exactly one line here."""
    if plan.rounding == "none":
        return plain(config)
    store = bf16.round
    return Numerics(
        name="plan",
        activations=True,
        gsa=_GSA.get(plan.norm_quant, "row"),
        gemm=store,
        hc_collapse=_unfused(plan.mhc_quant),
        norm=_unfused(plan.norm_quant),
        side=store,
        router=_cast(plan.casts.router),
        qr_norm=_unfused(plan.q_a_norm),
        q=store,
        kv_norm=_unfused(plan.kv_norm),
        kv_rope=_unfused(plan.kv_norm),
        record=_record(plan, config),
        read=store if plan.kv_read == "gather_bf16" else exact,
        attn=_attention(plan),
        attn_out=store,
        index_q=store,
        index_w=store,
        index_record=(Fp4Key if plan.index_score == "fp4" else Fp8Key)(config.index_head_dim),
        index_query={"einsum_fp32": _plain_query, "fp8": _fp8_query, "fp4": _fp4_query}[plan.index_score],
        index_narrow=True,
        ffn=FfnRounding(
            gate_up=_cast(plan.casts.swiglu), hidden=_cast(plan.casts.swiglu), quantise=True, out=store
        ),
        moe_sum=store,
        head_collapse=store,
        head=_cast(plan.casts.head),
        residual=partial(_residual, plan.residual, config.num_hidden_layers),
    )


def _unfused(value: str) -> Round:
    """Two launches pass the value between them through BF16 memory; one keeps it in registers."""
    return bf16.round if value == "unfused" else exact


def _cast(value: str) -> Round:
    return bf16.round if value == "bf16" else exact


def _residual(value: str, layers: int, layer: int) -> Round:
    return exact if in_fp32(value, layer, layers) else bf16.round


def _record(plan: Plan, config: ModelConfig) -> Record:
    if plan.kv_format == "nvfp4":
        return Nvfp4Record(config.nope_head_dim)
    if plan.kv_record == "aligned":
        return AlignedRecord(config.nope_head_dim)
    return Fp8Record(config.nope_head_dim)


def _attention(plan: Plan) -> AttnRounding:
    rope = _fp8_row if plan.rope_format == "fp8" else bf16.round
    return AttnRounding(
        q_nope={"bf16": bf16.round, "fp8": _fp8_row, "fp8x2": _fp8_two_terms}[plan.q_format],
        q_rope=rope,
        k_nope=exact,
        k_rope=rope,
        peak=_power_of_two_above,
        p_nope=_fp8_probability if plan.pv_format == "fp8" else bf16.round,
        p_rope=bf16.round,
        out=_cast(plan.casts.attn_out),
    )


def _power_of_two_above(peak: Tensor) -> Tensor:
    """Maximum as base-2 softmax keeps it, an integer: p then rounds alike under any running maximum."""
    return torch.ceil(peak / math.log(2.0)) * math.log(2.0)


def _fp8_row(x: Tensor) -> Tensor:
    """E4M3 of a BF16 value, one power-of-two scale for the whole last axis (a head's nope or rope part)."""
    return fp8_block.round(bf16.round(x), x.shape[-1])


def _fp8_two_terms(x: Tensor) -> Tensor:
    """Value and residual of a BF16 value, both E4M3 under the value's scale: (q8 + e4m3(q/s - q8)) s."""
    x = bf16.round(x)
    codes, scale = fp8_block.quantise(x, x.shape[-1])
    value = e4m3.decode(codes)
    residual = e4m3.decode(e4m3.encode(x / scale - value))
    return (value + residual) * scale


def _fp8_probability(p: Tensor) -> Tensor:
    """Probabilities in (0, 1] as E4M3 of 256 p: down to 2^-17 of the row's maximum is kept."""
    return e4m3.decode(e4m3.encode(p * 256.0)) / 256.0
