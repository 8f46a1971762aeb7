"""Routing and experts on kernels: stages of :class:`dsv4.backend.stages.KernelLayerStages`."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.backend import products
from dsv4.backend.layer import Env, KernelLayer, Written
from dsv4.backend.products import reads
from dsv4.model.cache import Batch
from kernels.route import kernel as route_kernel
from kernels.swiglu_quantise_nvfp4.kernel import swiglu_quantise

BF16, FP32 = torch.bfloat16, torch.float32


def route(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """moe_in (T, D) to router_scores (T, E) FP32 and expert_ids (T, k) int32; their weights in the same launch."""
    x = env["moe_in"]
    x = (x.to(BF16) if at.plan.casts.router == "bf16" else x).float()  # cast: fixed(B4_router)
    scores = route_kernel.router_scores(x, at.native.router)
    scaling = at.config.routed_scaling_factor
    if at.native.tid2eid is not None:
        ids, weights = route_kernel.route_by_table(scores, batch.tokens, at.native.tid2eid, scaling=scaling)
    else:
        assert at.native.e_score_bias is not None
        count = at.config.num_experts_per_tok
        ids, weights = route_kernel.route(scores, at.native.e_score_bias, count, scaling=scaling)
    at.fused.keep("router_scores", scores, True)
    at.fused.keep("expert_ids", ids, weights)
    return {"router_scores": scores, "expert_ids": ids}


def route_weights(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Weights of the chosen experts (T, k) FP32: those made beside the choice, or of the choice that is given."""
    scores, ids = env["router_scores"], env["expert_ids"]
    same, weights = at.fused.take("router_scores", scores), at.fused.take("expert_ids", ids)
    if not same or weights is None:
        rows = torch.arange(len(ids), device=at.device)
        scaling = at.config.routed_scaling_factor
        _, weights = route_kernel.route_by_table(scores, rows, ids, scaling=scaling)
    return {"expert_weights": weights}


def experts(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """moe_in_q to the chosen experts' weighted sum: routed (T, D) BF16."""
    routed = products.experts(
        env["moe_in_q"].rows,
        env["expert_ids"],
        env["expert_weights"],
        at.native.experts_gate_up,
        at.native.experts_down,
        limit=at.config.swiglu_limit,
        stored=_stored(at),
    )
    return {"routed": routed}


def shared(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """The shared expert on moe_in_q: shared (T, D) BF16; the launches of :func:`kernels.grouped_ffn.kernel.dense_ffn`.

    They are made here one by one, so that what SwiGLU clamps is seen.
    """
    native, stored = at.native, _stored(at)
    x = at.read_also(env, "moe_in", native.experts_gate_up, native.shared)
    gate_up = products.stacked(x.rows, native.shared, stored)
    at.seen("gate_up", at.layer, gate_up)
    form = reads(native.shared_down)
    hidden = swiglu_quantise(gate_up, limit=at.config.swiglu_limit, form=form, between=stored)
    return {"shared": products.linear(hidden, native.shared_down)}


def _stored(at: KernelLayer) -> torch.dtype:
    return BF16 if at.plan.casts.swiglu == "bf16" else FP32  # cast: fixed(B4_swiglu)


def moe_sum(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Routed + shared, added in FP32 and stored in BF16, which torch does in one launch: moe_out (T, D)."""
    total: Tensor = env["routed"] + env["shared"]
    return {"moe_out": total.to(BF16)}


STAGES: dict[str, Callable[[KernelLayer, Env, Batch], Written]] = {
    "route": route,
    "route_weights": route_weights,
    "experts": experts,
    "shared": shared,
    "moe_sum": moe_sum,
}
