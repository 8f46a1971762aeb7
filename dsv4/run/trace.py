"""Collect taps while a model runs, and write them to a dump."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.dump import DumpWriter, to_bf16_bits
from dsv4.model.config import ModelConfig
from dsv4.model.memory import Closed
from dsv4.model.transformer import Layer
from dsv4.run.forward import CLOSED_BY
from dsv4.run.rows import Rows
from dsv4.taps import BY_NAME, MODEL, PHASES, Tap, layer_taps

MODEL_TAPS = ("hidden", "logits")


def tap_names(config: ModelConfig, mode: str) -> dict[Layer, tuple[str, ...]]:
    """Taps that a dump of ``mode`` holds, by layer."""
    layers: dict[Layer, tuple[str, ...]] = {
        layer: tuple(tap.name for tap in layer_taps(ratio, mode))
        for layer, ratio in enumerate(config.compress_ratios)
    }
    return layers | {MODEL: MODEL_TAPS}


class Trace:
    """A probe that keeps the judged rows and entries of chosen taps; it only reads.

    Parameters
    ----------
    config : ModelConfig
    rows : Rows
    kept : layer -> names of the taps to keep.
    every_row : keep every row and entry, not only the judged ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: Rows,
        kept: Mapping[Layer, Collection[str]],
        *,
        every_row: bool = False,
    ) -> None:
        self.rows, self.config, self.kept, self.every_row = rows, config, kept, every_row
        self.positions = np.empty(0, np.int64)
        self.values: dict[tuple[Layer, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        self._entries: dict[tuple[Layer, str], np.ndarray] = {}
        self._kept_rows: dict[bytes, np.ndarray] = {}  # positions -> which of them are kept

    def at(self, positions: Tensor) -> "Trace":
        """Say which positions the rows of the next calls have."""
        self.positions = positions.cpu().numpy()
        return self

    def __call__(self, layer: Layer, name: str, value: Any) -> Any:
        """Keep the judged part of ``value``; see :data:`dsv4.model.transformer.Probe`."""
        if name.endswith("_closed"):
            indices = [closed.entries for closed in value if isinstance(closed, Closed)]
            self._entries[layer, name] = torch.cat(indices).cpu().numpy()
        elif name in self.kept[layer]:
            self._keep(layer, BY_NAME[name], value)
        return value

    def _keep(self, layer: Layer, tap: Tap, value: Any) -> None:
        tensor = (value if isinstance(value, Tensor) else value.dequantised()).cpu()
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        if tap.axis == "row":
            positions, judged = self.positions, self.rows.all
        else:
            assert isinstance(layer, int)
            ratio = self.config.compress_ratios[layer]
            index = self._entries[layer, CLOSED_BY.get(tap.name, "index_closed")]
            positions, judged = (index + 1) * ratio - 1, (self.rows.entries(ratio) + 1) * ratio - 1
        if self.every_row:
            mask = np.ones(len(positions), bool)
        elif tap.axis == "row":
            known = positions.tobytes()
            mask = self._kept_rows.get(known)
            if mask is None:
                mask = self._kept_rows[known] = np.isin(positions, judged)
        else:
            mask = np.isin(positions, judged)
        if mask.any():
            self.values[layer, tap.name].append((positions[mask], array[mask]))

    def get(self, layer: Layer, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Positions (N,) and values (N, ...) of a tap, ascending by position."""
        kept = self.values[layer, name]
        positions = _joined([positions for positions, _ in kept])
        arrays = [array for _, array in kept]
        if BY_NAME[name].kind == "scores":
            assert isinstance(layer, int)
            width = int(max(at.max(initial=-1) for at, _ in kept) + 1) // self.config.compress_ratios[layer]
            arrays = [_columns(array, width) for array in arrays]
        values = _joined(arrays)
        if (np.diff(positions) >= 0).all():
            return positions, values
        order = np.argsort(positions, kind="stable")
        return positions[order], values[order]

    def taps(self) -> list[tuple[Layer, str]]:
        """Everything kept, in layer order then tap order."""
        names = list(BY_NAME)
        rank = {layer: index for index, layer in enumerate(self.kept)}
        return sorted((key for key in self.values), key=lambda key: (rank[key[0]], names.index(key[1])))


def by_phase(
    positions: np.ndarray, values: np.ndarray, prompt: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Cut a tap into phases, without copying; a part may have no rows.

    Parameters
    ----------
    positions : (N,) int64, ascending.
    values : (N, ...).
    prompt : tokens of the prompt: the first position that is decoded.

    Yields
    ------
    phase, its positions, its values
    """
    cut = int(np.searchsorted(positions, prompt))
    for phase, part in zip(PHASES, (slice(cut), slice(cut, None)), strict=True):
        yield phase, positions[part], values[part]


def write_trace(
    writer: DumpWriter,
    mode: str,
    trace: Trace,
    attrs: Mapping[tuple[str, Layer, str], Mapping[str, Any]] | None = None,
) -> None:
    """Write a trace under ``mode``, split into prefill and decode.

    Parameters
    ----------
    attrs : (phase, layer, tap) -> dataset attributes.
    """
    split = trace.rows.prompt
    judged = np.arange(trace.rows.total) if trace.every_row else trace.rows.all
    for phase in PHASES:
        inside = judged < split if phase == "prefill" else judged >= split
        writer.rows(mode, phase, judged[inside])
    for layer, name in trace.taps():
        for phase, positions, values in by_phase(*trace.get(layer, name), split):
            entry = BY_NAME[name].axis == "entry"
            if entry and not len(positions):
                continue
            stored, dtype = storable(values, BY_NAME[name])
            writer.put(
                mode,
                phase,
                layer,
                name,
                stored,
                dtype,
                entry_positions=positions if entry else None,
                attrs=(attrs or {}).get((phase, layer, name)),
            )


def storable(values: np.ndarray, tap: Tap) -> tuple[np.ndarray, str]:
    """Narrowest lossless storage of a tap: its array and the dump's dtype name."""
    if tap.kind == "bytes":
        return values, "u8"
    if tap.kind == "ids":
        return values.astype(np.int32), "i32"
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return to_bf16_bits(values), "bf16"
    return values, "f32"


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _columns(scores: np.ndarray, width: int) -> np.ndarray:
    """Scores (rows, C) with exactly ``width`` entries: those that no row sees are -inf anyway."""
    missing = max(width - scores.shape[1], 0)
    return np.pad(scores, ((0, 0), (0, missing)), constant_values=-np.inf)[:, :width]
