"""Isolated mode: every stage of every layer gets the reference's inputs.

What a stage writes is shown to the probe, then the reference's value takes its place for the
next stage, choices (top-k, experts) included. So each difference belongs to the stage that
shows it. Stored forms (``Tap.replay`` False) stay the variant's own, made from the reference's
values: the reader of a cache must read what its own writer wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dsv4.dump import DumpReader
from dsv4.model.cache import Batch, Segment, SequenceCache
from dsv4.model.config import LayerKind, ModelConfig
from dsv4.model.layer import Stages
from dsv4.model.memory import Closed
from dsv4.model.transformer import Layer, Probe
from dsv4.run.rows import Rows
from dsv4.taps import BY_NAME, HISTORY, MODEL, PHASES

HISTORY_TAPS: dict[LayerKind, tuple[str, ...]] = {
    "window": ("kv",),
    "hca": ("attn_in", "kv", "comp"),
    "csa": ("attn_in", "kv", "comp", "index_k"),
}
FEEDS = {  # stage -> the stages whose stored form it reads; they run with it
    "q_a": ("attn_quant",),
    "kv": ("attn_quant",),
    "q_b": ("q_quant",),
    "index_score": ("index_k_store",),
    "attend": ("kv_store", "comp_store"),
    "experts": ("moe_quant",),
    "shared": ("moe_quant",),
}
CARRIED = frozenset(("compress", "index_k"))  # stages that keep a state between calls beside what they write
HISTORY_STAGES = frozenset(("kv_store", "compress", "comp_store", "index_k", "index_k_store"))


class Reference:
    """The ``trained`` reference of one prompt, as tensors.

    Parameters
    ----------
    dump : DumpReader
        ``reference/<prompt>.h5``.
    config : ModelConfig
    """

    def __init__(self, dump: DumpReader, config: ModelConfig) -> None:
        self._dump, self._config = dump, config
        self._read: dict[tuple[str, Layer, str], Tensor] = {}  # the floor asks for each tap in every draw
        self.tokens = torch.tensor(dump.attrs["tokens"], dtype=torch.int64)
        prefill, decode = (dump.rows("compounded", phase) for phase in PHASES)
        self.rows = Rows(prompt=len(self.tokens) - len(decode), prefill=prefill, decode=decode)

    def judged(self, layer: Layer, name: str) -> Tensor:
        """A row tap at the judged rows, prefill then decode."""
        return self._get("compounded", layer, name)

    def every_row(self, layer: int, name: str) -> Tensor:
        """A tap of :data:`HISTORY_TAPS` at every row or entry of the sequence."""
        return self._get(HISTORY, layer, name)

    def _get(self, mode: str, layer: Layer, name: str) -> Tensor:
        key = mode, layer, name
        if key not in self._read:
            phases = [phase for phase in PHASES if self._dump.has(mode, phase, layer, name)]
            if phases:
                self._read[key] = torch.cat(
                    [_tensor(self._dump, mode, phase, layer, name) for phase in phases]
                )
            else:  # no window of this layer has closed
                size = self._config.index_head_dim if name == "index_k" else self._config.head_dim
                self._read[key] = torch.empty(0, size)
        return self._read[key]


def _tensor(dump: DumpReader, mode: str, phase: str, layer: Layer, name: str) -> Tensor:
    value = torch.from_numpy(dump.get(mode, phase, layer, name))
    return value.long() if BY_NAME[name].kind == "ids" else value


class Model(Protocol):
    """What isolated mode drives: :class:`dsv4.model.transformer.Transformer`, or the noise floor's own."""

    @property
    def config(self) -> ModelConfig:
        """Sizes."""
        ...

    carries: ClassVar[bool]  # whether stages keep a state between calls

    @property
    def stages(self) -> Sequence[Stages]:
        """One per layer."""
        ...

    @property
    def head(self) -> Stages:
        """What follows the last layer."""
        ...

    def new_cache(self, window_capacity: int | None = None) -> SequenceCache:
        """Empty cache of one sequence."""
        ...


def run_isolated(
    model: Model,
    reference: Reference,
    streams: Tensor,
    probe: Callable[[Tensor], Probe],
    stages: frozenset[str] | None = None,
) -> None:
    """Run every stage on the reference's inputs and show ``probe`` what each writes.

    Stages of :data:`CARRIED` run as a decode runs them, the prompt and then token by token, so that their state
    passes from call to call.

    Parameters
    ----------
    model : Model
    reference : Reference
    streams : (rows, N, D) FP32
        Streams that enter layer 0 at the judged rows.
    probe : callable
        Positions of the rows at hand -> probe for what is written there (``Trace.at``).
    stages : names of the stages to run (and those of :data:`FEEDS`); None: all. A model that
        counts entries in its caches needs all.
    """
    if stages is not None:
        stages = stages.union(*(FEEDS.get(stage, ()) for stage in stages))
    total, rows = reference.rows.total, torch.from_numpy(reference.rows.all)
    cache = model.new_cache(window_capacity=total)
    every = Batch(torch.arange(total), reference.tokens, (Segment(cache, slice(0, total), 0),))
    pools = every.segments[0].pools
    judged = Batch(rows, reference.tokens[rows], (Segment(cache, slice(0, len(rows)), 0, pools),))
    for layer, layer_stages in enumerate(model.stages):
        history: dict[str, Any] = {
            name: reference.every_row(layer, name) for name in HISTORY_TAPS[model.config.kind(layer)]
        }
        known = dict(history)
        env = {"streams": streams if layer == 0 else reference.judged(layer - 1, "streams")}
        for stage in layer_stages.names:
            if stages is not None and stage not in stages:
                target, rows_at = (history, every) if stage in HISTORY_STAGES else (env, judged)
                _replay(reference, layer, stage, target, rows_at, probe(rows_at.positions), known)
            elif stage in HISTORY_STAGES:
                calls = reference.rows.calls if model.carries and stage in CARRIED else [slice(0, total)]
                written = _in_calls(layer_stages, stage, history, every, calls)
                _show(
                    written,
                    layer,
                    history,
                    probe(every.positions),
                    lambda _, name, known=known: known[name],
                )
            else:
                written = layer_stages.run(stage, env, judged)
                _show(written, layer, env, probe(judged.positions), reference.judged)
    env = {"streams": reference.judged(model.config.num_hidden_layers - 1, "streams")}
    for stage in model.head.names:
        if stages is None or stage in stages:
            _show(model.head.run(stage, env, judged), MODEL, env, probe(judged.positions), reference.judged)
        else:
            _replay(reference, MODEL, stage, env, judged, probe(judged.positions), {})


def _in_calls(
    stages: Stages, stage: str, env: Mapping[str, Any], batch: Batch, calls: Sequence[slice]
) -> dict[str, Any]:
    """What one stage writes over the rows of one sequence, given to it in several calls."""
    if len(calls) == 1:
        return stages.run(stage, env, batch)
    (whole,) = batch.segments
    found: dict[str, list[Any]] = {}
    for rows in calls:
        segment = Segment(whole.cache, slice(0, rows.stop - rows.start), rows.start, whole.pools)
        part = Batch(batch.positions[rows], batch.tokens[rows], (segment,))
        for name, value in stages.run(stage, {"attn_in": env["attn_in"][rows]}, part).items():
            found.setdefault(name, []).append(value)
    return {name: _joined(values) for name, values in found.items()}


def _joined(values: list[Any]) -> Any:
    """Rows of several calls one after the other, or the runs of entries that these closed."""
    if isinstance(values[0], tuple):
        return tuple(run for runs in values for run in runs)
    return torch.cat(values) if isinstance(values[0], Tensor) else type(values[0]).cat(values)


def _show(
    written: Mapping[str, Any],
    layer: Layer,
    env: dict[str, Any],
    probe: Probe,
    truth: Callable[[Layer, str], Tensor],
) -> None:
    """Show what a stage wrote, then put the reference's values in their place."""
    for name, value in written.items():
        seen = probe(layer, name, value)
        env[name] = truth(layer, name) if name in BY_NAME and BY_NAME[name].replay else seen


def _replay(
    reference: Reference,
    layer: Layer,
    stage: str,
    env: dict[str, Any],
    batch: Batch,
    probe: Probe,
    known: Mapping[str, Tensor],
) -> None:
    """Skip a stage: the reference's values stand for what it would write."""
    for tap in BY_NAME.values():
        if tap.stage != stage or not tap.replay:
            continue
        if tap.axis == "row":
            env[tap.name] = reference.judged(layer, tap.name)
            continue
        env[tap.name] = known[tap.name]
        name = {"comp": "comp_closed", "index_k": "index_closed"}[tap.name]
        env[name] = probe(layer, name, (Closed(batch.segments[0], 0, len(known[tap.name])),))
