"""The sweep, its markers and the trace as one list, ranked by what each cast costs a step."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv4.casts.dtypes import narrower
from dsv4.casts.hits import Cast, Direction, Status
from dsv4.casts.markers import Marker, Problem, applied, checked, markers
from dsv4.casts.sweep import Swept, audited_here, files_of, sweep
from dsv4.config import Config
from dsv4.ladder import Variant

GREP = re.compile(r"\.float\(\)")  # the plan's own
SCHEMA = 1
CONTEXT = 300  # tokens before the traced step: windows are full, and every layer has compressed entries
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Listing:
    """All casts of a tree.

    Attributes
    ----------
    casts : most bytes a step first.
    moved : bytes and calls a step by rung, of a cast's key; empty where no step was traced.
    rungs : ids of the rungs that were traced, bottom first.
    greps : lines that the plan's grep finds: file, line, and whether a cast stands there.
    problems : markers that cannot stand.
    """

    files: int
    casts: list[Cast]
    moved: Mapping[Key, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    rungs: tuple[str, ...] = ()
    greps: tuple[tuple[str, int, bool], ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def hits(self) -> list[Cast]:
        """Those that are open, exempt or fixed."""
        return [cast for cast in self.casts if cast.status is not Status.FREE]

    @property
    def open(self) -> list[Cast]:
        """What is left to do."""
        return [cast for cast in self.casts if cast.status is Status.OPEN]

    @property
    def clean(self) -> bool:
        """Nothing is open, and every marker stands."""
        return not self.open and not self.problems

    def bytes_in(self, cast: Cast, rung: str) -> int:
        """Bytes a step in one rung."""
        return self.moved.get(cast.key, {}).get(rung, (0, 0))[0]

    def most(self, cast: Cast) -> int:
        """Bytes a step in the rung where it costs most."""
        return max((size for size, _ in self.moved.get(cast.key, {}).values()), default=0)

    def as_json(self) -> dict[str, Any]:
        """As :mod:`json` takes it; of free casts in registers their number."""
        lines = {(file, line) for file, line, _ in self.greps}
        shown = [
            cast
            for cast in self.casts
            if cast.status is not Status.FREE or (cast.file, cast.line) in lines or self.most(cast)
        ]
        steps = [
            {
                rung: {"bytes": size, "calls": calls}
                for rung, (size, calls) in self.moved.get(c.key, {}).items()
            }
            for c in shown
        ]
        return {
            "schema": SCHEMA,
            "clean": self.clean,
            "files": self.files,
            "rungs": list(self.rungs),
            "context": CONTEXT,
            "count": Counter(cast.status.value for cast in self.casts),
            "free": Counter(cast.reason for cast in self.casts if cast.status is Status.FREE),
            "casts": [
                cast.as_json() | {"grep": (cast.file, cast.line) in lines, "step": step}
                for cast, step in zip(shown, steps, strict=True)
            ],
            "grep": {
                "hits": len(self.greps),
                "no_cast": [f"{file}:{line}" for file, line, cast in self.greps if not cast],
            },
            "problems": [vars(problem) for problem in self.problems],
            "warnings": list(self.warnings),
        }


def listed(root: Path, paths: Sequence[Path], config: Config) -> Listing:
    """Sweep a tree; this project's own path is traced too, rung by rung of the ladder's spine."""
    spine = list(config.ladder.spine()) if audited_here(root) and not paths else []
    steps = _steps(root, config.checkpoint, spine) if spine else _Steps()
    found = sweep(root, paths, also=sorted({file for file, _, _ in steps.kinds}))
    swept = {path.relative_to(root.resolve()).as_posix() for path in files_of(root, paths)}
    # Of a file that is not part of what is swept, only what a step ran counts.
    casts = [cast for cast in found.casts if cast.file in swept or cast.key in steps.kinds]
    said, wrong = _markers(found)
    casts, problems = applied(_seen(casts, steps.kinds), said, [rung.id for rung in config.ladder.spine()])
    moved = {key: {rung: size for rung, (size, _) in step.items()} for key, step in steps.moved.items()}
    listing = Listing(
        files=len(found.modules),
        casts=checked(casts, steps.rungs, moved),
        moved=steps.moved,
        rungs=tuple(steps.rungs),
        greps=tuple(_grepped(found, casts)),
        problems=tuple(sorted([*wrong, *problems], key=lambda each: (each.file, each.line))),
        warnings=(*found.warnings, *steps.warnings),
    )
    listing.casts.sort(key=lambda cast: (-listing.most(cast), cast.file, cast.line, cast.column))
    return listing


@dataclass
class _Steps:
    """What decode steps moved.

    Attributes
    ----------
    moved : bytes and calls by rung, of a cast's key.
    kinds : a cast's first line and dtypes.
    rungs : those that have a step.
    """

    moved: dict[Key, dict[str, tuple[int, int]]] = field(default_factory=dict)
    kinds: dict[Key, tuple[int, str, str]] = field(default_factory=dict)
    rungs: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _steps(root: Path, checkpoint: Path, spine: Sequence[Variant]) -> _Steps:
    from dsv4.casts.trace import traced  # torch and Triton, which a sweep of another tree does without

    steps = _Steps()
    for rung, casts in traced(root, checkpoint, spine, CONTEXT):
        if isinstance(casts, str):
            steps.warnings.append(f"{rung}: no step was traced: {casts}")
            continue
        steps.rungs.append(rung)
        for each in casts:
            key = each.spot.file, each.spot.end_line, each.spot.column
            size, calls = steps.moved.setdefault(key, {}).get(rung, (0, 0))
            steps.moved[key][rung] = size + each.bytes, calls + each.calls
            steps.kinds[key] = each.spot.line, each.moved.source, each.moved.target
    return steps


def _seen(casts: Iterable[Cast], kinds: Mapping[Key, tuple[int, str, str]]) -> list[Cast]:
    """Casts with what a step showed: what the sweep did not see, or took for free by another dtype, is open."""
    done = {cast.key: cast for cast in casts}
    for key, (line, source, target) in kinds.items():
        known = done.get(key)
        widened = narrower(source, target)
        if known is None:
            direction = Direction.WIDENED if widened else Direction.NARROWED
            done[key] = Cast(
                file=key[0],
                line=line,
                end_line=key[1],
                column=key[2],
                text="",
                direction=direction,
                source=source,
                target=target,
                producer=None,
                consumer=None,
                reason="seen in a step only",
            )
        elif known.source != source or (widened and known.status is Status.FREE):
            # The sweep did not know the dtype, or another one, which another producer made: what ran counts.
            direction = Direction.WIDENED if widened else Direction.NARROWED
            producer = known.producer if known.source in ("", source) else None
            ran = replace(known, direction=direction, source=source, target=target, producer=producer)
            done[key] = replace(ran, status=Status.OPEN, reason="")
    return list(done.values())


def _markers(found: Swept) -> tuple[list[Marker], list[Problem]]:
    pairs = [markers(module.file, module.source) for module in found.modules]
    return [each for said, _ in pairs for each in said], [each for _, wrong in pairs for each in wrong]


def _grepped(found: Swept, casts: Iterable[Cast]) -> Iterable[tuple[str, int, bool]]:
    """Lines that the plan's grep lists."""
    cast_on = {(cast.file, line) for cast in casts for line in range(cast.line, cast.end_line + 1)}
    for module in found.modules:
        for number, line in enumerate(module.source.split("\n"), start=1):
            if GREP.search(line):
                yield module.file, number, (module.file, number) in cast_on
