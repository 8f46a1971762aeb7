"""Measure one variant: its dumps against the references, its parent, its floor and B0.

Writes ``metrics/<id>.parquet``. What else a gate must know (taps that are missing, what was
exercised, what could not be read) stands in the file's metadata, so that a gate reads no dump.
A dump that is refused is a result, not a crash: no rows, and the message.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track

from dsv4.config import Config, load
from dsv4.console import main_guard
from dsv4.dump import DumpError, DumpReader
from dsv4.engine.spec import declares
from dsv4.files import write_parquet
from dsv4.judge.compare import COLUMNS, CompareError, compare
from dsv4.judge.quantisation import Points, weight_formats
from dsv4.judge.verdict import Draws, judge
from dsv4.ladder import Ladder, Variant
from dsv4.plan import flatten
from dsv4.prompts import with_taps
from dsv4.taps import MODEL, MODES, PHASES, TAPS, layer_taps

BASELINE = "B0"  # the plan's baseline: attn_out of every rung above it is compared with it by name
METADATA = b"dsv4"
DRAWS = ("draw_distance", "draw_worst", "draw_changed")
LABELS = ("label", "device", "backend", "commit", "dirty", "seed", "checkpoint", "versions")


@dataclass
class Notes:
    """What the gate must know beside the table; JSON in the parquet file's metadata.

    Attributes
    ----------
    error : why there are no rows, or "".
    missing : ``[mode, phase, layer, tap]`` that the variant should have dumped and did not.
    declared : taps, or patterns mode/layer/tap, that an engine declared it cannot give.
    taps : by mode, (layer, tap) pairs dumped, and all that the model has.
    exercised : by prompt, what the run reached (clamp hits, pages, ...).
    positions : by prompt, the last token position measured.
    decode : by prompt, the position of the first decode step.
    labels : identity of the code and machine that ran.
    batched : how a prefill of several prompts compares with each alone; empty where there is none.
    launches : of kernels in one decode step, ``op.function`` -> how many; empty on refs.
    requantised : inputs of a step that its two readers ask for in different formats; see ``kernel_launches``.
    points : what happened at the quantisation points, see :meth:`dsv4.judge.quantisation.Points.lines`.
    floor, parent : whether those dumps were there, of every prompt.
    unfloored : ``[phase, layer, tap]`` that the floor does not hold, or holds without draws.
    """

    error: str = ""
    missing: list[list[Any]] = field(default_factory=list)
    declared: list[str] = field(default_factory=list)
    taps: dict[str, list[int]] = field(default_factory=dict)
    exercised: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    decode: dict[str, int] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    batched: dict[str, Any] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    requantised: int = 0
    points: list[dict[str, Any]] = field(default_factory=list)
    floor: bool = False
    parent: bool = False
    unfloored: list[list[Any]] = field(default_factory=list)


def lineage_has(ladder: Ladder, variant: Variant, name: str) -> bool:
    """Whether ``name`` is a proper ancestor."""
    return any(ancestor.id == name for ancestor in ladder.lineage(variant.id)[:-1])


def expected_taps(reference: DumpReader, mode: str) -> list[tuple[str, int | str, str]]:
    """(phase, layer, tap) that a full dump of ``mode`` holds: every tap of every layer.

    Taps of compressed entries only where the reference closed some in that phase.
    """
    ratios = [int(ratio) for ratio in reference.attrs["compress_ratios"]]
    layers: list[int | str] = [*range(len(ratios)), MODEL]
    found = []
    for phase in PHASES:
        if not len(reference.rows(mode, phase)):
            continue
        for layer in layers:
            if layer == MODEL:
                taps, closed = [tap for tap in TAPS if tap.where == "model"], False
            else:
                taps = layer_taps(ratios[int(layer)], mode)
                closed = reference.has(mode, phase, layer, "comp_store")
            found += [(phase, layer, tap.name) for tap in taps if tap.axis == "row" or closed]
    return found


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where the dumps of a measurement lie: folders with one file a prompt.

    Attributes
    ----------
    own, floor : of the variant and of its plan's floor.
    parent : of what it stands on, or None.
    base : of the plan's baseline, if the variant stands on it, or None.
    """

    own: Path
    floor: Path
    parent: Path | None
    base: Path | None = None

    @classmethod
    def of(cls, results: Path, ladder: Ladder, variant: Variant) -> "Folders":
        """Folders of a rung."""
        dumps = results / "variants"
        return cls(
            own=dumps / variant.id,
            floor=results / "floor" / variant.id,
            parent=dumps / variant.parent if variant.parent else None,
            base=dumps / BASELINE if lineage_has(ladder, variant, BASELINE) else None,
        )


class Measurer:
    """The dumps of one variant and one prompt after the other.

    Parameters
    ----------
    results : folder of the run.
    variant : the rung.
    folders : its dumps, and those that it is measured against.
    variants : how many the audit judges, for the family-wise rate.
    """

    def __init__(self, results: Path, variant: Variant, folders: Folders, variants: int) -> None:
        self.results, self.variant, self.folders, self.variants = results, variant, folders, variants
        self.notes, self.frames = Notes(), list[pd.DataFrame]()
        self.draws: list[list[np.ndarray]] = []
        self._floors = list[bool]()
        self.points = Points(flatten(variant.plan), weight_formats(results))
        self._dumped = {mode: set[tuple[Any, str]]() for mode in MODES}
        self._all = set[tuple[Any, str]]()

    def prompt(self, prompt: str) -> None:
        """Measure one prompt's dump against everything that is there."""
        file = f"{prompt}.h5"
        with DumpReader(self.results / "reference" / file, {"kind": "reference"}, keep=True) as trained:
            same = {"checkpoint": trained.attrs["checkpoint"], "prompt": trained.attrs["prompt"]}
            with DumpReader(
                self.folders.own / file,
                {**same, "kind": "variant", "variant": self.variant.id, "plan": flatten(self.variant.plan)},
                keep=True,
            ) as test:
                if test.attrs.get("error"):
                    raise DumpError(str(test.attrs["error"]))
                self._note(prompt, test, trained)
                self.frames.append(compare(test, trained, modes=MODES, against="trained"))
                self.points.add(test, trained, prompt)
                expected = {**same, "kind": "plain"}
                with DumpReader(self.results / "plain" / file, expected, beside=[trained]) as plain:
                    self.frames.append(compare(test, plain, modes=MODES, against="plain"))
                self._ancestors(test, file, same)
                self._floors.append(self._floor(test, trained, file, same))

    def _ancestors(self, test: DumpReader, file: str, same: Mapping[str, Any]) -> None:
        parent_folder, base_folder = self.folders.parent, self.folders.base
        if parent_folder:
            expected = {**same, "variant": self.variant.parent}
            with DumpReader(parent_folder / file, expected) as parent:
                self.notes.parent = True
                self.frames.append(compare(test, parent, modes=MODES, against="parent"))
        if base_folder and (base_folder / file).exists():
            with DumpReader(base_folder / file, {**same, "variant": BASELINE}) as base:
                only = frozenset({"attn_out"})
                self.frames.append(compare(test, base, modes=("isolated",), against=BASELINE, only=only))

    def _floor(self, test: DumpReader, trained: DumpReader, file: str, same: Mapping[str, Any]) -> bool:
        path = self.folders.floor / file
        if not path.exists():
            return False
        with DumpReader(path, {**same, "kind": "floor", "plan": flatten(self.variant.plan)}) as floor:
            self.notes.unfloored += [
                [phase, -1 if layer == MODEL else layer, tap]
                for phase, layer, tap in expected_taps(trained, "isolated")
                if not floor.has("isolated", phase, layer, tap)
            ]
            frame = compare(test, floor, modes=("isolated",), against="floor")
            for row in frame[frame["part"] == "all"].itertuples():
                layer = MODEL if row.layer == -1 else row.layer
                attrs = floor.dataset_attrs("isolated", str(row.phase), layer, str(row.tap))  # type: ignore[arg-type]
                self.draws.append([np.asarray(attrs.get(name, ()), float) for name in DRAWS])
            self.frames.append(frame)
        return True

    def _note(self, prompt: str, test: DumpReader, trained: DumpReader) -> None:
        notes = self.notes
        notes.exercised[prompt] = test.attrs.get("exercised", {})
        notes.declared = sorted(set(notes.declared) | set(test.attrs.get("declared_missing", [])))
        notes.launches = dict(test.attrs.get("launches", {}))
        notes.requantised = int(test.attrs.get("requantised", 0))
        notes.batched = dict(test.attrs.get("batched_prefill", {}))
        notes.labels = {name: test.attrs[name] for name in LABELS if name in test.attrs}
        ends = [int(rows[-1]) for mode in MODES for phase in PHASES if len(rows := test.rows(mode, phase))]
        notes.positions[prompt] = max(ends, default=-1)
        steps = trained.rows("compounded", "decode")
        notes.decode[prompt] = int(steps[0]) if len(steps) else -1
        for mode in MODES:
            due = set(expected_taps(trained, mode))
            for phase, layer, tap in expected_taps(trained, "isolated"):  # every tap that there is
                self._all.add((layer, tap))
                if test.has(mode, phase, layer, tap):
                    self._dumped[mode].add((layer, tap))
                elif (phase, layer, tap) in due and not declares(notes.declared, mode, layer, tap):
                    notes.missing.append([mode, phase, layer, tap])
        notes.taps = {mode: [len(dumped), len(self._all)] for mode, dumped in self._dumped.items()}

    def table(self) -> pd.DataFrame:
        """All rows, the floor's with their verdicts; the notes are whole then too."""
        self.notes.points = self.points.lines()
        self.notes.floor = bool(self._floors) and all(self._floors)
        frame = pd.concat(self.frames, ignore_index=True)
        rows = frame[(frame["against"] == "floor") & (frame["part"] == "all")]
        if len(rows):
            draws = Draws(*(_pad([drawn[k] for drawn in self.draws]) for k in range(len(DRAWS))))
            found = judge(rows, draws, flatten(self.variant.plan), variants=self.variants)
            frame.loc[rows.index, ["verdict", "excess"]] = found
            undrawn = rows.loc[found["verdict"] == "", ["phase", "layer", "tap"]]
            self.notes.unfloored += undrawn.to_numpy(object).tolist()
        return frame[list(COLUMNS)]


def _pad(arrays: list[np.ndarray]) -> np.ndarray:
    width = max((len(array) for array in arrays), default=0)
    out = np.full((len(arrays), max(width, 1)), np.nan)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out


def measure(results: Path, ladder: Ladder, name: str, prompts: Iterable[str]) -> tuple[pd.DataFrame, Notes]:
    """Table and notes of a rung; see :func:`measured`."""
    variant = ladder[name]
    folders, variants = Folders.of(results, ladder, variant), len(ladder.default())
    return measured(Measurer(results, variant, folders, variants), prompts)


def measured(measurer: Measurer, prompts: Iterable[str]) -> tuple[pd.DataFrame, Notes]:
    """Table and notes; a dump that is refused gives no rows and ``notes.error``."""
    try:
        for prompt in prompts:
            measurer.prompt(prompt)
        return measurer.table(), measurer.notes
    except (DumpError, CompareError) as error:
        measurer.notes.error = str(error)
        return pd.DataFrame(columns=list(COLUMNS)), measurer.notes


def write(path: Path, frame: pd.DataFrame, notes: Notes) -> None:
    """Write the table with its notes, whole or not at all."""
    for name in ("step", "rows", "elements", "layer", "worst_row"):
        frame[name] = frame[name].astype("int64")
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), METADATA: json.dumps(vars(notes))}
    )
    write_parquet(path, table)


def read(path: Path) -> tuple[pd.DataFrame, Notes]:
    """Inverse of :func:`write`."""
    table = pq.read_table(path)
    notes = Notes(**json.loads((table.schema.metadata or {})[METADATA]))
    return table.to_pandas(), notes


def read_notes(path: Path) -> Notes:
    """The notes alone, without the table."""
    return Notes(**json.loads((pq.read_schema(path).metadata or {})[METADATA]))


def arguments(description: str | None, *extra: str) -> argparse.ArgumentParser:
    """Command line of a stage: ``--results``, ``--config`` and the options named."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of the run, results/<run>")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    for name in extra:
        parser.add_argument(f"--{name}", required=name == "variant")
    return parser


def main() -> int:
    """Measure ``--variant``; always exits 0 once the configuration is read."""
    options = arguments(__doc__, "variant").parse_args()
    config: Config = load(options.config)
    console = Console(stderr=True)
    prompts = with_taps(config.prompts)
    shown = track(prompts, description=f"measure {options.variant}", console=console, transient=True)
    frame, notes = measure(options.results, config.ladder, options.variant, shown)
    write(options.results / "metrics" / f"{options.variant}.parquet", frame, notes)
    console.print(f"{options.variant}: {notes.error or f'{len(frame)} measurements'}", highlight=False)
    return 0


if __name__ == "__main__":
    main_guard(main)
