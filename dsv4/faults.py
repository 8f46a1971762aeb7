"""Faults that can be planted into a run, so that the audit can be proved to catch and name them.

Each entry retells a kind of real-world report: what goes wrong, in which layer and stage it must
be found. A fault changes a value that a stage writes, or the stage itself; the taps only read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.model.cache import Batch
from dsv4.model.records import Record
from dsv4.model.transformer import Layer, Probe, Transformer
from dsv4.run.forward import Seen
from dsv4.run.modes import Wrap
from kernels.matmul.ref import exact_sum


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault.

    Attributes
    ----------
    kind : of the table of real-world faults.
    what : in a few words.
    layer, stage : where the audit must find it.
    tap : name of the written value that ``value`` changes; None when ``model`` acts alone.
    value : (value) -> the faulty one.
    model : changes the model in place.
    """

    kind: str
    what: str
    layer: int
    stage: str
    tap: str | None = None
    value: Callable[[Any], Any] | None = None
    model: Callable[[Transformer, int], None] | None = None

    def install(self, model: Transformer) -> Wrap:
        """Plant the fault into ``model``; returns what to put around its probes."""
        if self.model is not None:
            self.model(model, self.layer)
        return self._wrap

    def _wrap(self, seen: Seen) -> Seen:
        def around(positions: Tensor) -> Probe:
            probe = seen(positions)

            def faulty(layer: Layer, name: str, value: Any) -> Any:
                hit = self.value is not None and layer == self.layer and name == self.tap
                return probe(layer, name, self.value(value) if hit and self.value else value)

            return faulty

        return around


@dataclass(frozen=True)
class RolledScales:
    """A record whose writer puts each row's scale bytes beside the next row's data."""

    inner: Record

    @property
    def data_bytes(self) -> int:
        """See :class:`dsv4.model.records.Record`."""
        return self.inner.data_bytes

    @property
    def scale_bytes(self) -> int:
        """See :class:`dsv4.model.records.Record`."""
        return self.inner.scale_bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode, then roll the scales by one token."""
        data, scales = self.inner.encode(x)
        return data, scales.roll(1, dims=0)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :class:`dsv4.model.records.Record`."""
        return self.inner.decode(data, scales)


def _logits_without_relu(
    q: Tensor, k: Tensor, weights: Tensor, *, key_scale: Tensor | None = None, narrow: bool = False
) -> Tensor:
    dots = torch.einsum("thd,cd->thc", q.double(), k.double())
    scores = exact_sum(dots * weights.double()[..., None], dim=1)
    return (scores if key_scale is None else scores * key_scale.double()).float()


def _drop_relu(model: Transformer, layer: int) -> None:
    stages = model.stages[layer]
    stages.ops = replace(stages.ops, index_logits=_logits_without_relu)


def _drop_sink(model: Transformer, layer: int) -> None:
    stages = model.stages[layer]
    stages.weights = replace(stages.weights, sinks=torch.full_like(stages.weights.sinks, -torch.inf))


def _roll_scales(model: Transformer, layer: int) -> None:
    stages = model.stages[layer]
    record = RolledScales(stages.numerics.record)
    stages.numerics = replace(stages.numerics, record=record)


def _forget_the_window_before(model: Transformer, layer: int) -> None:
    """A decode step starts with an empty half-window: right in prefill, wrong from the first token on."""
    stages, run = model.stages[layer], model.stages[layer].run

    def forgetful(stage: str, env: Any, batch: Batch) -> dict[str, Any]:
        if stage == "compress":
            for segment in batch.segments:
                tail = segment.cache.layers[layer].tails.get("compressor")
                if tail is not None and segment.rows.stop - segment.rows.start == 1:
                    ratio = stages.config.compress_ratios[layer]
                    tail.kv[:ratio], tail.gate[:ratio] = 0.0, -torch.inf
        return run(stage, env, batch)

    stages.run = forgetful  # type: ignore[method-assign]


FAULTS: dict[str, Fault] = {
    "norm_gain": Fault(
        kind="constant gain",
        what="norm output x 1.05",
        layer=3,
        stage="attn_mhc",
        tap="attn_in",
        value=lambda x: x * 1.05,
    ),
    "comb_transposed": Fault(
        kind="mHC structure",
        what="comb transposed",
        layer=5,
        stage="attn_mhc",
        tap="attn_comb",
        value=lambda comb: comb.transpose(1, 2).contiguous(),
    ),
    "no_relu": Fault(
        kind="indexer score semantics",
        what="no ReLU in the indexer",
        layer=4,
        stage="index_score",
        model=_drop_relu,
    ),
    "sink_dropped": Fault(
        kind="sink, LSE, denominator",
        what="sink dropped",
        layer=2,
        stage="attend",
        model=_drop_sink,
    ),
    "half_window_lost": Fault(
        kind="compressor state",
        what="the window before is lost at each decode step",
        layer=4,
        stage="compress",
        model=_forget_the_window_before,
    ),
    "scales_rolled": Fault(
        kind="cache writer and reader disagree on layout",
        what="KV scale bytes rolled by one token",
        layer=6,
        stage="kv_store",
        model=_roll_scales,
    ),
}
