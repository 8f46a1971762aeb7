"""The op table with FP32 accumulation's noise on every result, before that is stored.

The refs sum exactly and round once, so two of their runs of one plan are the same run. Any other
correct implementation sums in FP32, in an order of its own, and its values differ by what
:class:`dsv4.floor.dither.Dither` draws. Here that noise meets each op's result before the op's
rounding point: a plan that keeps a value in registers stores it nowhere, and the noise stays in
it; a plan that stores it in BF16 rounds most of the noise away.

The ops are ``kernels/<op>``'s refs: what is drawn is how far a free run wanders, not whether the
ops are right. That is judged in isolated mode, by :mod:`dsv4.floor`, which shares nothing with them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.floor.dither import Dither
from dsv4.model.ops import Ops
from kernels.grouped_ffn.ref import EQUATIONS as FFN_EQUATIONS
from kernels.grouped_ffn.ref import FfnRounding
from kernels.linear.ref import Activation, Weight
from kernels.rounding import Round, exact
from kernels.sparse_attn.ref import EQUATIONS as ATTN_EQUATIONS
from kernels.sparse_attn.ref import AttnRounding


def with_noise(ops: Ops, dither: Dither) -> Ops:
    """The same ops, their FP32 results dithered before they are stored.

    Choices, sums of two stored values and divisions by powers of two come out alike in any correct
    implementation, so they are left as they are.

    Parameters
    ----------
    ops : Ops
    dither : Dither
        Without a seed every result keeps its bits.
    """
    noisy = _Noisy(ops, dither)
    return replace(
        ops,
        rmsnorm=noisy.rmsnorm,
        linear=noisy.linear,
        grouped_linear=noisy.grouped_linear,
        hc_mix=noisy.hc_mix,
        hc_collapse=noisy.hc_collapse,
        hc_expand=noisy.hc_expand,
        hc_head_collapse=noisy.hc_head_collapse,
        compress_pool=noisy.compress_pool,
        index_logits=noisy.index_logits,
        sparse_attn=noisy.sparse_attn,
        router_scores=noisy.router_scores,
        expert_weights=noisy.expert_weights,
        grouped_ffn=noisy.grouped_ffn,
        dense_ffn=noisy.dense_ffn,
    )


@dataclass(frozen=True)
class _Noisy:
    """Each method is the op of its name; shapes are the ref's. ``terms`` is what the op sums a value from."""

    ops: Ops
    dither: Dither

    def _single(self, x: Tensor, terms: int) -> Tensor:
        return self.dither(x.double(), terms).float()

    def _before(self, store: Round, terms: int) -> Round:
        """A rounding point whose value comes out of a sum of ``terms`` FP32 products."""
        return lambda x: store(self._single(x, terms))

    def rmsnorm(self, x: Tensor, weight: Tensor | None, *, eps: float, out: Round = exact) -> Tensor:
        return self.ops.rmsnorm(x, weight, eps=eps, out=self._before(out, x.shape[-1]))

    def linear(self, x: Activation, weight: Weight, *, out: Round = exact) -> Tensor:
        return self.ops.linear(x, weight, out=self._before(out, x.values.shape[-1]))

    def grouped_linear(self, x: Activation, weight: Weight, *, out: Round = exact) -> Tensor:
        return self.ops.grouped_linear(x, weight, out=self._before(out, weight.values.shape[-2]))

    def hc_mix(
        self, streams: Tensor, *weights: Tensor, iterations: int, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = self.ops.hc_mix(streams, *weights, iterations=iterations, **options)
        logits, sums = streams[0].numel(), streams.shape[1] * iterations
        # Sinkhorn divides out of comb most of what its logits bring; what stays is the size of its own sums' noise.
        return self._single(pre, logits), self._single(post, logits), self._single(comb, sums)

    def hc_collapse(self, streams: Tensor, pre: Tensor, *, out: Round = exact) -> Tensor:
        return self.ops.hc_collapse(streams, pre, out=self._before(out, streams.shape[1]))

    def hc_expand(self, streams: Tensor, *mix: Tensor, out: Round = exact) -> Tensor:
        return self.ops.hc_expand(streams, *mix, out=self._before(out, streams.shape[1]))

    def hc_head_collapse(
        self, streams: Tensor, *weights: Tensor, out: Round = exact, **options: Any
    ) -> Tensor:
        return self.ops.hc_head_collapse(
            streams, *weights, out=self._before(out, streams[0].numel()), **options
        )

    def compress_pool(self, kv: Tensor, gate: Tensor) -> Tensor:
        return self._single(self.ops.compress_pool(kv, gate), kv.shape[1])

    def index_logits(self, q: Tensor, *keys: Tensor, **options: Any) -> Tensor:
        return self._single(self.ops.index_logits(q, *keys, **options), q.shape[-1])

    def sparse_attn(
        self,
        q: Tensor,
        pool: Tensor,
        idx: Tensor,
        sinks: Tensor,
        *,
        at: AttnRounding = ATTN_EQUATIONS,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        p_nope = self._probability(at.p_nope, q.shape[-1])
        p_rope = p_nope if at.p_rope is at.p_nope else self._probability(at.p_rope, q.shape[-1])
        noisy = replace(at, p_nope=p_nope, p_rope=p_rope, out=self._before(at.out, idx.shape[-1]))
        out, lse = self.ops.sparse_attn(q, pool, idx, sinks, at=noisy, **options)
        return out, self._single(lse, 1)

    def _probability(self, store: Round, terms: int) -> Round:
        """``p = e^l``, and l comes out of a sum of ``terms`` products: p moves by its size times l's error."""

        def point(p: Tensor) -> Tensor:
            wide = p.double()
            logits = torch.where(p > 0, p, 1.0).log().double()
            return store(torch.addcmul(wide, wide, self.dither(logits, terms) - logits).float())

        return point

    def router_scores(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._single(self.ops.router_scores(x, weight), x.shape[-1])

    def expert_weights(self, scores: Tensor, ids: Tensor, **options: Any) -> Tensor:
        return self._single(self.ops.expert_weights(scores, ids, **options), 1)

    def grouped_ffn(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        at: FfnRounding = FFN_EQUATIONS,
        **options: Any,
    ) -> Tensor:
        return self.ops.grouped_ffn(x, ids, weights, gate_up, down, at=self._expert(at, x, down), **options)

    def dense_ffn(
        self,
        x: Activation,
        gate: Weight,
        up: Weight,
        down: Weight,
        *,
        at: FfnRounding = FFN_EQUATIONS,
        **options: Any,
    ) -> Tensor:
        return self.ops.dense_ffn(x, gate, up, down, at=self._expert(at, x, down), **options)

    def _expert(self, at: FfnRounding, x: Activation, down: Weight) -> FfnRounding:
        return replace(
            at,
            gate_up=self._before(at.gate_up, x.values.shape[-1]),
            hidden=self._before(at.hidden, 1),
            out=self._before(at.out, down.values.shape[-2]),
        )
