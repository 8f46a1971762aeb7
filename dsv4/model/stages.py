"""One decoder layer as stages: each reads named tensors and writes named tensors, the taps.

The forward pass chains the stages; isolated mode calls each with the reference's inputs. The
stages that touch a cache are in :mod:`dsv4.model.memory`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsv4.model import memory
from dsv4.model.cache import Batch
from dsv4.model.config import ModelConfig
from dsv4.model.layer import Env, LayerBase, Written
from dsv4.model.numerics import Numerics
from dsv4.model.ops import Ops
from dsv4.model.weights import HyperWeights, LayerWeights, ModelWeights
from dsv4.taps import BY_NAME, STAGES
from kernels.linear.ref import Activation, Weight

MODEL_STAGES = ("head", "lm_head")
LAYER_STAGES = tuple(stage for stage in STAGES if stage not in MODEL_STAGES)


class LayerStages(LayerBase):
    """The stages of one layer under one numerics and one op table."""

    def __init__(
        self, layer: int, weights: LayerWeights, config: ModelConfig, numerics: Numerics, ops: Ops
    ) -> None:
        super().__init__(layer, weights, config, numerics, ops)
        self._functions: dict[str, Callable[[Env, Batch], Written]] = {
            "attn_mhc": lambda env, _: self._mhc(
                "attn", env["streams"], self.weights.attn_hc, self.weights.input_norm
            ),
            "attn_quant": lambda env, _: {"attn_in_q": self._quantise(env["attn_in"], self.weights.q_a)},
            "q_a": self._q_a,
            "q_quant": self._q_quant,
            "q_b": self._q_b,
            "kv": self._kv,
            "kv_store": lambda env, batch: memory.store_window(self, env, batch),
            "compress": lambda env, batch: memory.compress(self, env, batch),
            "comp_store": lambda env, batch: memory.store_entries(self, env, batch),
            "index_q": self._index_q,
            "index_k": lambda env, batch: memory.index_keys(self, env, batch),
            "index_k_store": lambda env, batch: memory.store_index_keys(self, env, batch),
            "index_score": lambda env, batch: memory.index_scores(self, env, batch),
            "index_topk": self._index_topk,
            "attend": lambda env, batch: memory.attend(self, env, batch),
            "attn_proj": self._attn_proj,
            "attn_mix": lambda env, _: self._mix(
                "attn", env, env["streams"], env["attn_proj"], "streams_mid"
            ),
            "moe_mhc": lambda env, _: self._mhc(
                "moe", env["streams_mid"], self.weights.ffn_hc, self.weights.post_norm
            ),
            "moe_quant": lambda env, _: {
                "moe_in_q": self._quantise(env["moe_in"], self.weights.experts_gate_up)
            },
            "route": self._route,
            "route_weights": self._route_weights,
            "experts": self._experts,
            "shared": self._shared,
            "moe_sum": lambda env, _: {"moe_out": self.numerics.moe_sum(env["routed"] + env["shared"])},
            "moe_mix": lambda env, _: self._mix("moe", env, env["streams_mid"], env["moe_out"], "streams"),
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Stages of this layer, in order."""
        kind = self.config.kind(self.layer)
        absent = {"window": {"compressed", "csa"}, "hca": {"csa"}, "csa": set[str]()}[kind]
        return tuple(
            stage for stage in LAYER_STAGES if not any(tap.where in absent for tap in _taps_of(stage))
        )

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """Tensors that ``stage`` writes, given the named tensors it reads."""
        return self._functions[stage](env, batch)

    def _mhc(self, site: str, streams: Tensor, weights: HyperWeights, norm: Tensor) -> Written:
        config, num = self.config, self.numerics
        pre, post, comb = self.ops.hc_mix(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            iterations=config.hc_sinkhorn_iters,
        )
        x = self.ops.hc_collapse(streams, pre, out=num.hc_collapse)
        normed = self.ops.rmsnorm(x, norm, eps=config.rms_norm_eps, out=num.norm)
        return {f"{site}_pre": pre, f"{site}_post": post, f"{site}_comb": comb, f"{site}_in": normed}

    def _quantise(self, x: Tensor, weight: Weight, gsa: str | None = None) -> Activation:
        num = self.numerics
        return self.ops.quantise_activation(x, weight.format, gsa=gsa or num.gsa, enabled=num.activations)

    def _read_also(self, env: Env, name: str, first: Weight, weight: Weight) -> Activation:
        """Input ``name`` as its second reader takes it: the first's codes, or its own where the formats differ."""
        same = weight.reads == first.reads
        return env[f"{name}_q"] if same else self._quantise(env[name], weight)

    def _q_a(self, env: Env, batch: Batch) -> Written:
        qr = self.ops.linear(env["attn_in_q"], self.weights.q_a, out=self.numerics.gemm)
        norm = self.ops.rmsnorm(
            qr, self.weights.q_a_norm, eps=self.config.rms_norm_eps, out=self.numerics.qr_norm
        )
        return {"qr": norm}

    def _q_quant(self, env: Env, batch: Batch) -> Written:
        return {"qr_q": self._quantise(env["qr"], self.weights.q_b, gsa="row")}

    def _q_b(self, env: Env, batch: Batch) -> Written:
        q = self.ops.linear(env["qr_q"], self.weights.q_b, out=self.numerics.gemm)
        q = q.unflatten(-1, (self.config.num_attention_heads, -1))
        q = self.ops.rmsnorm(q, None, eps=self.config.rms_norm_eps)
        return {"q": self.ops.rope(q, *self.cos_sin(batch.positions), out=self.numerics.q)}

    def _kv(self, env: Env, batch: Batch) -> Written:
        num = self.numerics
        x = self._read_also(env, "attn_in", self.weights.q_a, self.weights.kv)
        kv = self.ops.linear(x, self.weights.kv, out=num.gemm)
        kv = self.ops.rmsnorm(kv, self.weights.kv_norm, eps=self.config.rms_norm_eps, out=num.kv_norm)
        return {"kv": self.ops.rope(kv, *self.cos_sin(batch.positions), out=num.kv_rope)}

    def _index_q(self, env: Env, batch: Batch) -> Written:
        indexer, num, config = self.weights.indexer, self.numerics, self.config
        assert indexer is not None
        qr = self._side(env["qr"])
        q = self.ops.linear(qr, indexer.q_b, out=num.gemm).unflatten(-1, (config.index_n_heads, -1))
        weights = self.ops.linear(self._side(env["attn_in"]), indexer.weights_proj, out=num.index_w)
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        return {
            "index_q": self.ops.rope(q, *self.cos_sin(batch.positions), out=num.index_q),
            "index_w": (weights.double() * scale).float(),
        }

    def _side(self, x: Tensor) -> Activation:
        """What the BF16 consumers of a norm read."""
        return Activation(values=self.numerics.side(x), narrow=self.numerics.activations)

    def _index_topk(self, env: Env, batch: Batch) -> Written:
        visible = (batch.positions + 1) // self.config.compress_ratios[self.layer]
        return {"topk": self.ops.index_topk(env["index_scores"], visible, self.config.index_topk)}

    def _attn_proj(self, env: Env, batch: Batch) -> Written:
        x = self._quantise(env["attn_out"].flatten(1), self.weights.o_a, gsa="row")
        low_rank = self.ops.grouped_linear(x, self.weights.o_a, out=self.numerics.gemm)
        x = self._quantise(low_rank, self.weights.o_b, gsa="row")
        return {"attn_proj": self.ops.linear(x, self.weights.o_b, out=self.numerics.gemm)}

    def _mix(self, site: str, env: Env, streams: Tensor, y: Tensor, name: str) -> Written:
        post, comb = env[f"{site}_post"], env[f"{site}_comb"]
        return {name: self.ops.hc_expand(streams, y, post, comb, out=self.numerics.residual(self.layer))}

    def _route(self, env: Env, batch: Batch) -> Written:
        weights, k = self.weights, self.config.num_experts_per_tok
        scores = self.ops.router_scores(self.numerics.router(env["moe_in"]), weights.router)
        if weights.tid2eid is not None:
            ids = self.ops.hash_experts(batch.tokens, weights.tid2eid)
        else:
            ids = self.ops.choose_experts(scores, weights.e_score_bias, k)
        return {"router_scores": scores, "expert_ids": ids}

    def _route_weights(self, env: Env, batch: Batch) -> Written:
        scaling = self.config.routed_scaling_factor
        return {
            "expert_weights": self.ops.expert_weights(
                env["router_scores"], env["expert_ids"], scaling=scaling
            )
        }

    def _experts(self, env: Env, batch: Batch) -> Written:
        routed = self.ops.grouped_ffn(
            env["moe_in_q"],
            env["expert_ids"],
            env["expert_weights"],
            self.weights.experts_gate_up,
            self.weights.experts_down,
            limit=self.config.swiglu_limit,
            at=self.numerics.ffn,
        )
        return {"routed": routed}

    def _shared(self, env: Env, batch: Batch) -> Written:
        shared = self.ops.dense_ffn(
            self._read_also(env, "moe_in", self.weights.experts_gate_up, self.weights.shared_gate),
            self.weights.shared_gate,
            self.weights.shared_up,
            self.weights.shared_down,
            limit=self.config.swiglu_limit,
            at=self.numerics.ffn,
        )
        return {"shared": shared}


class HeadStages:
    """What follows the last layer: final collapse, norm, FP32 ``lm_head``."""

    names = MODEL_STAGES

    def __init__(self, weights: ModelWeights, config: ModelConfig, numerics: Numerics, ops: Ops) -> None:
        self.weights, self.config, self.numerics, self.ops = weights, config, numerics, ops

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """See :meth:`LayerStages.run`."""
        return self._head(env) if stage == "head" else self._lm_head(env)

    def _head(self, env: Env) -> Written:
        hc, config, num = self.weights.hc_head, self.config, self.numerics
        x = self.ops.hc_head_collapse(
            env["streams"],
            hc.fn,
            hc.base,
            hc.scale,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            out=num.head_collapse,
        )
        return {"hidden": self.ops.rmsnorm(x, self.weights.norm, eps=config.rms_norm_eps, out=num.head)}

    def _lm_head(self, env: Env) -> Written:
        return {"logits": self.ops.linear(Activation(values=env["hidden"]), self.weights.lm_head)}


def _taps_of(stage: str) -> list[Any]:
    return [tap for tap in BY_NAME.values() if tap.stage == stage]


def embed(
    weights: ModelWeights, config: ModelConfig, tokens: Tensor, store: Callable[[Tensor], Tensor]
) -> Tensor:
    """First streams: the embedding, once per stream. (T,) -> (T, N, D) FP32."""
    x = store(weights.embed[tokens])
    return x[:, None, :].expand(-1, config.hc_mult, -1).contiguous()
