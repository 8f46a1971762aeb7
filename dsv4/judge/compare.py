"""Two dumps -> rows of the metrics table, one a (mode, phase, layer, tap, part).

Layers whose taps have one shape are stacked and measured together. Tensors that are equal in
every bit are recognised first and not measured.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dsv4.dump import DumpReader
from dsv4.dump_reader import widened
from dsv4.judge import metrics
from dsv4.judge.metrics import Array
from dsv4.judge.parts import SCALE, Stack, measure, scale_columns, steps
from dsv4.stored import same_bytes
from dsv4.taps import BY_NAME, MODEL, PHASES, Tap

N_ROPE = 64
KEY = ("variant", "mode", "phase", "prompt", "layer", "tap", "part", "against")
NUMBERS = (*(name for name in metrics.VALUES if name != "worst_index"), *metrics.LOGITS, *metrics.CHOICES)
COLUMNS = (*KEY, "step", "rows", "elements", "equal", "worst_row", *NUMBERS, "verdict", "excess")
STEPPED = ("attn_out", "moe_out", "logits")  # measured step by step too, in the free run against `trained`


class CompareError(ValueError):
    """Two dumps that cannot be compared; names both."""


@dataclass
class Table:
    """Rows in the making: blocks of columns, joined once at the end."""

    blocks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, size: int, key: dict[str, Any], columns: dict[str, Any]) -> None:
        """Append ``size`` rows; what a block does not give is NaN or empty."""
        self.blocks.append({"size": size, **key, **columns})

    def frame(self) -> pd.DataFrame:
        """All rows, with :data:`COLUMNS`."""
        blanks = dict.fromkeys(NUMBERS, np.nan) | {
            "excess": np.nan,
            "verdict": "",
            "equal": False,
            "step": -1,
        }
        sizes = np.array([block["size"] for block in self.blocks], int)
        names = (*COLUMNS, *(name for name in SCALE if any(name in block for block in self.blocks)))
        return pd.DataFrame({name: self._column(name, sizes, blanks.get(name, 0)) for name in names})

    def _column(self, name: str, sizes: Array, blank: Any) -> Any:
        cells = [block.get(name, blank) for block in self.blocks]
        if all(np.ndim(cell) == 0 for cell in cells):
            column = np.repeat(np.array(cells, dtype=object if isinstance(blank, str) else None), sizes)
        else:
            column = np.concatenate(
                [c if np.ndim(c) else np.full(size, c) for c, size in zip(cells, sizes, strict=True)]
            )
        return column


def compare(
    test: DumpReader,
    reference: DumpReader,
    *,
    modes: tuple[str, ...],
    against: str,
    only: frozenset[str] | None = None,
) -> pd.DataFrame:
    """Measure every tap that both dumps hold.

    Parameters
    ----------
    test : the variant's dump.
    reference : the other side; against ``trained`` and ``plain`` a tap is compared with the
        tap that it names as its reference, against others with the tap of its own name.
    modes : modes of ``test`` to measure.
    against : label of the other side.
    only : taps to measure; None for all.

    Raises
    ------
    CompareError
        Row positions or shapes differ; names both dumps and what was found.
    """
    table, n_rope = Table(), int(test.attrs.get("n_rope", N_ROPE))
    shared = {"variant": test.attrs["variant"], "prompt": test.attrs["prompt_id"], "against": against}
    for mode in modes:
        for phase in PHASES:
            check_rows(test, reference, mode, phase)
            for stack in _stacks(test, reference, mode, phase, against in ("trained", "plain"), only):
                key = {
                    **shared,
                    "mode": mode,
                    "phase": phase,
                    "layer": np.array(stack.layers),
                    "tap": stack.tap.name,
                }
                if against == "floor":
                    key |= scale_columns(stack)
                for part, columns in measure(stack, n_rope):
                    table.add(len(stack.layers), key | {"part": part}, columns)
                if (mode, phase, against) == (
                    "compounded",
                    "decode",
                    "trained",
                ) and stack.tap.name in STEPPED:
                    table.add(*steps(stack, key))
    return table.frame()


def check_rows(test: DumpReader, reference: DumpReader, mode: str, phase: str) -> None:
    """Refuse dumps whose rows are not the same tokens: every number would be about two things."""
    ours, theirs = test.rows(mode, phase), reference.rows(mode, phase)
    if np.array_equal(ours, theirs):
        return
    size = min(len(ours), len(theirs))
    at = int(np.argmax(ours[:size] != theirs[:size])) if (ours[:size] != theirs[:size]).any() else size
    sides = [f"{rows[at]}" if at < len(rows) else "nothing" for rows in (ours, theirs)]
    raise CompareError(
        f"{mode}/{phase}: row {at} is token {sides[0]} in {test.path} ({len(ours)} rows) but {sides[1]} in"
        f" {reference.path} ({len(theirs)} rows); both must dump the same rows: delete the stale one and run again"
    )


def _stacks(
    test: DumpReader, reference: DumpReader, mode: str, phase: str, mapped: bool, only: frozenset[str] | None
) -> Iterator[Stack]:
    groups: dict[tuple[Any, ...], list[tuple[int, Array, Array]]] = defaultdict(list)
    places: dict[tuple[Any, ...], tuple[Array, tuple[Array | None, int]]] = {}
    contexts: dict[tuple[Any, ...], list[Array]] = defaultdict(list)
    for layer in test.layers(mode, phase):
        for name in test.taps(mode, phase, layer):
            tap = BY_NAME[name]
            other = tap.reference if mapped else name
            if other is None or (only and name not in only) or not reference.has(mode, phase, layer, other):
                continue
            ours = test.raw(mode, phase, layer, name)
            same = other == name and test.shares(reference, mode, phase, layer, name)
            theirs = ours if same else reference.raw(mode, phase, layer, other)
            equal = same or same_bytes(ours, theirs)
            x = widened(ours)
            y = x if same else widened(theirs)
            if tap.kind not in ("ids", "bytes") and x.shape != y.shape:
                raise CompareError(
                    f"{mode}/{phase}/{layer}: {name} is {x.shape} in {test.path}, {other} is {y.shape} in"
                    f" {reference.path}; same checkpoint, other sizes: delete the stale dump and run again"
                )
            at = test.entry_positions(mode, phase, layer) if tap.axis == "entry" else test.rows(mode, phase)
            scores, width = _context(reference, mode, phase, layer, tap)
            key = (tap, equal, x.shape, y.shape, at.tobytes(), scores is not None and scores.shape, width)
            groups[key].append((-1 if layer == MODEL else int(layer), x, y))
            places[key] = at, (None, width)
            if scores is not None:
                contexts[key].append(scores)
    for key, found in groups.items():
        layers, tests, references = zip(*found, strict=True)
        at, (_, width) = places[key]
        scores = np.stack(contexts[key]) if contexts[key] else None
        test_stack = np.stack(tests)
        reference_stack = test_stack if key[1] else np.stack(references)
        yield Stack(key[0], layers, test_stack, reference_stack, key[1], at, (scores, width))


def _context(
    reference: DumpReader, mode: str, phase: str, layer: int | str, tap: Tap
) -> tuple[Array | None, int]:
    """The reference's scores behind a choice, and how many ids there are."""
    name = {"topk": "index_scores", "expert_ids": "router_scores", "index_scores": "topk"}.get(tap.name)
    if name is None or not reference.has(mode, phase, layer, name):
        return None, 0  # how many there are is not known: see _id_parts
    other = reference.get(mode, phase, layer, name)
    return (None, other.shape[-1]) if name == "topk" else (other, other.shape[-1])
