"""Quantisation points: how far each stored value is from the value it was made from, and by which scale.

At a quantisation point (``Tap.replay`` False) isolated mode stores the *reference's* values, which
its dump holds: so the exact input of every store is known, and three questions have answers.

*ULP histogram.* Distance of the stored value to its input in steps of the stored format
(:mod:`dsv4.judge.grids`), in the bins 0, to 1/4, to 1/2, to 1, to 2, more. The step is the one
under the scale that the format's definition gives this block of *inputs*: scales of activations
and index keys are not dumped, a scale guessed from the stored values would move with the error
that it is to show, and so a wrong scale shows too, as more steps. One correct rounding stays
within 1/2. A truncation reaches 1, a second rounding through BF16 1/2 + 1/32, a scale twice too
large 1.
What may lie further off (saturation under an E4M3 scale that was rounded down, a block lost with
its scale, the second rounding that the aligned record is defined by) is computed: ``beyond``
counts the values that are further off than a correct store would be.

*Scale stored = scale applied*, where bytes are dumped. The bytes, decoded here on their own, must
give the dumped values bit for bit: the reader applies the stored scale. And the scale that the
writer applied, estimated from its codes and inputs by least squares, must be the stored one: codes
are less than a step from input / scale, so that the estimate is off by at most
``sum(step |code|) / sum(code^2)``.

*Stored over ideal*: least and largest ratio of the stored scale to the definition's.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.dump import DumpReader
from dsv4.judge.compare import N_ROPE
from dsv4.judge.grids import E4M3, FORMATS, FUZZ, SMALLEST_SCALE, Format
from dsv4.judge.metrics import Array
from dsv4.judge.records import RecordError, decode, same_values
from dsv4.taps import PHASES, TAPS

EDGES = (0.0, 0.25, 0.5, 1.0, 2.0)  # upper ends of the bins; one more holds the rest
# Steps that FP32 arithmetic around the store may add: 2^-16 of an E4M3 value, which has 16 steps at most, and
# 2^-20 of a BF16 value, which has 256. A second rounding through BF16 adds up to 2^-7 (E2M1) or 2^-5 (E4M3).
SLACK = 2.0**-12
READS = {"nvfp4": "e2m1_e4m3_16", "mxfp4": "e4m3_ue8m0_128", "fp8": "e4m3_ue8m0_128", "bf16": "bf16"}
LAUNCH_SITES = ("attn_in_q", "moe_in_q")  # where a plan may take one gsa for the whole launch


@dataclass(frozen=True)
class Point:
    """A tap that a format stores, the tap it is made from, and its bytes or the weight that sets its format."""

    made_from: str
    stored_bytes: str = ""
    weight: str = ""


POINTS: Mapping[str, Point] = {
    "attn_in_q": Point("attn_in", weight="self_attn.q_a_proj.weight"),
    "qr_q": Point("qr", weight="self_attn.q_b_proj.weight"),
    "kv_store": Point("kv", stored_bytes="kv_bytes"),
    "comp_store": Point("comp", stored_bytes="comp_bytes"),
    "index_k_store": Point("index_k"),
    "moe_in_q": Point("moe_in", weight="mlp.experts.gate_up_proj"),
}
assert set(POINTS) == {tap.name for tap in TAPS if not tap.replay and tap.kind == "value"}


def weight_formats(results: Path) -> dict[str, str]:
    """Format of every stored tensor, from the checkpoint's manifest; empty without one."""
    path = results / "checkpoint.json"
    return json.loads(path.read_text()).get("formats", {}) if path.exists() else {}


class Points:
    """Quantisation points of one variant, prompt after prompt.

    Parameters
    ----------
    plan : flattened plan of the variant.
    weights : see :func:`weight_formats`.
    """

    def __init__(self, plan: Mapping[str, str], weights: Mapping[str, str]) -> None:
        self.plan, self.weights = plan, weights
        self.found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)

    def add(self, test: DumpReader, trained: DumpReader, prompt: str) -> None:
        """Measure one prompt's dump; a tap that it does not hold is left out."""
        rope = int(test.attrs.get("n_rope", N_ROPE))
        for tap, point in POINTS.items():
            stacks = _stacks(test, trained, tap, point, partial(self._format, tap))
            with np.errstate(invalid="ignore", over="ignore"):  # not finite: infinitely far
                for name, layers, arrays, places in stacks:
                    at = [(prompt, *place) for place in places]
                    for part, form, columns in self._parts(tap, name, arrays, rope):
                        for number, layer in enumerate(layers):
                            line = {column: found[number] for column, found in columns.items()}
                            self._merge((tap, part, form), layer, line, at)

    def lines(self) -> list[dict[str, Any]]:
        """One entry a (tap, part, format), columns by layer, as JSON holds them.

        ``bins`` values in each bin; ``beyond`` values further off than a correct store;
        ``largest`` distance in steps (None: not finite); ``worst`` place of the value that is
        furthest beyond, as ``[prompt, phase, token]``; and where bytes are dumped ``blocks``
        of values, ``unapplied`` blocks whose codes were made with another scale, ``undecoded``
        rows whose bytes give other values, ``scale_at`` place of the first such row, ``ratio``
        least and largest stored over ideal scale; ``error`` why bytes could not be decoded.
        """
        out = []
        for (tap, part, form), by_layer in self.found.items():
            layers = sorted(by_layer)
            names = dict.fromkeys(name for line in by_layer.values() for name in line if name != "excess")
            columns = {name: [_plain(by_layer[layer].get(name)) for layer in layers] for name in names}
            out.append({"tap": tap, "part": part, "format": form, "layers": layers, **columns})
        return out

    def _parts(
        self, tap: str, name: str, arrays: tuple[Array, ...], rope: int
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(part, format, columns by layer) of a stack ``[L, R, D]`` of inputs, stored values and bytes."""
        x, stored, *codes = arrays
        if not POINTS[tap].stored_bytes:
            rotated = name == "e2m1_ue8m0_32"
            x, stored, slack = _rotated(x, stored) if rotated else (x, stored, 0.0)
            launch = tap in LAUNCH_SITES and self.plan["norm_quant"] == "fused_launch_gsa"
            yield "all", name, _histogram(FORMATS[name], x, stored, launch=launch, slack=slack)
            return
        nope = x.shape[-1] - rope
        columns = _histogram(FORMATS[name], x[..., :nope], stored[..., :nope])
        if codes:
            columns |= self._scales(FORMATS[name], x[..., :nope], stored, codes[0], rope)
        yield "nope", name, columns
        yield "rope", "bf16", _histogram(FORMATS["bf16"], x[..., nope:], stored[..., nope:])

    def _format(self, tap: str, layer: int) -> str:
        """Name of the format in which a layer stores a tap (kv: its nope part); "": not rounded, or not known."""
        if self.plan["rounding"] == "none":
            return ""
        if POINTS[tap].stored_bytes:
            record = "e4m3_fp32_token" if self.plan["kv_record"] == "aligned" else "e4m3_ue8m0_64"
            return "e2m1_e4m3_16" if self.plan["kv_format"] == "nvfp4" else record
        if tap == "index_k_store":
            return "e2m1_ue8m0_32" if self.plan["index_score"] == "fp4" else "e4m3_fp32_row"
        name = f"model.layers.{layer}.{POINTS[tap].weight}"
        return READS.get(self.weights[name], "") if self.weights else ""

    def _scales(self, form: Format, x: Array, stored: Array, codes: Array, rope: int) -> dict[str, Any]:
        """Columns about the scales of records: see :meth:`lines`."""
        count, rows = x.shape[:2]
        blank: dict[str, Any] = {"blocks": np.zeros(count, int), "ratio": [None] * count}
        try:
            bytes_say = decode(codes, self.plan, x.shape[-1], rope)
        except RecordError as error:
            every = np.full(count, rows)
            first = np.zeros(count, int)
            return blank | {
                "unapplied": 0 * every, "undecoded": every, "scale_at": first, "error": [str(error)] * count
            }  # fmt: skip
        wrong_rows = ~same_values(bytes_say.values, stored).all(-1)  # [L, R]
        wrong_blocks = _other_scale(form, x, bytes_say.codes, bytes_say.scale)  # [L, R, blocks]
        ideal = form.scales(x)
        ratio = bytes_say.scale / np.where(ideal == 0, np.nan, ideal)
        bad = wrong_rows | (wrong_blocks.sum(-1) > 0)
        return {
            "blocks": np.full(count, rows * wrong_blocks.shape[-1]),
            "ratio": [_ends(of_layer) for of_layer in ratio],
            "unapplied": wrong_blocks.sum((1, 2)),
            "undecoded": wrong_rows.sum(1),
            "scale_at": np.where(bad.any(1), bad.argmax(1), -1),
            "error": [""] * count,
        }

    def _merge(
        self, key: tuple[str, str, str], layer: int, line: dict[str, Any], at: list[tuple[str, str, int]]
    ) -> None:
        """Add a prompt's columns of one layer to those of the prompts before."""
        for name in ("worst", "scale_at"):
            if name in line:
                line[name] = at[line[name]] if line[name] >= 0 else None
        before = self.found[key].setdefault(layer, line)
        if before is line:
            return
        for name in ("bins", "beyond", "blocks", "unapplied", "undecoded"):
            if name in line:
                before[name] = before.get(name, 0) + line[name]
        if line["excess"] > before["excess"]:
            before |= {name: line[name] for name in ("excess", "worst")}
        before["largest"] = max(before["largest"], line["largest"])
        if "ratio" in line:
            before["ratio"] = _ends(
                np.array([*(before.get("ratio") or ()), *(line["ratio"] or ())], np.float64)
            )
            before["scale_at"] = before.get("scale_at") or line["scale_at"]
            before["error"] = before.get("error") or line["error"]


def _stacks(
    test: DumpReader, trained: DumpReader, tap: str, point: Point, format_of: Callable[[int], str]
) -> Iterator[tuple[str, list[int], tuple[Array, ...], list[tuple[str, int]]]]:
    """Format, layers, ``[L, R, D]`` of inputs, stored values and bytes, and (phase, token) of each row."""
    groups: dict[Any, list[tuple[int, tuple[Array, ...]]]] = defaultdict(list)
    entry = next(spec.axis == "entry" for spec in TAPS if spec.name == tap)
    layers = {layer for phase in PHASES for layer in test.layers("isolated", phase) if isinstance(layer, int)}
    for layer in sorted(layers):
        phases = [
            phase
            for phase in PHASES
            if test.has("isolated", phase, layer, tap)
            and trained.has("isolated", phase, layer, point.made_from)
        ]
        if not phases or not format_of(layer):
            continue
        sources = [(trained, point.made_from), (test, tap)]
        if point.stored_bytes and all(
            test.has("isolated", phase, layer, point.stored_bytes) for phase in phases
        ):
            sources.append((test, point.stored_bytes))
        arrays = tuple(
            np.concatenate([reader.get("isolated", phase, layer, name) for phase in phases])
            for reader, name in sources
        )
        places = []
        for phase in phases:
            rows = test.entry_positions("isolated", phase, layer) if entry else test.rows("isolated", phase)
            places += [(phase, int(row)) for row in rows]
        if len(places):
            shapes = tuple(array.shape for array in arrays)
            groups[format_of(layer), tuple(places), shapes].append((layer, arrays))
    for (name, places, _), found in groups.items():
        of_layers, each = zip(*found, strict=True)
        stacked = tuple(np.stack(arrays) for arrays in zip(*each, strict=True))
        yield name, list(of_layers), stacked, list(places)


def _histogram(
    form: Format, x: Array, stored: Array, *, launch: bool = False, slack: Array | float = 0.0
) -> dict[str, Any]:
    """Columns of distances ``[L, R, D]`` in steps; a value that is not finite is infinitely far off.

    Parameters
    ----------
    x, stored : (L, R, D) float32
    launch : see :meth:`dsv4.judge.grids.Format.scales`.
    slack : what else than rounding may move a stored value; broadcasts to (L, R, D).
    """
    blocks = form.scales(x, launch=launch)
    scale = form.spread(blocks, x.shape[-1])
    measured = form.spread(_measured_by(form, x, blocks, launch=launch), x.shape[-1])
    step = form.element.step(np.abs(x) / measured) * measured
    far = np.abs(stored.astype(np.float64) - x) / step
    far = np.where(np.isfinite(far), far, np.inf)
    allowed = SLACK + slack / step
    nearest = form.nearest(x, scale, step)
    excess = np.where(np.isfinite(nearest), far - nearest - allowed, np.inf)
    if form.scale == "nvfp4" or np.any(slack):  # a scale on a tie may fall to either side
        low, high = (form.scales(x, launch=launch, nudge=nudge) for nudge in (-FUZZ, FUZZ))
        unsure = (np.abs(high - low) > 4 * FUZZ * np.abs(high)) & np.isfinite(high)
        excess = np.where(form.spread(unsure, x.shape[-1]), -np.inf, excess)
    within = [np.count_nonzero(far <= edge + allowed, axis=(1, 2)) for edge in EDGES]
    total = np.full(len(x), x[0].size)
    worst = excess.max(-1)  # [L, R]
    return {
        "bins": np.diff([*within, total], prepend=0, axis=0).T,
        "beyond": np.count_nonzero(excess > 0, axis=(1, 2)),
        "largest": far.max((1, 2)),
        "worst": worst.argmax(1),
        "excess": worst.max(1),
    }


def _measured_by(form: Format, x: Array, blocks: Array, *, launch: bool) -> Array:
    """Scales to count steps by: where a block's own is 0, the smallest that is not; 1 for a row of zeros."""
    if form.scale != "nvfp4":
        return blocks
    row = np.abs(x).max(-1, keepdims=True)
    gsa = (row.max(-2, keepdims=True) if launch else row).astype(np.float64) / 2688
    smallest = np.where(gsa == 0, 1.0, gsa * SMALLEST_SCALE)
    return np.where(blocks == 0, smallest, blocks)


def _rotated(x: Array, stored: Array) -> tuple[Array, Array, Array]:
    """Both in the basis in which the keys are stored, and the FP32 error of going there and back."""
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix *= len(matrix) ** -0.5
    turned = (x.astype(np.float64) @ matrix).astype(np.float32)
    back = stored.astype(np.float64) @ matrix
    length = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True))
    return turned, back, np.where(np.isfinite(length), 2.0**-23 * length, 0.0)


def _other_scale(form: Format, x: Array, codes: Array, scale: Array) -> Array:
    """Blocks ``[L, R, blocks]`` whose codes were made with another scale than the stored one."""
    blocked = Format(name="", element=form.element, group=codes.shape[-1] // scale.shape[-1])
    c, y = (blocked.blocks(array).astype(np.float64) for array in (codes, x))
    square = (c * c).sum(-1)
    known = square > 0
    if form.scale == "nvfp4":  # a subnormal scale was rounded by up to half of itself: its codes saturate
        gsa = np.abs(x).max(-1, keepdims=True).astype(np.float64) / 2688
        known &= scale > 2.0**E4M3.least * gsa * (1 - FUZZ)
    whole = np.where(known, square, 1.0)
    applied = (y * c).sum(-1) / whole
    bound = (form.element.step(np.abs(c)) * np.abs(c)).sum(-1) / whole + FUZZ
    close = np.abs(applied - scale) <= bound * scale
    return known & ~close | ~np.isfinite(square) | (np.isfinite(square) & ~np.isfinite(scale))


def _ends(ratio: Array) -> list[float] | None:
    """Least and largest of the finite ratios."""
    finite = ratio[np.isfinite(ratio)]
    return [float(finite.min()), float(finite.max())] if finite.size else None


def _plain(value: Any) -> Any:
    """As JSON holds it: arrays and tuples as lists, what is not finite as None."""
    if isinstance(value, np.ndarray | tuple):
        return [_plain(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not np.isfinite(value) else value
