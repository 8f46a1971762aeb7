"""One layer on kernels: the stages of :mod:`dsv4.model.stages`, each by the kernels that the plan names.

Fused kernels write two taps' values in one launch; see :class:`dsv4.backend.values.Fused` for when the second is
used. Values that a fused kernel keeps in registers are :class:`~dsv4.backend.values.Pending`, or an FP32 copy where
the kernel offers one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4.backend import attention, compressed, experts, products
from dsv4.backend.layer import Env, KernelLayer, Written
from dsv4.backend.products import quantised, reads
from dsv4.model.cache import Batch
from dsv4.model.numerics import Numerics
from dsv4.model.ops import REFS
from dsv4.model.stages import LayerStages
from dsv4.model.weights import HyperWeights
from kernels.hc import kernel as hc
from kernels.mhc_rmsnorm_quantise_nvfp4.kernel import mhc_rmsnorm_quantise
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rmsnorm_quantise_nvfp4.kernel import rmsnorm_quantise
from kernels.rmsnorm_quantise_nvfp4.ref import Form

BF16, FP32 = torch.bfloat16, torch.float32


class _Env(Mapping[str, Any]):
    """Named values, tensors moved as they are read."""

    def __init__(self, env: Env, move: Callable[[Any], Any]) -> None:
        self._env, self._move = env, move

    def __getitem__(self, name: str) -> Any:
        return self._move(self._env[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)


class KernelLayerStages(KernelLayer, LayerStages):
    """The stages of one layer; arguments as :class:`dsv4.backend.layer.KernelLayer`."""

    def __init__(self, *of_the_layer: Any) -> None:
        super().__init__(*of_the_layer)
        self._functions = self._by_kernels()

    def _by_kernels(self) -> dict[str, Callable[[Env, Batch], Written]]:
        native = self.native
        ours = {
            "attn_mhc": lambda env, _: self.block_input(
                "attn", env["streams"], native.attn_hc, native.input_norm, reads(native.q_a)
            ),
            "attn_quant": lambda env, _: {
                "attn_in_q": self.stored_input("attn_in", env["attn_in"], reads(native.q_a))
            },
            "q_a": self._q_a_kernel,
            "q_quant": lambda env, _: {
                "qr_q": self.stored_input("qr", env["qr"], reads(native.q_b), gsa="row")
            },
            "attn_proj": self._proj,
            "attn_mix": lambda env, _: {
                "streams_mid": self.mixed("attn", env, env["streams"], env["attn_proj"])
            },
            "moe_mhc": lambda env, _: self.block_input(
                "moe", env["streams_mid"], native.ffn_hc, native.post_norm, reads(native.experts_gate_up)
            ),
            "moe_quant": lambda env, _: {
                "moe_in_q": self.stored_input("moe_in", env["moe_in"], reads(native.experts_gate_up))
            },
            "moe_mix": lambda env, _: {"streams": self.mixed("moe", env, env["streams_mid"], env["moe_out"])},
        }
        others = {**attention.STAGES, **compressed.STAGES, **experts.STAGES}
        return ours | {
            name: lambda env, batch, run=run: run(self, env, batch) for name, run in others.items()
        }

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """See :meth:`dsv4.model.stages.LayerStages.run`; inputs may be on any device."""
        if self.ops is not REFS or self.numerics.record is not self._record:
            raise RuntimeError("ops and records of the refs were swapped, which kernels do not run: use refs")
        rows = Batch(batch.positions.to(self.device), batch.tokens.to(self.device), batch.segments)
        written = self._functions[stage](_Env(env, self._here), rows)
        if stage == "attend":  # the last that reads what is kept
            self._made.clear()
        return written

    def _here(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def block_input(
        self, site: str, streams: Tensor, weights: HyperWeights, norm: Tensor, form: Form
    ) -> Written:
        """Streams to mHC's weights and ``<site>_in`` (T, D): BF16 unfused, else an FP32 copy beside its rows."""
        config, plan, name = self.config, self.plan, f"{site}_in"
        pre, post, comb = hc.mix(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            norm_eps=self.eps,
            hc_eps=config.hc_eps,
            iterations=config.hc_sinkhorn_iters,
        )
        written = {f"{site}_pre": pre, f"{site}_post": post, f"{site}_comb": comb}
        if plan.mhc_quant == "fused":
            rows, copy = mhc_rmsnorm_quantise(streams, pre, norm, eps=self.eps, form=form, copy=FP32)
        else:
            x = hc.collapse(streams, pre, dtype=BF16)
            if plan.norm_quant in ("unfused", "fused_launch_gsa"):
                # one gsa of all rows is known after the last norm only, so that leaf's quantiser is apart
                wide = plan.norm_quant == "fused_launch_gsa"
                return written | {name: rmsnorm(x, norm, eps=self.eps, dtype=FP32 if wide else BF16)}
            rows, copy = rmsnorm_quantise(x, norm, eps=self.eps, form=form, copy=FP32)
        self.fused.keep(name, copy, rows)
        return written | {name: copy}

    def _q_a_kernel(self, env: Env, batch: Batch) -> Written:
        qr = self.linear(env["attn_in_q"], self.native.q_a)
        if self.plan.q_a_norm == "unfused":
            return {"qr": rmsnorm(qr, self.native.q_a_norm, eps=self.eps)}
        form = reads(self.native.q_b)
        rows, copy = rmsnorm_quantise(qr, self.native.q_a_norm, eps=self.eps, form=form, copy=FP32)
        self.fused.keep("qr", copy, rows)
        return {"qr": copy}

    def _proj(self, env: Env, batch: Batch) -> Written:
        o_a, o_b = self.native.o_a, self.native.o_b
        low_rank = products.grouped(quantised(env["attn_out"].flatten(1), reads(o_a)), o_a)
        return {"attn_proj": products.linear(quantised(low_rank, reads(o_b)), o_b)}

    def mixed(self, site: str, env: Env, streams: Tensor, y: Tensor) -> Tensor:
        """Next streams (T, N, D), BF16 or FP32 by the plan's residual."""
        dtype = residual_dtype(self.numerics, self.layer)
        new = hc.expand(streams, y, env[f"{site}_post"], env[f"{site}_comb"], dtype=dtype)
        self.seen("streams", self.layer, new)
        return new


def residual_dtype(numerics: Numerics, layer: int) -> torch.dtype:
    """How a layer's streams are stored."""
    between = torch.tensor(1.0 + 2.0**-12)
    return BF16 if float(numerics.residual(layer)(between)) == 1.0 else FP32
