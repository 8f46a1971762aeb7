"""The op table: which function computes each op. A backend, or a fault, swaps entries."""

from dataclasses import dataclass
from typing import Any

from kernels.compress import ref as compress_ref
from kernels.grouped_ffn import ref as grouped_ffn_ref
from kernels.hc import ref as hc_ref
from kernels.index_logits import ref as index_logits_ref
from kernels.index_topk import ref as index_topk_ref
from kernels.linear import ref as linear_ref
from kernels.rmsnorm import ref as rmsnorm_ref
from kernels.rope import ref as rope_ref
from kernels.route import ref as route_ref
from kernels.sparse_attn import ref as sparse_attn_ref

Op = Any  # a function; its contract is the ref of the same name in kernels/


@dataclass(frozen=True, kw_only=True)
class Ops:
    """One function per op, by the name of its ref. No fallback: a backend fills every entry."""

    rmsnorm: Op = rmsnorm_ref.rmsnorm
    rope: Op = rope_ref.rope
    quantise_activation: Op = linear_ref.quantise_activation
    linear: Op = linear_ref.linear
    grouped_linear: Op = linear_ref.grouped_linear
    hc_mix: Op = hc_ref.mix
    hc_collapse: Op = hc_ref.collapse
    hc_expand: Op = hc_ref.expand
    hc_head_collapse: Op = hc_ref.head_collapse
    compress_windows: Op = compress_ref.windows
    compress_pool: Op = compress_ref.pool
    index_logits: Op = index_logits_ref.index_logits
    index_topk: Op = index_topk_ref.index_topk
    sparse_attn: Op = sparse_attn_ref.sparse_attn
    router_scores: Op = route_ref.router_scores
    choose_experts: Op = route_ref.choose_experts
    hash_experts: Op = route_ref.hash_experts
    expert_weights: Op = route_ref.expert_weights
    grouped_ffn: Op = grouped_ffn_ref.grouped_ffn
    dense_ffn: Op = grouped_ffn_ref.dense_ffn


REFS = Ops()
