"""What every stage of one layer on kernels works with: native weights, plan, device, and what stages share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsv4.backend import products
from dsv4.backend.paths import check_stored
from dsv4.backend.products import Native, quantised, reads
from dsv4.backend.values import Fused, Packed
from dsv4.backend.weights import native_layer
from dsv4.model.config import ModelConfig
from dsv4.model.layer import Env, LayerBase, Written
from dsv4.model.numerics import Numerics
from dsv4.model.ops import REFS
from dsv4.model.weights import LayerWeights
from dsv4.plan import Plan
from kernels.formats import e2m1
from kernels.formats import nvfp4 as nvfp4_format
from kernels.fp8_quantise.ref import quantise as fp8_on_device
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.rmsnorm_quantise_nvfp4.ref import Form, Rows
from kernels.rope.ref import cos_sin

__all__ = ["Env", "KernelLayer", "Seen", "Written"]
BF16 = torch.bfloat16
T = TypeVar("T")
Seen = Callable[[str, int, Tensor], None]


class KernelLayer(LayerBase):
    """One layer under one plan, on one device.

    Parameters
    ----------
    layer, weights, config, numerics : as :class:`dsv4.model.layer.LayerBase`; ``weights`` stay where they are.
    plan : which kernels.
    device : where they run.
    seen : called with a name, the layer and a tensor that no tap shows (what SwiGLU clamps).

    Attributes
    ----------
    angles : cosines and sines (N, 32) FP32 of positions 0 to N on the device while a step of fixed shapes runs
        (:mod:`dsv4.backend.step`); else None.

    Raises
    ------
    NoKernelError
        A stored format that no kernel reads.
    """

    def __init__(
        self,
        layer: int,
        weights: LayerWeights,
        config: ModelConfig,
        numerics: Numerics,
        plan: Plan,
        device: torch.device,
        seen: Seen,
    ) -> None:
        super().__init__(layer, weights, config, numerics, REFS)
        check_stored(layer, weights, config)
        self.plan, self.device, self.seen = plan, device, seen
        self.native = native_layer(weights, config, device)
        self.fused = Fused()
        self._record = numerics.record
        self.angles: tuple[Tensor, Tensor] | None = None
        self._made: list[tuple[str, int, Tensor, Any]] = []

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotation of rows at ``positions``, on the device.

        Made on the CPU: FP64 cosines of a GPU may differ in the last bit. Or, where positions must not leave the
        device, read from :attr:`angles`, which were made so.
        """
        return self.once("cos_sin", positions, self._rotation)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.angles is not None:
            return self.angles[0][positions], self.angles[1][positions]
        cos, sin = cos_sin(positions.cpu(), self.frequencies)
        return cos.to(positions.device), sin.to(positions.device)

    def once(self, name: str, of: Tensor, make: Callable[[Tensor], T]) -> T:
        """``make(of)``, made once for all stages of the layer's attention that read it."""
        for made in self._made:
            if made[:2] == (name, of._version) and made[2] is of:
                return made[3]
        found = make(of)
        self._made.append((name, of._version, of, found))
        return found

    def in_bf16(self, x: Tensor) -> Tensor:
        """What the BF16 readers of a norm take."""
        # cast: exempt(the FP32 copy is the tap's, as the quantiser saw it; rounded once for all BF16 readers)
        return self.once("bf16", x, lambda x: x.to(BF16))

    def visible(self, positions: Tensor) -> Tensor:
        """Compressed entries that a token sees, (T,) int32."""
        ratio = self.config.compress_ratios[self.layer]
        return self.once("visible", positions, lambda positions: ((positions + 1) // ratio).int())

    @property
    def eps(self) -> float:
        """``rms_norm_eps``."""
        return self.config.rms_norm_eps

    @property
    def requantised(self) -> int:
        """Inputs that :meth:`read_also` quantises again."""
        native = self.native
        pairs = ((native.q_a, native.kv), (native.experts_gate_up, native.shared))
        return sum(reads(first) != reads(second) for first, second in pairs)

    def linear(self, x: Packed, weight: Native) -> Tensor:
        """(T, K) rows by a stored matrix, in BF16."""
        return products.linear(x.rows, weight)

    def stored_input(self, name: str, x: Tensor, form: Form, gsa: str | None = None) -> Packed:
        """Rows of ``x`` in a form: those made beside it, or by the quantiser alone; NVFP4 under the plan's gsa."""
        rows = self.fused.take(name, x)
        return self._quantised(x, form, gsa, rows if isinstance(rows, products.TYPES[form]) else None)

    def read_also(self, env: Env, name: str, first: Native, weight: Native) -> Packed:
        """Input ``name`` as its second reader takes it: the first's rows, or its own where the forms differ."""
        if reads(first) == reads(weight):
            return env[f"{name}_q"]
        return self._quantised(env[name], reads(weight), None, None)

    def _quantised(self, x: Tensor, form: Form, gsa: str | None, rows: Rows | None) -> Packed:
        how = {"fused_scalar_gsa": "scalar", "fused_launch_gsa": "launch"}.get(self.plan.norm_quant, "row")
        how = gsa or how
        if how == "launch":
            return Packed(_with_one_gsa(x) if form == "nvfp4" else fp8_on_device(x))
        rows = quantised(x, form) if rows is None else rows
        if how == "scalar" and isinstance(rows, Nvfp4Rows) and len(rows.gsa):
            rows = rows._replace(gsa=rows.gsa.amax().expand_as(rows.gsa).contiguous())
        return Packed(rows)


def _with_one_gsa(x: Tensor) -> Nvfp4Rows:
    """NVFP4 with the largest gsa of all rows in each, by the format's own torch functions on the device."""
    gsa = nvfp4_format.row_gsa(x)
    gsa = gsa.amax().expand_as(gsa) if gsa.numel() else gsa
    codes, scales, gsa = nvfp4_format.quantise(x, gsa)
    return Nvfp4Rows(e2m1.pack(codes, checked=False), scales, gsa.squeeze(-1).contiguous())
