"""How ``config.yaml`` describes an engine, and by what it is known to have changed. Imports no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dsv4.identity import tree_sha256
from dsv4.taps import BY_NAME, MODES

TIMEOUT = 3600.0  # seconds
ONE_BF16 = 2.0**-8  # relative L2 of two sides that each round once to BF16: 2^-9 of a value at most


class EngineError(ValueError):
    """What an engine did not do or gave wrong; the message says what was expected, got, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One entry of ``engines`` in ``config.yaml``.

    Attributes
    ----------
    name : what the ladder calls it.
    key : where it stands in ``config.yaml``.
    command : program and arguments; the job's folder comes last. Empty for a finished dump.
    repo : folder that the command is started in; None: the working directory.
    dump : job folder that was answered elsewhere; None: the command is run.
    ranks : folders of taps that it writes.
    merge : tap -> axis on which the ranks' parts are joined; other taps must be the same in all ranks.
    missing : what it cannot give: tap names, or patterns ``mode/layer/tap`` (``compounded/*/*``).
    sums : how finely it sums FP8 products: ``fp32``, ``hopper_fp8``, or "": as this audit's own backend does.
    timeout : seconds until it is ended.
    """

    name: str
    key: str
    command: tuple[str, ...] = ()
    repo: Path | None = None
    dump: Path | None = None
    ranks: int = 1
    merge: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    sums: str = ""
    timeout: float = TIMEOUT

    @property
    def folder(self) -> Path:
        """Where it is started."""
        return self.repo or Path()


@dataclass(frozen=True, kw_only=True)
class ForeignReference:
    """An engine that gives one of the two references once more, and how far it may be from ours (relative L2)."""

    engine: Engine
    of: str
    bound: float


def parse_reference(content: Mapping[str, Any] | None) -> ForeignReference | None:
    """Build the foreign reference from its checked entry, if there is one.

    Raises
    ------
    EngineError
        See :func:`parse_engine`; or a bound above :data:`ONE_BF16`.
    """
    if content is None:
        return None
    bound = float(content.get("bound", ONE_BF16))
    if bound > ONE_BF16:
        raise EngineError(
            f"reference.bound = {bound:g} is looser than {ONE_BF16:g}, one BF16 rounding on each side"
        )
    engine = parse_engine("reference", content, "reference")
    return ForeignReference(engine=engine, of=content.get("of", "trained"), bound=bound)


def parse_engine(name: str, content: Mapping[str, Any], key: str = "") -> Engine:
    """Build an engine from its checked entry in ``config.yaml``, ``engines.<name>`` if ``key`` is not given.

    Raises
    ------
    EngineError
        Neither a command nor a dump, or both; an unknown tap; a folder that is not there.
    """
    where = key or f"engines.{name}"
    if ("command" in content) == ("dump" in content):
        raise EngineError(f"{where}: give either `command` (with `repo`, if it is started there) or `dump`")
    if "dump" in content and "repo" in content:
        raise EngineError(f"{where}: `repo` goes with `command`; a finished `dump` needs none")
    folders = {key: Path(content[key]) for key in ("repo", "dump") if key in content}
    for key, folder in folders.items():
        if not folder.is_dir():
            raise EngineError(f"{where}.{key} = {folder}: no such folder")
    ranks = content.get("ranks", {})
    merge = dict(ranks.get("merge", {}))
    missing = tuple(content.get("missing", ()))
    for tap in (*merge, *(pattern.rpartition("/")[2] for pattern in missing)):
        if not any(fnmatchcase(known, tap) for known in BY_NAME):
            raise EngineError(f"{where}: no tap {tap!r}; taps: {', '.join(BY_NAME)}")
    for pattern in missing:
        if pattern.count("/") not in (0, 2) or ("/" in pattern and not _some_mode(pattern)):
            raise EngineError(
                f"{where}.missing: {pattern!r} is neither a tap nor mode/layer/tap; modes: {', '.join(MODES)}"
            )
    return Engine(
        name=name,
        key=where,
        command=tuple(content.get("command", ())),
        repo=folders.get("repo"),
        dump=folders.get("dump"),
        ranks=int(ranks.get("n", 1)),
        merge=merge,
        missing=missing,
        sums=content.get("sums", ""),
        timeout=float(content.get("timeout", TIMEOUT)),
    )


def _some_mode(pattern: str) -> bool:
    return any(fnmatchcase(mode, pattern.partition("/")[0]) for mode in MODES)


def declares(patterns: Iterable[str], mode: str, layer: int | str, tap: str) -> bool:
    """Whether one of ``missing``'s patterns says that an engine does not give this tap here."""
    place = f"{mode}/{layer}/{tap}"
    return any(fnmatchcase(place if "/" in pattern else tap, pattern) for pattern in patterns)


def identity(engine: Engine) -> str:
    """One line that changes when the engine does: its entry, and the content of its repository, files or dump."""
    entry = {key: str(value) for key, value in vars(engine).items()}
    found = [json.dumps(entry, sort_keys=True)]
    if engine.repo:
        found.append(tree_sha256(engine.repo))
    if engine.dump:
        found += [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in _files(engine.dump)]
    found += named_files(engine.command, engine.folder)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def named_files(words: Iterable[str], folder: Path) -> list[str]:
    """Those words of a command that are files, as seen from a folder, each with its hash."""
    files = [(word, folder / word) for word in words if (folder / word).is_file()]
    return [f"{word} {hashlib.sha256(path.read_bytes()).hexdigest()}" for word, path in files]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
