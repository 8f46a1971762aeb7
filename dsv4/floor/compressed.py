"""The compressor's and the indexer's stages: entries, their record, index keys, scores, choice."""

import torch
from torch import Tensor

from dsv4.floor import equations as eq
from dsv4.floor.accumulation import FP32
from dsv4.floor.layer import Env, LayerBase, Written, matrix
from dsv4.floor.storage import store_index_key, store_kv
from dsv4.model.cache import Batch
from dsv4.model.memory import Closed
from dsv4.model.weights import CompressorWeights
from kernels.formats import e4m3, fp8_scaled, mxfp4


class CompressedStages(LayerBase):
    """What layers with a compress ratio have beside the window."""

    def _compress(
        self, attn_in: Tensor, weights: CompressorWeights, batch: Batch
    ) -> tuple[Tensor, tuple[Closed, ...]]:
        """Rows (C, K) FP32 of the windows that attn_in (T, D) FP32 closes, and which entries these are."""
        config, ratio = self.config, self.config.compress_ratios[self.layer]
        x = self._store(attn_in).double()
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
        """attn_in (T, D) FP32 to the compressed rows of whole windows: comp (C, K) FP32."""
        assert self.weights.compressor is not None
        comp, closed = self._compress(env["attn_in"], self.weights.compressor, batch)
        return {"comp_closed": closed, "comp": comp}

    def comp_store(self, env: Env, batch: Batch) -> Written:
        """Record of comp (C, K) FP32 among the entries: values as read back (C, K) FP32, bytes (C, record) uint8."""
        values, raw = store_kv(self._single(env["comp"].double()), self.plan, self.config.nope_head_dim)
        self.entries = values
        return {"comp_store": values, "comp_bytes": raw}

    def index_k(self, env: Env, batch: Batch) -> Written:
        """attn_in (T, D) FP32 to the compressed index keys: index_k (C, index_head_dim) FP32."""
        assert self.weights.indexer is not None
        keys, closed = self._compress(env["attn_in"], self.weights.indexer.compressor, batch)
        return {"index_closed": closed, "index_k": keys}

    def index_k_store(self, env: Env, batch: Batch) -> Written:
        """index_k (C, index_head_dim) FP32 to the keys as stored, in the unrotated basis, FP32."""
        values, self.keys = store_index_key(self._single(env["index_k"].double()), self.plan)
        return {"index_k_store": values}

    def index_q(self, env: Env, batch: Batch) -> Written:
        """Index queries and head weights, from qr (T, R) and attn_in (T, D), both FP32.

        Returns
        -------
        index_q : (T, index_n_heads, index_head_dim) FP32, BF16 values
        index_w : (T, index_n_heads) FP32
        """
        indexer, config = self.weights.indexer, self.config
        assert indexer is not None
        q = self._gemm(self._store(env["qr"]).double(), indexer.q_b).double()
        q = q.reshape(len(q), config.index_n_heads, config.index_head_dim)
        weights = self._gemm(self._store(env["attn_in"]).double(), indexer.weights_proj).double()
        return {
            "index_q": self._bf16(eq.rotate(q, self._angles(batch.positions))),
            "index_w": self._single(weights / (config.index_head_dim**0.5 * config.index_n_heads**0.5)),
        }

    def index_score(self, env: Env, batch: Batch) -> Written:
        """index_q, index_w and the stored keys to index_scores (T, C) FP32, -inf where not visible."""
        q = env["index_q"]
        if self.plan.index_score == "fp8":
            codes, scale = fp8_scaled.quantise(q)
            q = e4m3.decode(codes).double() * scale.double()
        elif self.plan.index_score == "fp4":
            q = mxfp4.round(self._single(eq.walsh(q.double()), 7)).double()
        dots = torch.einsum("thd,cd->thc", q.double(), self.keys)
        if self.plan.index_score == "fp8" and self.sums != FP32:
            dots = self.dither(dots, self.config.index_head_dim // self.sums.products, self.sums.fp8)
        scores = (torch.clamp(dots, min=0) * env["index_w"].double()[..., None]).sum(1)
        scores = self._single(scores, self.config.index_head_dim)
        visible = (batch.positions + 1) // 4
        return {
            "index_scores": scores.masked_fill(torch.arange(len(self.keys)) >= visible[:, None], -torch.inf)
        }

    def index_topk(self, env: Env, batch: Batch) -> Written:
        """index_scores (T, C) FP32 to the best visible entries: topk (T, index_topk) int64, -1 padded."""
        visible = ((batch.positions + 1) // 4).tolist()
        count = self.config.index_topk
        rows = [eq.largest(row[:seen], count) for row, seen in zip(env["index_scores"], visible, strict=True)]
        return {"topk": torch.stack(rows)}
