"""What the code itself says of its casts: ``# cast: exempt(reason)`` and ``# cast: fixed(rung)``.

A marker stands on a line of the cast, or alone on the line above it. ``exempt`` is for a cast that is meant (a
compressor's boundary, a storage format), and says why. ``fixed`` names the rung of the ladder's spine that does
without it: a leaf is never stacked, so it fixes nothing.
"""

import io
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from dsv4.casts.hits import CHOICE, Cast, Status

_MARKER = re.compile(r"#\s*cast:\s*(?P<rest>.*?)\s*$")
_FORM = re.compile(r"(?P<word>exempt|fixed)\((?P<said>.*)\)$")


@dataclass(frozen=True)
class Marker:
    """One marker, and the line of code that it is about."""

    file: str
    line: int
    about: int
    word: str
    said: str


@dataclass(frozen=True)
class Problem:
    """A marker that cannot stand, and why."""

    file: str
    line: int
    said: str


def markers(file: str, source: str) -> tuple[list[Marker], list[Problem]]:
    """Markers in a file's comments, and those that say nothing."""
    found, wrong = list[Marker](), list[Problem]()
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = _MARKER.search(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        line, form = token.start[0], _FORM.match(match["rest"])
        if form is None:
            said = "write `# cast: exempt(reason)` or `# cast: fixed(rung)`"
            wrong.append(Problem(file, line, f"`{match[0]}` says nothing: {said}"))
        elif not form["said"].strip():
            wrong.append(Problem(file, line, f"`{match[0]}`: {form['word']} without a reason does not count"))
        else:
            alone = not lines[line - 1][: token.start[1]].strip()
            found.append(Marker(file, line, line + alone, form["word"], form["said"].strip()))
    return found, wrong


def applied(
    casts: Iterable[Cast], found: Iterable[Marker], rungs: Collection[str]
) -> tuple[list[Cast], list[Problem]]:
    """Casts as their markers say, and the markers that no cast belongs to or whose rung there is not."""
    done, problems = list(casts), list[Problem]()
    for marker in found:
        here = [
            index
            for index, cast in enumerate(done)
            if cast.file == marker.file and cast.line <= marker.about <= cast.end_line
        ]
        if not here:
            problems.append(Problem(marker.file, marker.line, f"stale: no cast on line {marker.about}"))
            continue
        if marker.word == "fixed" and marker.said not in rungs:
            said = f"no rung {marker.said!r} on the ladder's spine: {', '.join(rungs)}"
            problems.append(Problem(marker.file, marker.line, said))
            continue
        for index in _meant(done, here):
            status = Status.EXEMPT if marker.word == "exempt" else Status.FIXED
            done[index] = replace(done[index], status=status, reason=marker.said)
    return done, problems


def _meant(casts: list[Cast], here: list[int]) -> list[int]:
    """Open casts of a marker's line; if there is none, the choice of a producer's dtype, or any other."""
    wanted = [index for index in here if casts[index].status is Status.OPEN]
    choices = [index for index in here if casts[index].reason == CHOICE]
    choices.sort(key=lambda index: casts[index].end_line - casts[index].line)
    return wanted or choices[:1] or here


def checked(
    casts: Iterable[Cast], spine: list[str], moved: Mapping[tuple[str, int, int], Mapping[str, int]]
) -> list[Cast]:
    """Casts whose rung does what their marker says: from that rung upwards nothing is cast there any more.

    Parameters
    ----------
    spine : ids of the rungs that were traced, bottom first.
    moved : bytes a step by rung, of a cast's file, last line and column.
    """
    done = []
    for cast in casts:
        if cast.status is Status.FIXED and cast.reason in spine:
            above = spine[spine.index(cast.reason) :]
            left = {rung: moved.get(cast.key, {}).get(rung, 0) for rung in above}
            if any(left.values()):
                rung = next(rung for rung, size in left.items() if size)
                said = f"said to be fixed by {cast.reason}, and moves {left[rung]} bytes a step in {rung}"
                cast = replace(cast, status=Status.OPEN, reason=said)
        done.append(cast)
    return done
