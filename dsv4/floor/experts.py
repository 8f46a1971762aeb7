"""The experts' stages: router, routed experts, the shared one."""

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

    def _ffn(
        self, x: Tensor, first: Weight, gate: Tensor, up: Tensor, down: Weight, down_matrix: Tensor
    ) -> Tensor:
        """One expert, its result before any store.

        Parameters
        ----------
        x : (T, D) FP64
        first : how its first matrix is stored; gate, up : (D, F) FP64
        down : what its input is stored for; down_matrix : its (F, D) FP64.

        Returns
        -------
        (T, D) FP64
        """
        stored = self.plan.casts.swiglu == "bf16"
        g, u = (self._summed(x @ part, x.shape[-1], first) for part in (gate, up))
        g, u = ((self._store(part) if stored else part).double() for part in (g, u))
        hidden = self._bf16(eq.clamped_swiglu(g, u, self.config.swiglu_limit), 1, when=stored)
        return self._read(hidden, down.format).exact @ down_matrix

    def experts(self, env: Env, batch: Batch) -> Written:
        """Routed experts, each on the tokens that chose it, from moe_in_q (T, D) Stored.

        Reads expert_ids (T, k) int64 and expert_weights (T, k) FP32.

        Returns
        -------
        routed : (T, D) FP32, BF16 values
        """
        x, ids, weights = env["moe_in_q"].exact, env["expert_ids"], env["expert_weights"].double()
        gate_up, down = matrix(self.weights.experts_gate_up), matrix(self.weights.experts_down)
        width = self.config.moe_intermediate_size
        total = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            token, slot = torch.where(ids == expert)
            matrices = gate_up[expert][:, :width], gate_up[expert][:, width:]
            stored = self.weights.experts_gate_up, self.weights.experts_down
            y = self._ffn(x[token], stored[0], *matrices, stored[1], down[expert])
            y = self._summed(y, width, stored[1]).double()
            total.index_add_(0, token, y * weights[token, slot, None])
        return {"routed": self._bf16(total, width)}

    def shared(self, env: Env, batch: Batch) -> Written:
        """The shared expert on moe_in, in the format of its own weights: shared (T, D) FP32, BF16 values."""
        w = self.weights
        y = self._ffn(
            self._second(env, "moe_in", w.experts_gate_up, w.shared_gate),
            w.shared_gate,
            matrix(w.shared_gate),
            matrix(w.shared_up),
            w.shared_down,
            matrix(w.shared_down),
        )
        return {"shared": self._store(self._summed(y, self.config.moe_intermediate_size, w.shared_down))}

    def moe_sum(self, env: Env, batch: Batch) -> Written:
        """routed, shared (T, D) FP32 to their sum: moe_out (T, D) FP32, BF16 values."""
        return {"moe_out": self._bf16(env["routed"].double() + env["shared"].double())}
