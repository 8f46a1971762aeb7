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
from dsv4.judge import metrics
from dsv4.judge.metrics import Array, Columns, Sums
from dsv4.stored import same_bytes
from dsv4.taps import BY_NAME, MODEL, PHASES, Tap

N_ROPE = 64
KEY = ("variant", "mode", "phase", "prompt", "layer", "tap", "part", "against")
NUMBERS = (*(name for name in metrics.VALUES if name != "worst_index"), *metrics.LOGITS, *metrics.CHOICES)
MOST_IDS = 1 << 20  # more choices than any row of a model has; an id beyond is garbage
COLUMNS = (*KEY, "step", "rows", "elements", "equal", "worst_row", *NUMBERS, "verdict", "excess")
STEPPED = ("attn_out", "moe_out", "logits")  # measured step by step too, in the free run against `trained`
TRIM = 2  # worst rows left out of the floor's statistics: an event that no draw showed may take a row
SCALE = ("amax", "peak", "peak_row", "trim_l2", "trim_abs", "trim_changed")  # see scale_columns


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
            column = np.concatenate([np.broadcast_to(c, s) for c, s in zip(cells, sizes, strict=True)])
        return column


@dataclass(frozen=True)
class Stack:
    """One tap of several layers, stacked: ``[B, R, ...]``.

    Attributes
    ----------
    tap : what it is.
    layers : layer numbers, -1 for the model's own.
    test, reference : values.
    equal : the bytes of all layers here are equal.
    positions : token position of each row or entry.
    context : what choices are judged by: the reference's scores ``[B, R, N]`` or None, and the
        number of ids.
    """

    tap: Tap
    layers: tuple[int, ...]
    test: Array
    reference: Array
    equal: bool
    positions: Array
    context: tuple[Array | None, int] = (None, 0)


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
                    table.add(*_steps(stack, key))
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
            x = _values(ours)
            y = x if same else _values(theirs)
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


def _values(stored: Array) -> Array:
    return (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored


def _context(
    reference: DumpReader, mode: str, phase: str, layer: int | str, tap: Tap
) -> tuple[Array | None, int]:
    """The reference's scores behind a choice, and how many ids there are."""
    name = {"topk": "index_scores", "expert_ids": "router_scores", "index_scores": "topk"}.get(tap.name)
    if name is None or not reference.has(mode, phase, layer, name):
        return None, 0  # how many there are is not known: see _id_parts
    other = reference.get(mode, phase, layer, name)
    return (None, other.shape[-1]) if name == "topk" else (other, other.shape[-1])


def scale_columns(stack: Stack) -> Columns:
    """What the verdict needs beside the metrics.

    ``amax``, ``peak``, ``peak_row``: largest magnitude of the emulation; over its norm; largest
    of the rows' own. ``trim_l2``, ``trim_abs``, ``trim_changed``: relative L2, largest absolute
    difference and share of elements changed without the :data:`TRIM` worst rows (each by its own
    measure), over the whole tensor's norm and size.
    """
    batch, rows = stack.test.shape[:2]
    if stack.test.shape != stack.reference.shape or stack.test.size == 0:
        return {}
    x, y = (array.reshape(batch, rows, -1) for array in (stack.test, stack.reference))
    if stack.tap.kind == "ids":
        x, y = np.sort(x, axis=-1), np.sort(y, axis=-1)  # order is no difference
    found = {"trim_changed": _without_worst((x != y).sum(-1)).sum(1) / np.prod(x.shape[1:])}
    if stack.tap.kind in ("ids", "bytes"):
        return found
    x, y = (np.where(np.isfinite(array), array, 0.0).astype(np.float64) for array in (x, y))
    amax, squares = np.abs(y).max(-1), (y**2).sum(-1)  # [B, R]
    whole, row = (np.sqrt(np.where(s == 0, np.inf, s)) for s in (squares.sum(1), squares))
    return found | {
        "amax": amax.max(1),
        "peak": amax.max(1) / whole,
        "peak_row": (amax / row).max(1),
        "trim_l2": np.sqrt(_without_worst(((x - y) ** 2).sum(-1)).sum(1)) / whole,
        "trim_abs": _without_worst(np.abs(x - y).max(-1)).max(1, initial=0.0),
    }


def _without_worst(rows: Array) -> Array:
    """``[B, R]`` without the TRIM largest of each line."""
    return np.sort(rows, axis=1)[:, : max(rows.shape[1] - TRIM, 0)]


def measure(stack: Stack, n_rope: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parts of one stack and their columns."""
    common = {"rows": stack.test.shape[1], "equal": stack.equal}
    for part, columns, group in _PARTS[stack.tap.kind](stack, n_rope):
        at = columns.pop("worst_index") // group
        positions = np.append(stack.positions, -1)
        yield (
            part,
            {**common, "elements": int(np.prod(stack.test.shape[1:])), "worst_row": positions[at], **columns},
        )


def _steps(stack: Stack, key: dict[str, Any]) -> tuple[int, dict[str, Any], Columns]:
    """Every decode step of a stack as a measurement of its own: one row a layer and step."""
    batch, rows = stack.test.shape[:2]
    x, y = (array.reshape(batch * rows, 1, -1) for array in (stack.test, stack.reference))
    columns = metrics.value_columns(metrics.sums(x, y)) | (
        metrics.logit_columns(x, y) if stack.tap.name == "logits" else {}
    )
    del columns["worst_index"]
    place = {"layer": np.repeat(stack.layers, rows), "step": np.tile(np.arange(rows), batch), "part": "all"}
    shared = {
        "rows": 1,
        "elements": x.shape[-1],
        "equal": columns["changed"] == 0,
        "worst_row": np.tile(stack.positions, batch),
    }
    return batch * rows, key | place, columns | shared


def _value_parts(stack: Stack, n_rope: int) -> Iterator[tuple[str, Columns, int]]:
    batch, rows = stack.test.shape[:2]
    nope = stack.test.shape[-1] - n_rope
    heads = stack.test.shape[2] if stack.test.ndim == 4 else 1
    split = stack.tap.split if stack.tap.split == "stream" or nope > 0 else "none"
    if stack.equal:
        bad = (~np.isfinite(stack.test.reshape(batch, -1))).sum(1).astype(float)
        parts = {"nope_rope": ("nope", "rope"), "stream": tuple(f"stream{k}" for k in range(heads))}.get(
            split, ()
        )
        same = metrics.equal_columns(batch, bad)
        if stack.tap.name == "logits":
            same |= metrics.logit_columns(stack.test, stack.reference)
        for part in ("all", *parts, *(("head",) if split == "nope_rope" and heads > 1 else ())):
            yield part, dict(same), 1
        return
    if split == "nope_rope":
        x, y = (array.reshape(batch, rows, heads, -1) for array in (stack.test, stack.reference))
        first, last = metrics.sums(x[..., :nope], y[..., :nope]), metrics.sums(x[..., nope:], y[..., nope:])
        head = first.merge(last)
        yield from (
            ("nope", metrics.value_columns(first.over(2)), 1),
            ("rope", metrics.value_columns(last.over(2)), 1),
        )
        if heads > 1:
            yield "head", metrics.value_columns(head.reshape(batch, rows * heads)), heads
        yield "all", metrics.value_columns(head.over(2)), 1
    elif split == "stream":
        each = metrics.sums(stack.test, stack.reference)  # [B, R, N]
        yield "all", metrics.value_columns(each.over(2)), 1
        for k in range(heads):
            one = Sums(**{name: getattr(each, name)[:, :, k] for name in Sums.__dataclass_fields__})
            yield f"stream{k}", metrics.value_columns(one), 1
    else:
        flat = (array.reshape(batch, rows, -1) for array in (stack.test, stack.reference))
        columns = metrics.value_columns(metrics.sums(*flat))
        extra = metrics.logit_columns(stack.test, stack.reference) if stack.tap.name == "logits" else {}
        yield "all", columns | extra, 1


def _score_parts(stack: Stack, _: int) -> Iterator[tuple[str, Columns, int]]:
    """Scores: values where both sides see an entry, and the choice that they would make."""
    hidden = (stack.test == -np.inf) & (stack.reference == -np.inf)
    x, y = np.where(hidden, np.float32(0), stack.test), np.where(hidden, np.float32(0), stack.reference)
    columns = metrics.value_columns(metrics.sums(x, y))
    seen = np.maximum(np.count_nonzero(~hidden, axis=(1, 2)), 1)
    columns["changed"] = columns["changed"] * np.prod(x.shape[1:]) / seen
    k = np.minimum(metrics.visible(stack.reference), stack.context[1])
    chosen = metrics.choice_columns(
        metrics.top_k(stack.test, k), metrics.top_k(stack.reference, k), stack.reference, x.shape[-1]
    )
    chosen = {name: chosen[name] for name in metrics.CHOICES if name not in ("invalid", "duplicates")}
    yield "all", columns | (chosen if stack.context[1] else {}), 1


def _lse_parts(stack: Stack, _: int) -> Iterator[tuple[str, Columns, int]]:
    """Log-sum-exp: absolute differences; -inf on both sides (a row with no key) is equal."""
    empty = (stack.test == -np.inf) & (stack.reference == -np.inf)
    x, y = np.where(empty, np.float32(0), stack.test), np.where(empty, np.float32(0), stack.reference)
    s = metrics.sums(x, y)
    columns = metrics.value_columns(s)
    columns["worst_index"] = s.biggest.argmax(1) if s.biggest.shape[1] else np.full(len(x), -1)
    kept = ("worst_index", "max_abs", "nonfinite", "changed")
    yield "all", {name: columns[name] for name in kept}, 1


def _id_parts(stack: Stack, _: int) -> Iterator[tuple[str, Columns, int]]:
    scores, width = stack.context
    if not width:  # no scores were dumped beside the choice: ids up to the largest named, within reason
        largest = max(int(ids.max(initial=0)) for ids in (stack.test, stack.reference))
        width = min(largest, MOST_IDS) + 1
    columns = metrics.choice_columns(stack.test, stack.reference, scores, width)
    if stack.tap.name == "expert_ids":  # chosen by score + bias, and the bias is no tap: no margin
        columns |= dict.fromkeys(("margin_min", "margin_flipped"), np.full(len(stack.test), np.nan))
    yield "all", columns, 1


def _byte_parts(stack: Stack, n_rope: int) -> Iterator[tuple[str, Columns, int]]:
    """Stored codes: share changed, in a row of codes, BF16 rope and scale bytes where that is the layout."""
    if stack.test.shape != stack.reference.shape:  # another record: no byte has a counterpart
        all_new = np.ones(len(stack.test))
        yield (
            "all",
            {"changed": all_new, "nonfinite": 0 * all_new, "worst_index": np.zeros(len(all_new), int)},
            1,
        )
        return
    differ = stack.test != stack.reference
    worst = differ.mean(-1).argmax(1) if differ.shape[1] else np.full(len(differ), -1)
    size = differ.shape[-1]
    scales = next((s for s in range(8, size, 8) if s == -(-((size - s - 2 * n_rope) // 64) // 8) * 8), 0)
    codes = size - scales - 2 * n_rope
    parts = {"all": slice(None)}
    if scales and codes > 0 and codes % 64 == 0:
        parts |= {
            "nope": slice(0, codes),
            "rope": slice(codes, size - scales),
            "scale": slice(size - scales, size),
        }
    for part, where in parts.items():
        share = differ[..., where].mean((1, 2)) if differ.shape[1] else np.zeros(len(differ))
        yield part, {"changed": share, "nonfinite": np.zeros(len(differ)), "worst_index": worst}, 1


_PARTS = {
    "value": _value_parts,
    "scores": _score_parts,
    "lse": _lse_parts,
    "ids": _id_parts,
    "bytes": _byte_parts,
}
