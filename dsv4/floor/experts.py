"""The experts' stages: router, routed experts, the shared one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.floor import equations as eq
from dsv4.floor.accumulation import FP32_UNIT
from dsv4.floor.layer import Env, LayerBase, Written, matrix
from dsv4.model.cache import Batch
from kernels.linear.ref import Weight


class ExpertStages(LayerBase):
    """From moe_in to moe_out."""

    def moe_quant(self, env: Env, batch: Batch) -> Written:
        """moe_in (T, D) FP32 to moe_in_q, what the experts read: (T, D) Stored."""
        weight = self.weights.experts_gate_up
        return {"moe_in_q": self._quantise(env["moe_in"], weight, self.plan.norm_quant)}

    def route(self, env: Env, batch: Batch) -> Written:
        """Router scores of moe_in (T, D) FP32, and the experts that they or the token ids choose.

        Returns
        -------
        router_scores : (T, E) FP32
        expert_ids : (T, k) int64, ascending
        """
        x = self._store(env["moe_in"]) if self.plan.casts.router == "bf16" else env["moe_in"]
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
        """Scores and ids to the weights of the chosen experts: expert_weights (T, k) FP32.

        In FP32, as a router computes them: a sum of k scores, a quotient and a product, each rounded.
        """
        chosen = torch.gather(env["router_scores"].double(), 1, env["expert_ids"])
        weights = chosen * (self.config.routed_scaling_factor / (chosen.sum(-1, keepdim=True) + 1e-20))
        roundings = max(chosen.shape[-1] / 2, 1.0) + 2  # their variances add; a sum's as in Dither
        return {"expert_weights": self.dither(weights, 1, FP32_UNIT * roundings**0.5).float()}

    def _hidden(
        self,
        gate: Tensor,
        up: Tensor,
        first: Weight,
        down: Weight,
        normals: Sequence[Tensor | None] = (None, None, None),
    ) -> Tensor:
        """What a down matrix reads.

        Parameters
        ----------
        gate, up : (T, F) FP64
            Products with the matrices that are stored as ``first`` is.
        down : what the result is stored for.
        normals : of gate, up and the product of both, if they were drawn ahead.

        Returns
        -------
        (T, F) FP64
        """
        stored, terms = self.plan.casts.swiglu == "bf16", self.config.hidden_size
        g, u = (
            self._summed(part, terms, first, drawn)
            for part, drawn in zip((gate, up), normals[:2], strict=True)
        )
        g, u = ((self._store(part) if stored else part).double() for part in (g, u))
        hidden = eq.clamped_swiglu(g, u, self.config.swiglu_limit)
        return self._read(self._bf16(hidden, 1, stored, normals[2]), down.format).exact

    def experts(self, env: Env, batch: Batch) -> Written:
        """Routed experts, each on the tokens that chose it, from moe_in_q (T, D) Stored.

        Reads expert_ids (T, k) int64 and expert_weights (T, k) FP32.

        Returns
        -------
        routed : (T, D) FP32, BF16 values
        """
        x, ids, weights = env["moe_in_q"].exact, env["expert_ids"], env["expert_weights"].double()
        first, last = self.weights.experts_gate_up, self.weights.experts_down
        gate_up, down = matrix(first), matrix(last)
        width = self.config.moe_intermediate_size
        experts = torch.unique(ids).tolist()
        at = [torch.where(ids == expert) for expert in experts]  # expert by expert: (token, slot)
        counts = [len(token) for token, _ in at]
        # What acts on a row alone is done for all experts at once; each still has random numbers of its own.
        normals = self._normals(counts, (width, width, width, x.shape[-1]))
        gate, up = (
            torch.cat(
                [x[token] @ gate_up[expert][:, part] for expert, (token, _) in zip(experts, at, strict=True)]
            )
            for part in (slice(None, width), slice(width, None))
        )
        hidden = self._hidden(gate, up, first, last, normals[:3]).split(counts)
        y = torch.cat([rows @ down[expert] for expert, rows in zip(experts, hidden, strict=True)])
        y = self._summed(y, width, last, normals[3]).double()
        token, slot = (torch.cat(one) for one in zip(*at, strict=True))
        total = torch.zeros_like(x).index_add_(0, token, y * weights[token, slot, None])
        return {"routed": self._bf16(total, width)}

    def _normals(self, counts: Sequence[int], widths: Sequence[int]) -> list[Tensor | None]:
        """Random numbers of all experts, one tensor (rows, width) a width, drawn expert by expert."""
        drawn = [[self.dither.normals(count, width) for width in widths] for count in counts]
        columns = zip(*drawn, strict=True)
        return [torch.cat(column) if column[0] is not None else None for column in columns]

    def shared(self, env: Env, batch: Batch) -> Written:
        """The shared expert on moe_in, in the format of its own weights: shared (T, D) FP32, BF16 values."""
        w = self.weights
        x = self._second(env, "moe_in", w.experts_gate_up, w.shared_gate)
        hidden = self._hidden(
            x @ matrix(w.shared_gate), x @ matrix(w.shared_up), w.shared_gate, w.shared_down
        )
        y = self._summed(hidden @ matrix(w.shared_down), self.config.moe_intermediate_size, w.shared_down)
        return {"shared": self._store(y)}

    def moe_sum(self, env: Env, batch: Batch) -> Written:
        """routed, shared (T, D) FP32 to their sum: moe_out (T, D) FP32, BF16 values."""
        return {"moe_out": self._bf16(env["routed"].double() + env["shared"].double())}
