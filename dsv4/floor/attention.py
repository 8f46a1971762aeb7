"""Attention's stages: queries, the KV row and its record, the attention itself, the output projection."""

import math

import torch
from torch import Tensor

from dsv4.floor import equations as eq
from dsv4.floor.accumulation import FP32
from dsv4.floor.layer import Env, LayerBase, Written, matrix
from dsv4.floor.storage import store_kv
from dsv4.model.cache import Batch
from kernels.formats import e4m3, fp8_block


class AttentionStages(LayerBase):
    """From attn_in to attn_proj."""

    def attn_quant(self, env: Env, batch: Batch) -> Written:
        """attn_in (T, D) FP32 to attn_in_q, what q_a and kv read: (T, D) Stored."""
        return {"attn_in_q": self._quantise(env["attn_in"], self.weights.q_a, self.plan.norm_quant)}

    def q_a(self, env: Env, batch: Batch) -> Written:
        """attn_in_q (T, D) Stored to the low-rank query, normed: qr (T, R) FP32."""
        qr = self._gemm(env["attn_in_q"].exact, self.weights.q_a).double()
        qr = eq.norm(qr, self.weights.q_a_norm, self.config.rms_norm_eps)
        return {"qr": self._bf16(qr, qr.shape[-1], when=self.plan.q_a_norm == "unfused")}

    def q_quant(self, env: Env, batch: Batch) -> Written:
        """What q_b reads of qr (T, R) FP32: qr_q (T, R) Stored."""
        return {"qr_q": self._quantise(env["qr"], self.weights.q_b)}

    def q_b(self, env: Env, batch: Batch) -> Written:
        """qr_q (T, R) Stored to the queries after head norm and RoPE: q (T, H, K) FP32, BF16 values."""
        config = self.config
        q = self._gemm(env["qr_q"].exact, self.weights.q_b).double()
        q = eq.norm(q.reshape(len(q), config.num_attention_heads, config.head_dim), None, config.rms_norm_eps)
        return {"q": self._bf16(eq.rotate(q, self._angles(batch.positions)), config.head_dim)}

    def kv(self, env: Env, batch: Batch) -> Written:
        """attn_in_q (T, D) Stored to the one KV vector before it is stored: kv (T, K) FP32."""
        unfused = self.plan.kv_norm == "unfused"
        x = self._second(env, "attn_in", self.weights.q_a, self.weights.kv)
        kv = self._gemm(x, self.weights.kv).double()
        kv = eq.norm(kv, self.weights.kv_norm, self.config.rms_norm_eps)
        kv = self._bf16(kv, kv.shape[-1], when=unfused).double()
        return {"kv": self._bf16(eq.rotate(kv, self._angles(batch.positions)), 1, when=unfused)}

    def kv_store(self, env: Env, batch: Batch) -> Written:
        """Record of kv (T, K) FP32 in the window: values as read back (T, K) FP32, bytes (T, record) uint8."""
        values, raw = store_kv(self._single(env["kv"].double()), self.plan, self.config.nope_head_dim)
        self.window = values
        return {"kv_store": values, "kv_bytes": raw}

    def attend(self, env: Env, batch: Batch) -> Written:
        """Attention, rows with equally many keys together, then the inverse rotation.

        Reads q (T, H, K) FP32, topk (T, index_topk) int64 in CSA layers, and the rows that
        :meth:`kv_store` and the entries' store kept.

        Returns
        -------
        attn_out : (T, H, K) FP32, BF16 values
        lse : (T, H) FP32
        """
        plan, config = self.plan, self.config
        window, entries = (self._as_read(stored) for stored in (self.window, self.entries))
        rows: dict[int, list[int]] = {}  # by their number of keys
        keys = []
        for row, position in enumerate(batch.positions.tolist()):
            keys.append(self._keys(window, entries, env, row, position))
            rows.setdefault(len(keys[-1]), []).append(row)
        q_nope, q_rope = self._queries(env["q"])
        out = torch.empty(env["q"].shape, dtype=torch.float64)
        lse = torch.empty(env["q"].shape[:2], dtype=torch.float64)
        for count in {len(one) for one in keys}:
            alike = rows[count]
            stacked = torch.stack([keys[row] for row in alike])  # [r, S, K]
            out[alike], lse[alike] = self._attend_rows(q_nope[alike], q_rope[alike], stacked)
        stored = self._bf16(out, config.sliding_window, when=plan.casts.attn_out == "bf16").double()
        turned = eq.rotate(stored, self._angles(batch.positions), sign=-1)
        return {"attn_out": self._bf16(turned), "lse": self._single(lse)}

    def _as_read(self, stored: Tensor) -> Tensor:
        """Rows (N, K) FP32 of the window or the entries as attention reads them: FP64."""
        return (self._store(stored) if self.plan.kv_read == "gather_bf16" else stored).double()

    def _keys(self, window: Tensor, entries: Tensor, env: Env, row: int, position: int) -> Tensor:
        """Those of the rows (N, K) of window and entries that a query at ``position`` attends to: (S, K)."""
        near = window[max(0, position - self.config.sliding_window + 1) : position + 1]
        ratio = self.config.compress_ratios[self.layer]
        if ratio == 0:
            return near
        if self.config.kind(self.layer) == "csa":
            chosen = env["topk"][row]
            return torch.cat((near, entries[chosen[chosen >= 0]]))
        return torch.cat((near, entries[: (position + 1) // ratio]))

    def _queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (T, H, K) FP32 as they meet the keys: their nope part and their rope part, FP64."""
        plan, n = self.plan, self.config.nope_head_dim
        q = self._store(q)  # what q_b stores, and the reference's value as a kernel would be handed it
        q_nope = q[..., :n]
        if plan.q_format != "bf16":
            codes, scale = fp8_block.quantise(q_nope, n)
            terms = e4m3.decode(codes)
            if plan.q_format == "fp8x2":
                terms = terms + e4m3.decode(e4m3.encode(q_nope / scale - terms))
            q_nope = terms * scale
        q_rope = q[..., n:]
        if plan.rope_format == "fp8":
            q_rope = fp8_block.round(q_rope, 64)
        return q_nope.double(), q_rope.double()

    def _attend_rows(self, q_nope: Tensor, q_rope: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of r rows over S keys each.

        Parameters
        ----------
        q_nope, q_rope : (r, H, nope), (r, H, rope) FP64
        keys : (r, S, nope + rope) FP64, K and V both

        Returns
        -------
        out : (r, H, nope + rope) FP64
        lse : (r, H) FP64, without the sink
        """
        plan, size, n = self.plan, keys.shape[-1], q_nope.shape[-1]
        k_rope = keys[..., n:]
        if plan.rope_format == "fp8":
            k_rope = fp8_block.round(k_rope, 64).double()
        logits = q_nope @ keys[..., :n].mT + q_rope @ k_rope.mT
        sums = FP32 if plan.q_format == "bf16" else self.sums
        logits = logits * size**-0.5
        logits = self.dither(logits, size // sums.products, sums.fp8).float().double()
        # in base 2 and whole, as running maxima are kept: another one changes p by a power of two alone
        top = torch.ceil(logits.amax(-1, keepdim=True) * math.log2(math.e)) / math.log2(math.e)
        p = self._single(torch.exp(logits - top))
        total = p.double().sum(-1, keepdim=True)
        p_rope = self._store(p).double()
        p_nope = e4m3.decode(e4m3.encode(p * 256)).double() / 256 if plan.pv_format == "fp8" else p_rope
        out = torch.cat((p_nope @ keys[..., :n], p_rope @ keys[..., n:]), dim=-1)
        out = out / (total + torch.exp(self.weights.sinks.double()[:, None] - top))
        return out, (top + torch.log(total)).squeeze(-1)

    def attn_proj(self, env: Env, batch: Batch) -> Written:
        """attn_out (T, H, K) FP32 through o_a by groups and o_b: attn_proj (T, D) FP32, BF16 values."""
        flat = env["attn_out"].flatten(1)
        x = self._quantise(flat, self.weights.o_a).exact.unflatten(-1, (self.config.o_groups, -1))
        low = torch.einsum("tgk,gkn->tgn", x, matrix(self.weights.o_a)).flatten(1)
        low = self._store(self._summed(low, x.shape[-1], self.weights.o_a))
        return {"attn_proj": self._gemm(self._quantise(low, self.weights.o_b).exact, self.weights.o_b)}
