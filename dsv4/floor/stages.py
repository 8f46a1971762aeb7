"""The stages of a layer in FP64 under a plan, with every value dithered before it is rounded.

Same names as the model's stages, so that isolated mode can drive either. The reading of the
plan is this module's own: it and :mod:`dsv4.model.numerics` must agree, and a test says so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.floor import equations as eq
from dsv4.floor.attention import AttentionStages
from dsv4.floor.compressed import CompressedStages
from dsv4.floor.dither import Dither
from dsv4.floor.experts import ExpertStages
from dsv4.floor.layer import Env, Written, matrix
from dsv4.model.cache import Batch
from dsv4.model.config import ModelConfig
from dsv4.model.weights import HyperWeights, ModelWeights
from dsv4.plan import Plan
from kernels.formats import bf16
from kernels.rounding import exact


class FloorLayer(AttentionStages, CompressedStages, ExpertStages):
    """One layer: its blocks, and mHC around them."""

    def _mhc(self, site: str, streams: Tensor, weights: HyperWeights, norm: Tensor) -> Written:
        """Mixing weights of one site and the block's normed input, from streams (T, N, D) FP32."""
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
        """Streams (T, N, D) FP32 to attn_pre, attn_post (T, N), attn_comb (T, N, N) and attn_in (T, D), FP32."""
        return self._mhc("attn", env["streams"], self.weights.attn_hc, self.weights.input_norm)

    def moe_mhc(self, env: Env, batch: Batch) -> Written:
        """streams_mid (T, N, D) FP32 to moe_pre, moe_post (T, N), moe_comb (T, N, N) and moe_in (T, D), FP32."""
        return self._mhc("moe", env["streams_mid"], self.weights.ffn_hc, self.weights.post_norm)

    def _mix(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Next streams (T, N, D) FP32 from the block's output y (T, D), post (T, N) and comb (T, N, N)."""
        carried = torch.einsum("tjk,tjd->tkd", comb.double(), streams.double())
        mixed = post.double()[..., None] * y.double()[:, None] + carried
        layers = self.config.num_hidden_layers
        half = layers // 2
        wide = {
            "bf16": False,
            "fp32": True,
            "fp32_first_half": self.layer < half,
            "fp32_last_half": self.layer >= half,
            "fp32_last": self.layer == layers - 1,
        }[self.plan.residual]
        return self._bf16(mixed, self.config.hc_mult, when=not wide)

    def attn_mix(self, env: Env, batch: Batch) -> Written:
        """Streams after attention, from streams and attn_proj (T, D): streams_mid (T, N, D) FP32."""
        return {
            "streams_mid": self._mix(env["streams"], env["attn_proj"], env["attn_post"], env["attn_comb"])
        }

    def moe_mix(self, env: Env, batch: Batch) -> Written:
        """Streams after the experts, from streams_mid and moe_out (T, D): streams (T, N, D) FP32."""
        return {"streams": self._mix(env["streams_mid"], env["moe_out"], env["moe_post"], env["moe_comb"])}


@dataclass
class FloorHead:
    """Final collapse, norm and FP32 ``lm_head``."""

    weights: ModelWeights
    config: ModelConfig
    plan: Plan
    dither: Dither
    names: tuple[str, ...] = ("head", "lm_head")

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """``head``: streams (T, N, D) FP32 to hidden (T, D) FP32; ``lm_head``: hidden to logits (T, V) FP32."""
        config, hc = self.config, self.weights.hc_head
        if stage == "lm_head":
            product = env["hidden"].double() @ matrix(self.weights.lm_head)
            return {"logits": self.dither(product, config.hidden_size).float()}
        streams = env["streams"].double()
        flat = eq.norm(streams.flatten(1), None, config.rms_norm_eps)
        mix = self.dither(flat @ hc.fn.double().T, flat.shape[-1])
        pre = (eq.sigmoid(mix * hc.scale.double() + hc.base.double()) + config.hc_eps).float()
        store = exact if self.plan.rounding == "none" else bf16.round
        x = store(self.dither(torch.einsum("tn,tnd->td", pre.double(), streams), config.hc_mult).float())
        y = self.dither(
            eq.norm(x.double(), self.weights.norm, config.rms_norm_eps), config.hidden_size
        ).float()
        return {"hidden": store(y) if self.plan.casts.head == "bf16" else y}
