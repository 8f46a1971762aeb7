"""Search a tree from its entry points until nothing new is found."""

import ast
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dsv4.closure import imports, snakefile, sources
from dsv4.closure.dynamic import Dynamic
from dsv4.closure.findings import Findings, Kind, Note, Reference
from dsv4.closure.module import Module, Rank, spelled
from dsv4.closure.once import Key, room
from dsv4.closure.program import Program
from dsv4.closure.tree import KERNEL_SUFFIXES, ClosureError, Tree, matches
from dsv4.closure.values import CallSite

Node = tuple[str, bool]  # file, and whether it runs as __main__


@dataclass(frozen=True)
class Step:
    """One link of a chain: ``file``, and the line of it that names the next one."""

    file: str
    line: int | None = None
    how: str = ""


@dataclass(frozen=True)
class Reached:
    """A file that an entry reaches."""

    file: str
    rank: Rank
    chain: tuple[Step, ...]

    def shown(self) -> str:
        """``entry.py:12 -> a.py:3 -> b.cu``."""
        return " -> ".join(f"{step.file}:{step.line}" if step.line else step.file for step in self.chain)


@dataclass
class Closure:
    """What was found.

    Attributes
    ----------
    root : absolute.
    entries : as they were given.
    reached : every file that an entry reaches, by its path.
    dead : files of the tree that none reaches, tests left out.
    notes : unknown, broken, external and embedded, sorted.
    left_out : what was not looked at, and how much.
    """

    root: Path
    entries: tuple[str, ...]
    reached: dict[str, Reached]
    dead: tuple[str, ...]
    notes: tuple[Note, ...]
    left_out: dict[str, int] = field(default_factory=dict)

    def of(self, rank: Rank) -> list[str]:
        """Files of one rank."""
        return [file for file, reached in self.reached.items() if reached.rank is rank]

    def told(self, kind: Kind) -> list[Note]:
        """Notes of one kind."""
        return [note for note in self.notes if note.kind is kind]


class Search:
    """One tree, which several closures may share: a file is read once."""

    def __init__(self, root: Path, entries: Sequence[str]) -> None:
        if not root.is_dir():
            raise ClosureError(f"{root}: no such folder")
        self.tree = Tree(root.resolve())
        self.tree.files  # noqa: B018 - listed now, so that a folder that cannot be read shows here
        self.entries = tuple(entries)
        paths = [".", *(["src"] if (self.tree.root / "src").is_dir() else [])]
        self.program = Program(self.tree, paths)
        self.starts = {entry: self._start(entry) for entry in entries}
        self._read: dict[str, tuple[Findings, frozenset[Key], list[tuple[Key, CallSite]]]] = {}
        self._settle()

    # entry points

    def _start(self, entry: str) -> list[Node]:
        path, _, function = entry.partition(":")
        suffix = Path(path).suffix
        if suffix in KERNEL_SUFFIXES:
            raise ClosureError(
                f"{entry}: a kernel source is no entry; name the script or module that loads it"
            )
        file = self.tree.relative(path)
        if suffix in (".py", ".smk") or "/" in path or (file in self.tree.files):
            return self._script(entry, file, function)
        parts = tuple(path.split("."))
        found = self.program.find(parts)
        if found.rest or not (found.files or found.folders):
            raise ClosureError(f"{entry}: no such module below {self.tree.root}")
        if function:
            module = self.program.module(found.files[-1]) if found.files else None
            if module is None or not module.binds(function.partition(".")[0]):
                raise ClosureError(f"{entry}: {path} has no {function}")
            return [(file, False) for file in found.files]
        main = self.program.find((*parts, "__main__"))
        files = main.files if not main.rest else found.files
        return [*((file, False) for file in files[:-1]), *((file, True) for file in files[-1:])]

    def _script(self, entry: str, file: str | None, function: str) -> list[Node]:
        if file is None or not self.tree.is_file(file):
            main = f"{file}/__main__.py"
            if file is None or not self.tree.is_file(main):
                raise ClosureError(f"{entry}: no such script below {self.tree.root}")
            file = main
        if function:
            module = self.program.module(file)
            if module is None or not module.binds(function.partition(".")[0]):
                raise ClosureError(f"{entry}: {file} has no {function}")
        folder = file.rpartition("/")[0] or "."
        self.program.paths = tuple(dict.fromkeys((folder, *self.program.paths)))
        return [(file, not function)]

    # reading

    def _settle(self) -> None:
        """Read reached files until search paths, include folders and calls stay as they are."""
        while True:
            if self._grow():
                continue
            if self.program.evaluator.settled:
                return
            self.program.evaluator.settled = True  # a parameter that no known call gives is now unknown
            asked = {key for _, keys, _ in self._read.values() for key in keys}
            self._drop(asked - self.program.calls.keys())

    def _grow(self) -> bool:
        """One pass over what is reached now; whether it told anything new."""
        calls: dict[Key, list[CallSite]] = {}
        paths, includes = list(self.program.paths), list(self.program.includes)
        for file in self._walk(Rank.TYPES, self.entries, ()):
            findings, _, made = self._reading(file)
            paths += findings.paths
            includes += findings.includes
            for key, site in made:
                calls.setdefault(key, []).append(site)
        known = self.program
        new_paths, new_includes = tuple(dict.fromkeys(paths)), tuple(dict.fromkeys(includes))
        everywhere = new_paths != known.paths or new_includes != known.includes
        changed = {key for key in calls.keys() | known.calls.keys() if calls.get(key) != known.calls.get(key)}
        known.paths, known.includes, known.calls = new_paths, new_includes, calls
        return self._drop(None if everywhere else changed)

    def _drop(self, changed: set[Key] | None) -> bool:
        """Forget what rests on calls of these functions, or all; whether anything does."""
        self.program.evaluator.once.forget(changed)
        stale = [file for file, (_, asked, _) in self._read.items() if changed is None or asked & changed]
        for file in stale:
            del self._read[file]
        return bool(stale)

    def _reading(self, file: str) -> tuple[Findings, frozenset[Key], list[tuple[Key, CallSite]]]:
        if file not in self._read:
            self.program.evaluator.once.asked = set()
            with room():
                findings, calls = self._findings(file)
            self._read[file] = findings, frozenset(self.program.evaluator.once.asked), calls
        return self._read[file]

    def _findings(self, file: str) -> tuple[Findings, list[tuple[Key, CallSite]]]:
        if Path(file).suffix in KERNEL_SUFFIXES:
            return sources.read(self.program, file), []
        if not file.endswith(".py"):
            return snakefile.read(self.program, file), []
        module = self.program.module(file)
        if module is None:
            return Findings(file), []
        return read(self.program, module)

    # walking

    def _walk(
        self, rank: Rank, entries: Collection[str], without: Collection[str]
    ) -> dict[str, tuple[Step, ...]]:
        """Shortest chain to every file over references up to ``rank``."""
        starts = (node for entry in entries for node in self.starts[entry])
        came: dict[Node, tuple[Node, Reference] | None] = dict.fromkeys(starts)
        queue = deque(node for node in came if node[0] not in without)
        first: dict[str, Node] = {}
        while queue:
            node = queue.popleft()
            file, main = node
            first.setdefault(file, node)
            for reference in self._reading(file)[0].references:
                follows = reference.rank <= rank and (main or not reference.main_only)
                target = (reference.target, reference.main)
                if follows and target not in came and reference.target not in without:
                    came[target] = node, reference
                    queue.append(target)
        return {file: _chain(came, node) for file, node in first.items()}

    def closure(self, entries: Sequence[str] = (), without: Collection[str] = ()) -> Closure:
        """What these entries reach, or all that were given, not through the files ``without``."""
        entries = tuple(entries) or self.entries
        reached: dict[str, Reached] = {}
        for rank in Rank:
            for file, chain in self._walk(rank, entries, without).items():
                reached.setdefault(file, Reached(file, rank, chain))
        tests = {file for file in self.tree.files if self.tree.is_test(file) and file not in reached}
        notes = {note for file in reached for note in self._reading(file)[0].notes}
        notes |= {note for file, note in self.program.unread.items() if file in reached}
        left = dict(self.tree.left_out) | ({"tests": len(tests)} if tests else {})
        dead = tuple(sorted(self.tree.files - set(reached) - tests - set(without)))
        return Closure(
            self.tree.root, entries, dict(sorted(reached.items())), dead, tuple(sorted(notes)), left
        )


def _chain(came: dict[Node, tuple[Node, Reference] | None], node: Node) -> tuple[Step, ...]:
    steps = [Step(node[0])]
    while (link := came[node]) is not None:
        node, reference = link
        steps.append(Step(node[0], reference.line, reference.how))
    return tuple(reversed(steps))


def read(program: Program, module: Module) -> tuple[Findings, list[tuple[Key, CallSite]]]:
    """Read one Python file: what it names, and the calls of functions of the tree in it."""
    findings, calls = Findings(module.file), list[tuple[Key, CallSite]]()
    dynamic = Dynamic(program, findings)
    for placed in module.placed:
        node = placed.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.read(program, module, placed, findings)
        elif isinstance(node, ast.Call):
            for call in (node, _later(node)):
                if call is not None and (called := program.called(placed.scope, call)) is not None:
                    calls.append(((called[0].file if called[0] else "", called[1]), (placed.scope, call)))
            dynamic.call(placed)
            dynamic.search_path(placed)
            sources.call(program, placed, findings)
        elif isinstance(node, ast.List | ast.Tuple):
            dynamic.sequence(placed)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dynamic.string(node.value, node.lineno, placed.condition)
            sources.string(program, node.value, node.lineno, placed.condition, findings)
    return findings, calls


@cache  # one node a call, as calls are compared by their nodes
def _later(node: ast.Call) -> ast.Call | None:
    """``partial(f, "x")``, ``pool.submit(f, "x")`` and ``map(f, names)`` as a call of ``f``."""
    name = spelled(node.func).rpartition(".")[2]
    if name not in ("partial", "submit", "apply_async", "map", "imap") or not node.args:
        return None
    return ast.copy_location(ast.Call(node.args[0], node.args[1:], node.keywords), node)


def archived(
    closure: Closure, globs: Iterable[str], files: Iterable[str]
) -> list[tuple[str, int, list[Reached]]]:
    """For each glob: how many files of the tree it names, and those that are reached."""
    listed = sorted({*files, *closure.reached})
    found = []
    for glob in globs:
        named = [file for file in listed if matches(file, glob)]
        found.append((glob, len(named), [closure.reached[file] for file in named if file in closure.reached]))
    return found
