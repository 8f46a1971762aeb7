"""The stages of a layer in FP64 under a plan, with every value dithered before it is rounded.

Same names as the model's stages, so that isolated mode can drive either. The reading of the
plan is this module's own: it and :mod:`dsv4.model.numerics` must agree, and a test says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.floor import equations as eq
from dsv4.floor.dither import Dither
from dsv4.floor.storage import Stored, quantised_input, quantiser, store_index_key, store_kv
from dsv4.model.cache import Batch
from dsv4.model.config import ModelConfig
from dsv4.model.memory import Closed
from dsv4.model.weights import CompressorWeights, HyperWeights, LayerWeights, ModelWeights
from dsv4.plan import Plan
from dsv4.taps import layer_taps
from kernels.formats import bf16, e4m3, fp8_block, fp8_scaled, mxfp4
from kernels.linear.ref import Weight

Env = Mapping[str, Any]
Written = dict[str, Any]


def matrix(weight: Weight) -> Tensor:
    """Dequantised (..., K, N) FP64."""
    return weight.values * weight.scale.reshape(*weight.scale.shape, 1, 1)


@dataclass
class FloorLayer:
    """One layer of the second opinion; keeps what it stored for the stages that read it."""

    layer: int
    weights: LayerWeights
    config: ModelConfig
    plan: Plan
    dither: Dither
    window: Tensor = field(default_factory=lambda: torch.empty(0))
    entries: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def names(self) -> tuple[str, ...]:
        """Stages of this layer, in order."""
        taps = layer_taps(self.config.compress_ratios[self.layer])
        return tuple(dict.fromkeys(tap.stage for tap in taps))

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """Tensors that ``stage`` writes; see :meth:`dsv4.model.stages.LayerStages.run`."""
        function: Callable[[Env, Batch], Written] = getattr(self, stage)
        return function(env, batch)

    def _single(self, x: Tensor, terms: int = 1) -> Tensor:
        """FP32 as a kernel's accumulator would hold it."""
        return self.dither(x, terms).float()

    def _bf16(self, x: Tensor, terms: int = 1, when: bool = True) -> Tensor:
        single = self._single(x, terms)
        return bf16.round(single) if when else single

    def _gemm(self, x: Tensor, weight: Weight) -> Tensor:
        """(T, K) FP64 by a stored matrix, stored in BF16."""
        return self._bf16(x @ matrix(weight), x.shape[-1])

    def _angles(self, positions: Tensor) -> Tensor:
        config = self.config
        if config.compress_ratios[self.layer] == 0:
            return eq.angles(positions, config.qk_rope_head_dim, config.rope_theta, None)
        yarn = (
            config.rope_factor,
            config.rope_original_max_position,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        return eq.angles(positions, config.qk_rope_head_dim, config.compress_rope_theta, yarn)

    def _mhc(self, site: str, streams: Tensor, weights: HyperWeights, norm: Tensor) -> Written:
        config, plan, n = self.config, self.plan, self.config.hc_mult
        flat = eq.norm(streams.double().flatten(1), None, config.rms_norm_eps)
        mix = self.dither(flat @ weights.fn.double().T, flat.shape[-1])
        scale, base = weights.scale.double(), weights.base.double()
        pre = eq.sigmoid(mix[:, :n] * scale[0] + base[:n]) + config.hc_eps
        post = 2 * eq.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        comb = eq.doubly_stochastic(logits, config.hc_eps, config.hc_sinkhorn_iters)
        pre32 = self._single(pre)
        x = torch.einsum("tn,tnd->td", pre32.double(), streams.double())
        x = self._bf16(x, n, when=plan.mhc_quant == "unfused")
        y = eq.norm(x.double(), norm, config.rms_norm_eps)
        y = self._bf16(y, config.hidden_size, when=plan.norm_quant == "unfused")
        return {
            f"{site}_pre": pre32,
            f"{site}_post": self._single(post),
            f"{site}_comb": self._single(comb),
            f"{site}_in": y,
        }

    def attn_mhc(self, env: Env, batch: Batch) -> Written:
        """Mixing weights and normed input of attention."""
        return self._mhc("attn", env["streams"], self.weights.attn_hc, self.weights.input_norm)

    def moe_mhc(self, env: Env, batch: Batch) -> Written:
        """Mixing weights and normed input of the experts."""
        return self._mhc("moe", env["streams_mid"], self.weights.ffn_hc, self.weights.post_norm)

    def _quantise(self, x: Tensor, weight: Weight, norm_quant: str = "fused") -> Stored:
        # The dither of the norm before it acts here too: its FP32 result is what the quantiser reads.
        return quantised_input(self._single(x.double(), x.shape[-1]), weight.format, norm_quant)

    def _second(self, env: Env, name: str, first: Weight, weight: Weight) -> Tensor:
        """What the second reader of a block's input multiplies: FP64, quantised again for another format."""
        if quantiser(first.format) == quantiser(weight.format):
            return env[f"{name}_q"].exact
        return self._quantise(env[name], weight, self.plan.norm_quant).exact

    def attn_quant(self, env: Env, batch: Batch) -> Written:
        """Codes that q_a and kv read."""
        return {"attn_in_q": self._quantise(env["attn_in"], self.weights.q_a, self.plan.norm_quant)}

    def moe_quant(self, env: Env, batch: Batch) -> Written:
        """Codes that the experts read."""
        weight = self.weights.experts_gate_up
        return {"moe_in_q": self._quantise(env["moe_in"], weight, self.plan.norm_quant)}

    def q_a(self, env: Env, batch: Batch) -> Written:
        """Low-rank query, normed."""
        qr = self._gemm(env["attn_in_q"].exact, self.weights.q_a).double()
        qr = eq.norm(qr, self.weights.q_a_norm, self.config.rms_norm_eps)
        return {"qr": self._bf16(qr, qr.shape[-1], when=self.plan.q_a_norm == "unfused")}

    def q_quant(self, env: Env, batch: Batch) -> Written:
        """Codes that q_b reads."""
        return {"qr_q": self._quantise(env["qr"], self.weights.q_b)}

    def q_b(self, env: Env, batch: Batch) -> Written:
        """Queries after head norm and RoPE."""
        config = self.config
        q = self._gemm(env["qr_q"].exact, self.weights.q_b).double()
        q = eq.norm(q.reshape(len(q), config.num_attention_heads, config.head_dim), None, config.rms_norm_eps)
        return {"q": self._bf16(eq.rotate(q, self._angles(batch.positions)), config.head_dim)}

    def kv(self, env: Env, batch: Batch) -> Written:
        """The one KV vector, before it is stored."""
        unfused = self.plan.kv_norm == "unfused"
        x = self._second(env, "attn_in", self.weights.q_a, self.weights.kv)
        kv = self._gemm(x, self.weights.kv).double()
        kv = eq.norm(kv, self.weights.kv_norm, self.config.rms_norm_eps)
        kv = self._bf16(kv, kv.shape[-1], when=unfused).double()
        return {"kv": self._bf16(eq.rotate(kv, self._angles(batch.positions)), 1, when=unfused)}

    def kv_store(self, env: Env, batch: Batch) -> Written:
        """Record bytes of the window."""
        values, raw = store_kv(self._single(env["kv"].double()), self.plan, self.config.nope_head_dim)
        self.window = values
        return {"kv_store": values, "kv_bytes": raw}

    def comp_store(self, env: Env, batch: Batch) -> Written:
        """Record bytes of the compressed rows."""
        values, raw = store_kv(self._single(env["comp"].double()), self.plan, self.config.nope_head_dim)
        self.entries = values
        return {"comp_store": values, "comp_bytes": raw}

    def index_k_store(self, env: Env, batch: Batch) -> Written:
        """Stored index keys, in the unrotated basis."""
        values, self.keys = store_index_key(self._single(env["index_k"].double()), self.plan)
        return {"index_k_store": values}

    def _compress(
        self, attn_in: Tensor, weights: CompressorWeights, batch: Batch
    ) -> tuple[Tensor, tuple[Closed, ...]]:
        config, ratio = self.config, self.config.compress_ratios[self.layer]
        x = bf16.round(attn_in).double()
        kv, gate = x @ matrix(weights.kv), x @ matrix(weights.gate)
        gate = gate + weights.position_bias.double().repeat(len(x) // ratio + 1, 1)[: len(x)]
        overlap = config.kind(self.layer) == "csa"
        half = kv.shape[-1] // 2 if overlap else 0
        count = len(x) // ratio
        pooled = []
        for entry in range(count):
            rows = slice(entry * ratio, (entry + 1) * ratio)
            values, gates = kv[rows, half:], gate[rows, half:]
            if overlap and entry:
                before = slice(rows.start - ratio, rows.start)
                values = torch.cat((kv[before, :half], values))
                gates = torch.cat((gate[before, :half], gates))
            pooled.append(eq.gated_mean(values, gates))
        size = kv.shape[-1] - half
        rows = torch.stack(pooled) if pooled else torch.empty(0, size, dtype=torch.float64)
        rows = self.dither(rows, x.shape[-1])
        rows = eq.norm(rows, weights.norm, config.rms_norm_eps)
        rows = eq.rotate(rows, self._angles(torch.arange(count) * ratio))
        return self._single(rows, size), (Closed(batch.segments[0], 0, count),)

    def compress(self, env: Env, batch: Batch) -> Written:
        """Compressed rows."""
        assert self.weights.compressor is not None
        comp, closed = self._compress(env["attn_in"], self.weights.compressor, batch)
        return {"comp_closed": closed, "comp": comp}

    def index_k(self, env: Env, batch: Batch) -> Written:
        """Compressed index keys."""
        assert self.weights.indexer is not None
        keys, closed = self._compress(env["attn_in"], self.weights.indexer.compressor, batch)
        return {"index_closed": closed, "index_k": keys}

    def index_q(self, env: Env, batch: Batch) -> Written:
        """Index queries and head weights."""
        indexer, config = self.weights.indexer, self.config
        assert indexer is not None
        q = self._gemm(bf16.round(env["qr"]).double(), indexer.q_b).double()
        q = q.reshape(len(q), config.index_n_heads, config.index_head_dim)
        weights = self._gemm(bf16.round(env["attn_in"]).double(), indexer.weights_proj).double()
        return {
            "index_q": self._bf16(eq.rotate(q, self._angles(batch.positions))),
            "index_w": self._single(weights / (config.index_head_dim**0.5 * config.index_n_heads**0.5)),
        }

    def index_score(self, env: Env, batch: Batch) -> Written:
        """Scores of visible entries, -inf elsewhere."""
        q = env["index_q"]
        if self.plan.index_score == "fp8":
            codes, scale = fp8_scaled.quantise(q)
            q = e4m3.decode(codes).double() * scale.double()
        elif self.plan.index_score == "fp4":
            q = mxfp4.round(self._single(eq.walsh(q.double()), 7)).double()
        dots = torch.einsum("thd,cd->thc", q.double(), self.keys)
        scores = (torch.clamp(dots, min=0) * env["index_w"].double()[..., None]).sum(1)
        scores = self._single(scores, self.config.index_head_dim)
        visible = (batch.positions + 1) // 4
        return {
            "index_scores": scores.masked_fill(torch.arange(len(self.keys)) >= visible[:, None], -torch.inf)
        }

    def index_topk(self, env: Env, batch: Batch) -> Written:
        """Best visible entries."""
        visible = ((batch.positions + 1) // 4).tolist()
        count = self.config.index_topk
        rows = [eq.largest(row[:seen], count) for row, seen in zip(env["index_scores"], visible, strict=True)]
        return {"topk": torch.stack(rows)}

    def attend(self, env: Env, batch: Batch) -> Written:
        """Attention, rows with equally many keys together, then the inverse rotation."""
        plan, config = self.plan, self.config
        keys = [self._keys(env, row, position) for row, position in enumerate(batch.positions.tolist())]
        out = torch.empty(env["q"].shape, dtype=torch.float64)
        lse = torch.empty(env["q"].shape[:2], dtype=torch.float64)
        for count in {len(one) for one in keys}:
            rows = [row for row, one in enumerate(keys) if len(one) == count]
            stacked = torch.stack([keys[row] for row in rows])  # [r, S, K]
            if plan.kv_read == "gather_bf16":
                stacked = bf16.round(stacked)
            out[rows], lse[rows] = self._attend_rows(env["q"][rows], stacked)
        stored = self._bf16(out, config.sliding_window, when=plan.casts.attn_out == "bf16").double()
        turned = eq.rotate(stored, self._angles(batch.positions), sign=-1)
        return {"attn_out": self._bf16(turned), "lse": self._single(lse)}

    def _keys(self, env: Env, row: int, position: int) -> Tensor:
        """Rows that a query at ``position`` attends to: (S, K) FP32."""
        near = self.window[max(0, position - self.config.sliding_window + 1) : position + 1]
        ratio = self.config.compress_ratios[self.layer]
        if ratio == 0:
            return near
        if self.config.kind(self.layer) == "csa":
            chosen = env["topk"][row]
            return torch.cat((near, self.entries[chosen[chosen >= 0]]))
        return torch.cat((near, self.entries[: (position + 1) // ratio]))

    def _attend_rows(self, q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(r, H, K), (r, S, K) FP32 to out (r, H, K) and lse (r, H), FP64."""
        plan, n = self.plan, self.config.nope_head_dim
        q = bf16.round(q)  # what q_b stores, and the reference's value as a kernel would be handed it
        q_nope = q[..., :n]
        if plan.q_format != "bf16":
            codes, scale = fp8_block.quantise(q_nope, n)
            terms = e4m3.decode(codes)
            if plan.q_format == "fp8x2":
                terms = terms + e4m3.decode(e4m3.encode(q_nope / scale - terms))
            q_nope = terms * scale
        q_rope, k_rope = q[..., n:], keys[..., n:]
        if plan.rope_format == "fp8":
            q_rope, k_rope = fp8_block.round(q_rope, 64), fp8_block.round(k_rope, 64)
        logits = q_nope.double() @ keys[..., :n].double().mT + q_rope.double() @ k_rope.double().mT
        logits = self._single(logits * q.shape[-1] ** -0.5, q.shape[-1]).double()
        top = logits.amax(-1, keepdim=True)
        p = self._single(torch.exp(logits - top))
        total = p.double().sum(-1, keepdim=True)
        p_rope = bf16.round(p).double()
        p_nope = e4m3.decode(e4m3.encode(p * 256)).double() / 256 if plan.pv_format == "fp8" else p_rope
        values = keys.double()
        out = torch.cat((p_nope @ values[..., :n], p_rope @ values[..., n:]), dim=-1)
        out = out / (total + torch.exp(self.weights.sinks.double()[:, None] - top))
        return out, (top + torch.log(total)).squeeze(-1)

    def attn_proj(self, env: Env, batch: Batch) -> Written:
        """Grouped output projection."""
        flat = env["attn_out"].flatten(1)
        x = self._quantise(flat, self.weights.o_a).exact.unflatten(-1, (self.config.o_groups, -1))
        low = torch.einsum("tgk,gkn->tgn", x, matrix(self.weights.o_a)).flatten(1)
        low = self._bf16(low, x.shape[-1])
        return {"attn_proj": self._gemm(self._quantise(low, self.weights.o_b).exact, self.weights.o_b)}

    def _mix(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        carried = torch.einsum("tjk,tjd->tkd", comb.double(), streams.double())
        mixed = post.double()[..., None] * y.double()[:, None] + carried
        half = self.config.num_hidden_layers // 2
        wide = {
            "bf16": False,
            "fp32": True,
            "fp32_first_half": self.layer < half,
            "fp32_last_half": self.layer >= half,
        }[self.plan.residual]
        return self._bf16(mixed, self.config.hc_mult, when=not wide)

    def attn_mix(self, env: Env, batch: Batch) -> Written:
        """Streams after attention."""
        return {
            "streams_mid": self._mix(env["streams"], env["attn_proj"], env["attn_post"], env["attn_comb"])
        }

    def moe_mix(self, env: Env, batch: Batch) -> Written:
        """Streams after the experts."""
        return {"streams": self._mix(env["streams_mid"], env["moe_out"], env["moe_post"], env["moe_comb"])}

    def route(self, env: Env, batch: Batch) -> Written:
        """Router scores and the experts they choose."""
        x = bf16.round(env["moe_in"]) if self.plan.casts.router == "bf16" else env["moe_in"]
        logits = self.dither(x.double() @ self.weights.router.double().T, x.shape[-1])
        scores = self._single(torch.sqrt(torch.logaddexp(logits, torch.zeros_like(logits))))
        if self.weights.tid2eid is not None:
            ids = self.weights.tid2eid[batch.tokens].sort(-1).values
        else:
            assert self.weights.e_score_bias is not None
            biased = scores + self.weights.e_score_bias
            ids = torch.stack([eq.largest(row, self.config.num_experts_per_tok) for row in biased])
        return {"router_scores": scores, "expert_ids": ids}

    def route_weights(self, env: Env, batch: Batch) -> Written:
        """Weights of the chosen experts."""
        chosen = torch.gather(env["router_scores"].double(), 1, env["expert_ids"])
        weights = chosen * (self.config.routed_scaling_factor / (chosen.sum(-1, keepdim=True) + 1e-20))
        return {"expert_weights": self._single(weights)}

    def _ffn(self, x: Tensor, gate: Tensor, up: Tensor, down: Weight, down_matrix: Tensor) -> Tensor:
        """One expert on (T, D) FP64, its result before any store."""
        stored = self.plan.casts.swiglu == "bf16"
        g = self._bf16(x @ gate, x.shape[-1], when=stored).double()
        u = self._bf16(x @ up, x.shape[-1], when=stored).double()
        hidden = self._bf16(eq.clamped_swiglu(g, u, self.config.swiglu_limit), 1, when=stored)
        return quantised_input(hidden, down.format).exact @ down_matrix

    def experts(self, env: Env, batch: Batch) -> Written:
        """Routed experts, token by token groups."""
        x, ids, weights = env["moe_in_q"].exact, env["expert_ids"], env["expert_weights"].double()
        gate_up, down = matrix(self.weights.experts_gate_up), matrix(self.weights.experts_down)
        width = self.config.moe_intermediate_size
        total = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            token, slot = torch.where(ids == expert)
            matrices = gate_up[expert][:, :width], gate_up[expert][:, width:]
            y = self._single(
                self._ffn(x[token], *matrices, self.weights.experts_down, down[expert]), width
            ).double()
            total.index_add_(0, token, y * weights[token, slot, None])
        return {"routed": self._bf16(total, width)}

    def shared(self, env: Env, batch: Batch) -> Written:
        """The shared expert."""
        w = self.weights
        y = self._ffn(
            self._second(env, "moe_in", w.experts_gate_up, w.shared_gate),
            matrix(w.shared_gate),
            matrix(w.shared_up),
            w.shared_down,
            matrix(w.shared_down),
        )
        return {"shared": self._bf16(y, self.config.moe_intermediate_size)}

    def moe_sum(self, env: Env, batch: Batch) -> Written:
        """Routed and shared together."""
        return {"moe_out": self._bf16(env["routed"].double() + env["shared"].double())}


@dataclass
class FloorHead:
    """Final collapse, norm and FP32 ``lm_head``."""

    weights: ModelWeights
    config: ModelConfig
    plan: Plan
    dither: Dither
    names: tuple[str, ...] = ("head", "lm_head")

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """See :meth:`FloorLayer.run`."""
        config, hc = self.config, self.weights.hc_head
        if stage == "lm_head":
            product = env["hidden"].double() @ matrix(self.weights.lm_head)
            return {"logits": self.dither(product, config.hidden_size).float()}
        streams = env["streams"].double()
        flat = eq.norm(streams.flatten(1), None, config.rms_norm_eps)
        mix = self.dither(flat @ hc.fn.double().T, flat.shape[-1])
        pre = (eq.sigmoid(mix * hc.scale.double() + hc.base.double()) + config.hc_eps).float()
        x = bf16.round(self.dither(torch.einsum("tn,tnd->td", pre.double(), streams), config.hc_mult).float())
        y = self.dither(
            eq.norm(x.double(), self.weights.norm, config.rms_norm_eps), config.hidden_size
        ).float()
        return {"hidden": bf16.round(y) if self.plan.casts.head == "bf16" else y}
