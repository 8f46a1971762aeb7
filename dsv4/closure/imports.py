"""Import statements of a module: which files they run, what of the tree they miss, what lies outside."""

import ast

from dsv4.closure import extensions
from dsv4.closure.findings import Findings, Kind
from dsv4.closure.module import HERE, Condition, Module, Placed, Rank
from dsv4.closure.names import BeyondTopError, base
from dsv4.closure.program import Program
from dsv4.closure.tree import Found

GIVEN = {"__path__", "__file__", "__name__", "__doc__", "__spec__", "__dict__"}  # what every module has


def read(program: Program, module: Module, placed: Placed, findings: Findings) -> None:
    """Add what one import statement names."""
    node, condition = placed.node, placed.condition
    if isinstance(node, ast.Import):
        for alias in node.names:
            _module(program, tuple(alias.name.split(".")), node.lineno, condition, findings)
        return
    assert isinstance(node, ast.ImportFrom)
    try:
        parts = tuple(base(node, module.package))
    except BeyondTopError as error:
        findings.note(Kind.BROKEN, node.lineno, str(error))
        return
    start = (HERE, *parts) if node.level else parts
    if _module(program, start, node.lineno, condition, findings):
        for alias in node.names:
            _member(program, start, alias.name, node.lineno, condition, findings)


def _module(
    program: Program, parts: tuple[str, ...], line: int, condition: Condition, findings: Findings
) -> bool:
    """Add a module and the packages around it; say whether it is of the tree."""
    found = program.find(parts)
    findings.run(found, line, "import", condition)
    if found.rest:
        missing(program, parts, found, line, condition, findings)
    return not found.rest


def _member(
    program: Program,
    package: tuple[str, ...],
    name: str,
    line: int,
    condition: Condition,
    findings: Findings,
) -> None:
    """``from package import name``: an attribute if the package has it, else a submodule."""
    found = program.find(package)
    own = found.files[-1] if found.files else ""
    module = program.module(own) if own and not _namespace(found.files, found.folders) else None
    if name == "*":
        for exported in _exported(program, module):
            below = program.find((*package, exported))
            if not below.rest and (module is None or not module.binds(exported)):
                findings.run(below, line, "import *", condition)
        return
    if module is not None and name in module.scope.names:
        return
    whole = (*package, name)
    below = program.find(whole)
    if not below.rest and below.files != found.files:
        findings.run(below, line, "import", condition)
    elif below.rest and not (module and (module.binds(name) or name in GIVEN)):
        missing(program, whole, below, line, condition, findings)


def missing(
    program: Program,
    parts: tuple[str, ...],
    found: Found,
    line: int,
    condition: Condition,
    findings: Findings,
) -> None:
    """Tell of a name that the tree does not hold: broken if the tree has its beginning, else external."""
    name = ".".join(parts).lstrip(".")
    if (compiled := extensions.built(program, name)).references:
        findings.includes += compiled.includes
        for reference in compiled.references:
            findings.refer(
                reference.target, line, "built by setup.py", condition, reference.rank is not Rank.LIVE
            )
        return
    there = name.split(".")[: len(name.split(".")) - len(found.rest)]
    inside = found.files or parts[0] == HERE or (there and program.tree.holds("/".join(there), program.paths))
    if not inside:
        findings.note(Kind.EXTERNAL, line, name.partition(".")[0])
        return
    findings.note(Kind.OPTIONAL if condition.guarded else Kind.BROKEN, line, name)


def _namespace(files: tuple[str, ...], folders: tuple[str, ...]) -> bool:
    """Whether the last part found is a folder without ``__init__.py``."""
    return bool(folders) and f"{folders[0]}/__init__.py".removeprefix("./") not in files


def _exported(program: Program, module: Module | None) -> list[str]:
    """Names in a module's ``__all__``."""
    if module is None:
        return []
    bindings = module.scope.names.get("__all__", [])
    return [text for binding in bindings for text in program.evaluator.values(binding.node, binding.scope)]
