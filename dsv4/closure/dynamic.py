"""Modules that are named by a string: dynamic imports, other interpreters, plugin tables, executed text."""

import ast
import re
from collections.abc import Callable

from dsv4.closure import imports, sources
from dsv4.closure.findings import Findings, Kind
from dsv4.closure.module import Condition, Placed, parse, spelled
from dsv4.closure.program import Program
from dsv4.closure.texts import HOLE

DISCOVERY = {
    "iter_modules",
    "walk_packages",
    "entry_points",
    "iter_entry_points",
    "extend_path",
    "load_module",
}
SHELLS = {"run", "Popen", "call", "check_call", "check_output", "system", "popen", "shell", "getoutput"}
SHELLS |= {"create_subprocess_shell", "create_subprocess_exec", "getstatusoutput"}
TABLE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*:[A-Za-z_][\w.]*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
WORD = rf"[\w./{HOLE}-]+"
BEFORE = r"(?:^|[\s;&|(`'\"/])"
OPTIONS = r"(?:-{1,2}[a-ln-zA-Z]\S*\s+)*"
RUN_MODULE = re.compile(rf"{BEFORE}python[\d.]*\s+{OPTIONS}-m\s+({WORD})")
RUN_SCRIPT = re.compile(rf"{BEFORE}(?:python[\d.]*|torchrun|accelerate\s+launch)\s+{OPTIONS}({WORD}\.py)\b")


class Dynamic:
    """Reads one call, sequence or string of one file at a time."""

    def __init__(self, program: Program, findings: Findings) -> None:
        self.program, self.findings = program, findings
        self.evaluator = program.evaluator

    # what was found

    def module(self, text: str, line: int, how: str, condition: Condition, main: bool = False) -> None:
        """Add a module by its dotted name, in which :data:`HOLE` is not known."""
        if HOLE not in text:
            self._exactly(text, line, how, condition, main)
            return
        if text.startswith(HOLE):
            self.findings.note(Kind.UNKNOWN, line, f"{how} of a name that is built at run time")
            return
        self.findings.note(
            Kind.UNKNOWN, line, f"{how} of {text.replace(HOLE, '*')}: every module that matches may be meant"
        )
        for parts in self.program.tree.modules(text, self.program.paths):
            found = self.program.find(parts)
            self.findings.run(found, line, how, condition, maybe=True)
            if main:
                self._main(parts, found.files, line, how, condition, maybe=True)

    def _exactly(self, text: str, line: int, how: str, condition: Condition, main: bool) -> None:
        parts = tuple(text.split("."))
        found = self.program.find(parts)
        self.findings.run(found, line, how, condition)
        if found.rest:
            imports.missing(self.program, parts, found, line, condition, self.findings)
        elif main:
            self._main(parts, found.files, line, how, condition)

    def _main(
        self,
        parts: tuple[str, ...],
        files: tuple[str, ...],
        line: int,
        how: str,
        condition: Condition,
        maybe: bool = False,
    ) -> None:
        """Of a package ``__main__`` runs, of a module the module itself."""
        inner = self.program.find((*parts, "__main__"))
        ran = inner.files if not inner.rest else files
        if ran:
            self.findings.refer(ran[-1], line, how, condition, maybe, main=True)

    def script(self, text: str, line: int, how: str, condition: Condition) -> None:
        """Add a Python file by its path."""
        tree = self.program.tree
        folder = self.findings.file.rpartition("/")[0]
        if HOLE in text:
            for file in tree.paths(text) if text.strip(HOLE + "/") != ".py" else ():
                self.findings.refer(file, line, how, condition, maybe=True, main=True)
            self.findings.note(Kind.UNKNOWN, line, f"{how} of {text.replace(HOLE, '*')}")
            return
        for place in (text, f"{folder}/{text}"):
            file = tree.relative(place)
            if tree.is_file(file):
                self.findings.refer(str(file), line, how, condition, main=True)
                return

    # where it is looked for

    def call(self, placed: Placed) -> None:
        """Add what a call imports or runs."""
        node = placed.node
        assert isinstance(node, ast.Call)
        parts = self.evaluator.dotted(node.func, placed.scope)
        name = parts[-1] if parts else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        known: dict[str, Callable[[ast.Call, Placed], None]] = {
            "import_module": self._import_module,
            "__import__": self._import_module,
            "find_spec": self._find_spec,
            "spec_from_file_location": self._from_file,
            "SourceFileLoader": self._from_file,
            "run_module": self._run_module,
            "run_path": self._run_path,
            "exec": self._exec,
            "eval": self._exec,
        }
        if name in known and (
            len(parts) > 1
            or name in ("import_module", "__import__", "exec", "eval", "run_module", "run_path")
        ):
            known[name](node, placed)
        elif name in DISCOVERY:
            self.findings.note(Kind.UNKNOWN, node.lineno, f"{name}: modules are discovered at run time")
        elif name in SHELLS or name.startswith(("exec", "spawn")):
            for argument in node.args[:2]:
                for text in self.evaluator.values(argument, placed.scope):
                    self.shell(text, node.lineno, placed.condition)

    def _import_module(self, node: ast.Call, placed: Placed) -> None:
        given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
        package = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "package")]
        if spelled(node.func) == "__import__":
            package = []
        for text in self.evaluator.values(given[0] if given else None, placed.scope):
            if text.startswith("."):
                texts = self.evaluator.values(package[0], placed.scope) if package else ()
                for start in texts:
                    self.module(_beside(text, start), node.lineno, "import_module", placed.condition)
            else:
                how = (
                    "import_module" if len(node.args) and spelled(node.func) != "__import__" else "__import__"
                )
                self.module(text, node.lineno, how, placed.condition)
            self._from_list(text, node, placed)

    def _from_list(self, text: str, node: ast.Call, placed: Placed) -> None:
        """``__import__("a", fromlist=["b"])`` imports a.b as well."""
        lists = [*node.args[3:4], *(word.value for word in node.keywords if word.arg == "fromlist")]
        for name in self.evaluator.values(lists[0], placed.scope) if lists else ():
            found = self.program.find((*text.split("."), name))
            if not found.rest:
                self.findings.run(found, node.lineno, "__import__", placed.condition)

    def _find_spec(self, node: ast.Call, placed: Placed) -> None:
        for text in self.evaluator.values(node.args[0] if node.args else None, placed.scope):
            found = self.program.find(tuple(text.split(".")))
            if not found.rest:
                self.findings.run(found, node.lineno, "find_spec", placed.condition, maybe=True)

    def _from_file(self, node: ast.Call, placed: Placed) -> None:
        given = [*node.args[1:2], *(word.value for word in node.keywords if word.arg in ("location", "path"))]
        for text in self.evaluator.values(given[0] if given else None, placed.scope):
            file = self.program.tree.relative(text)
            if HOLE in text:
                for match in self.program.tree.paths(text) if text.strip(HOLE) != text[-3:] else ():
                    self.findings.refer(match, node.lineno, "loaded by path", placed.condition, maybe=True)
                self.findings.note(
                    Kind.UNKNOWN, node.lineno, f"a module is loaded from {text.replace(HOLE, '*')}"
                )
            elif self.program.tree.is_file(file):
                self.findings.refer(str(file), node.lineno, "loaded by path", placed.condition)

    def _run_module(self, node: ast.Call, placed: Placed) -> None:
        for text in self.evaluator.values(node.args[0] if node.args else None, placed.scope):
            self.module(text, node.lineno, "run_module", placed.condition, main=True)

    def _run_path(self, node: ast.Call, placed: Placed) -> None:
        for text in self.evaluator.values(node.args[0] if node.args else None, placed.scope):
            self.script(text, node.lineno, "run_path", placed.condition)

    def _exec(self, node: ast.Call, placed: Placed) -> None:
        """Text is read as Python; a file's text that is executed is that file."""
        name = spelled(node.func)
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Call) and spelled(first.func) == "compile":
            first = first.args[0] if first.args else None
        for text in self.evaluator.values(first, placed.scope):
            file = self.program.tree.relative(text) if text.endswith(".py") and "\n" not in text else None
            if self.program.tree.is_file(file):
                self.findings.refer(str(file), node.lineno, name, placed.condition)
            elif HOLE in text:
                self.findings.note(Kind.UNKNOWN, node.lineno, f"{name} of text that is built at run time")
            else:
                self._text(text, node.lineno, placed)

    def _text(self, text: str, line: int, placed: Placed) -> None:
        try:
            module = parse(self.findings.file, text)
        except (SyntaxError, ValueError, RecursionError):
            return
        inner = Findings(self.findings.file)
        for part in module.placed:
            if isinstance(part.node, ast.Import | ast.ImportFrom):
                imports.read(self.program, module, part, inner)
            elif isinstance(part.node, ast.Call):
                Dynamic(self.program, inner).call(part)
        for reference in inner.references:
            self.findings.refer(reference.target, line, "exec", placed.condition, maybe=reference.rank > 0)
        for note in inner.notes:
            self.findings.note(note.kind, line, note.text)

    def search_path(self, placed: Placed) -> None:
        """``sys.path.insert(0, …)`` and ``sys.path.append(…)``: a folder of the tree is searched from then on."""
        node = placed.node
        assert isinstance(node, ast.Call)
        name = spelled(node.func)
        if (
            name not in ("sys.path.insert", "sys.path.append", "sys.path.extend", "site.addsitedir")
            or not node.args
        ):
            return
        for text in self.evaluator.values(node.args[-1], placed.scope):
            folder = None if HOLE in text else self.program.tree.relative(text)
            if folder is not None and (self.program.tree.root / folder).is_dir():
                self.findings.paths.append(folder)
            elif HOLE in text:
                self.findings.note(Kind.UNKNOWN, node.lineno, f"{name} of a folder that is built at run time")

    def sequence(self, placed: Placed) -> None:
        """``[sys.executable, "-m", "a.b"]`` and ``["python", "a.py"]``, wherever they stand."""
        node = placed.node
        assert isinstance(node, ast.List | ast.Tuple)
        for before, after in zip(node.elts, node.elts[1:], strict=False):
            first = self.evaluator.values(before, placed.scope) if not isinstance(before, ast.Starred) else ()
            if first == ("-m",):
                for text in self.evaluator.values(after, placed.scope):
                    if text != "pytest":
                        self.module(text, node.lineno, "python -m", placed.condition, main=True)
            elif any(re.fullmatch(r"(.*/)?(python[\d.]*|torchrun)", text) for text in first):
                for text in self.evaluator.values(after, placed.scope):
                    if text.endswith(".py"):
                        self.script(text, node.lineno, "python", placed.condition)

    def shell(self, text: str, line: int, condition: Condition) -> None:
        """Add what a shell command runs."""
        for name in RUN_MODULE.findall(text):
            self.module(name, line, "python -m", condition, main=True)
        for name in RUN_SCRIPT.findall(text):
            self.script(name, line, "python", condition)
        for word in text.split():  # nvcc -o a.so a.cu
            sources.given(self.program, word, line, "shell", condition, self.findings)

    def string(self, text: str, line: int, condition: Condition) -> None:
        """``"a.b:attribute"`` of a plugin table is reached, ``"a.b"`` or ``"a.b.Class"`` may be."""
        if TABLE.fullmatch(text):
            name, _, attribute = text.partition(":")
            found = self.program.find(tuple(name.split(".")))
            module = self.program.module(found.files[-1]) if found.files and not found.rest else None
            if module is not None and module.binds(attribute.partition(".")[0]):
                self.findings.run(found, line, "plugin table", condition)
        elif DOTTED.fullmatch(text):
            parts = tuple(text.split("."))
            found = self.program.find(parts)
            named = self.program.name(parts) if len(found.rest) == 1 else None
            if found.files and (not found.rest or (named and named[0].binds(named[1]))):
                self.findings.run(found, line, "named by a string", condition, maybe=True)


def _beside(name: str, package: str) -> str:
    """A relative module name as an absolute one."""
    dots = len(name) - len(name.lstrip("."))
    above = package.split(".")
    return ".".join([*above[: len(above) - dots + 1], name.lstrip(".")])
