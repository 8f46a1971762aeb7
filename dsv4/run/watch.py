"""What a run reaches on its way, counted as values pass."""

from dataclasses import replace

from torch import Tensor

from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from kernels.rounding import Round


class Watch:
    """Count what a run reaches as values pass their rounding points; it changes none of them.

    Attributes
    ----------
    hits, total : gate and up values beyond SwiGLU's clamp, and all of them: a clamp that is
        never reached is not exercised.
    peaks : largest magnitude of the streams, by layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.limit, self.hits, self.total = config.swiglu_limit, 0, 0
        self.peaks = [0.0] * config.num_hidden_layers

    def over(self, num: Numerics) -> Numerics:
        """Return the same numerics, watched."""
        store, residual = num.ffn.gate_up, num.residual

        def gate_up(x: Tensor) -> Tensor:
            self.look("gate_up", -1, x)
            return store(x)

        def streams(layer: int) -> Round:
            def point(x: Tensor) -> Tensor:
                self.look("streams", layer, x)
                return residual(layer)(x)

            return point

        return replace(num, ffn=replace(num.ffn, gate_up=gate_up), residual=streams)

    def look(self, name: str, layer: int, x: Tensor) -> None:
        """See gate and up values (kernels show the shared expert's alone), or the streams of a layer."""
        if name == "gate_up":
            self.hits += int((x.abs() > self.limit).sum())
            self.total += x.numel()
        elif x.numel():
            self.peaks[layer] = max(self.peaks[layer], float(x.abs().max()))
