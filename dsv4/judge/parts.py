"""The parts of a tap (nope, rope, heads, streams, codes, scales) and what is measured of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4.judge import metrics
from dsv4.judge.metrics import Array, Columns, Sums
from dsv4.taps import Tap

MOST_IDS = 1 << 20  # more choices than any row of a model has; an id beyond is garbage
TRIM = 2  # worst rows left out of the floor's statistics: an event that no draw showed may take a row
SCALE = ("amax", "peak", "peak_row", "trim_l2", "trim_abs", "trim_changed")  # see scale_columns


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


def steps(stack: Stack, key: dict[str, Any]) -> tuple[int, dict[str, Any], Columns]:
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
