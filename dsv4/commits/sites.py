"""How many sites a commit moved: stages whose taps differ, and what of the code that it touched explains them."""

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from dsv4.commits.code import without_docstrings
from dsv4.commits.history import git
from dsv4.config import ConfigError
from dsv4.dump import DumpReader
from dsv4.judge.claims_by_field import READERS, stage_order
from dsv4.model.transformer import Layer
from dsv4.stored import same_bytes
from dsv4.taps import BY_NAME, MODEL, MODES, PHASES

Place = tuple[str, Layer, str]  # mode, layer, tap


def moved(own: Path, other: Path, names: tuple[str, str], prompts: Iterable[str]) -> set[Place]:
    """Taps that differ in any bit, or that only one side has.

    Parameters
    ----------
    own, other : folders of two commits' dumps.
    names : their ``variant`` attributes.
    """
    found: set[Place] = set()
    for prompt in prompts:
        with (
            DumpReader(own / f"{prompt}.h5", {"variant": names[0]}) as one,
            DumpReader(other / f"{prompt}.h5", {"variant": names[1]}) as two,
        ):
            for mode in MODES:
                for phase in PHASES:
                    found |= _moved(one, two, mode, phase)
    return found


def _moved(one: DumpReader, two: DumpReader, mode: str, phase: str) -> set[Place]:
    found: set[Place] = set()
    for layer in dict.fromkeys([*one.layers(mode, phase), *two.layers(mode, phase)]):
        for tap in dict.fromkeys([*one.taps(mode, phase, layer), *two.taps(mode, phase, layer)]):
            both = one.has(mode, phase, layer, tap) and two.has(mode, phase, layer, tap)
            if not both or not same_bytes(one.get(mode, phase, layer, tap), two.get(mode, phase, layer, tap)):
                found.add((mode, layer, tap))
    return found


def sites(places: Collection[Place], claimed: Collection[str] = ()) -> list[dict[str, Any]]:
    """Stages that moved by themselves, in the order of a layer: not those that only read what another stored.

    Parameters
    ----------
    claimed : stages that the change of the plan may move; they are one site together.
    """
    isolated = [(layer, tap) for mode, layer, tap in places if mode == "isolated"]
    stages = {BY_NAME[tap].stage for _, tap in isolated}
    readers = {reader for stage in stages for reader in READERS.get(stage, ())}
    found = []
    for stage in sorted(stages - readers - set(claimed), key=stage_order):
        here = [(layer, tap) for layer, tap in isolated if BY_NAME[tap].stage == stage]
        layers = sorted({layer for layer, _ in here}, key=lambda layer: (layer == MODEL, layer))
        taps = [tap for tap in BY_NAME if any(tap == name for _, name in here)]
        found.append({"stage": stage, "layers": layers, "taps": taps})
    return found


def readers(places: Collection[Place], claimed: Collection[str] = ()) -> list[str]:
    """Stages that moved and read what another that moved stores: whether they moved by themselves too is not seen."""
    stages = {BY_NAME[tap].stage for mode, _, tap in places if mode == "isolated"}
    found = {reader for stage in stages for reader in READERS.get(stage, ())}
    return sorted(found & stages - set(claimed), key=stage_order)


@dataclass(frozen=True)
class Unit:
    """An op's folder, or one function, that a commit touched.

    Attributes
    ----------
    name : ``kernels/rmsnorm`` or ``dsv4/model/stages.py: LayerStages._q_a``.
    defines : names under which others call what changed in it.
    mentions : names that stand in what changed, before or after.
    """

    name: str
    defines: frozenset[str]
    mentions: frozenset[str]


def touched(repo: Path, old: str, new: str, files: Iterable[str]) -> list[list[str]]:
    """Names of what was touched in ``files``, those together that are one op: a changed op and who calls it."""
    units: dict[str, Unit] = {}
    for file in files:
        for unit in _units(file, _definitions(repo, old, file), _definitions(repo, new, file)):
            known = units.get(unit.name, Unit(unit.name, frozenset(), frozenset()))
            units[unit.name] = Unit(unit.name, known.defines | unit.defines, known.mentions | unit.mentions)
    return _together(list(units.values()))


def _together(units: list[Unit]) -> list[list[str]]:
    groups: list[list[Unit]] = []
    for unit in units:
        near = [group for group in groups if any(_linked(unit, other) for other in group)]
        groups = [group for group in groups if group not in near] + [
            [*(u for group in near for u in group), unit]
        ]
    return [[unit.name for unit in group] for group in groups]


def _linked(one: Unit, other: Unit) -> bool:
    return bool(one.mentions & other.defines or other.mentions & one.defines)


def _units(file: str, old: Mapping[str, ast.AST], new: Mapping[str, ast.AST]) -> Iterable[Unit]:
    changed = [
        name
        for name in dict.fromkeys([*old, *new])
        if name not in old or name not in new or ast.dump(old[name]) != ast.dump(new[name])
    ]
    parts = Path(file).parts
    op = "/".join(parts[:2]) if parts[0] == "kernels" and len(parts) > 2 else ""
    for name in changed:
        mentions = _changed_names(old.get(name), new.get(name))
        yield Unit(op or f"{file}: {name}", frozenset([name.rpartition(".")[2]]), frozenset(mentions))
    if not changed:
        yield Unit(op or file, frozenset(), frozenset())


def _definitions(repo: Path, sha: str, file: str) -> dict[str, ast.AST]:
    """Functions and assigned names of a commit's file by qualified name, other statements together; no imports.

    Empty if the file is not there or no Python.
    """
    try:
        tree = without_docstrings(ast.parse(git(repo, "show", f"{sha}:{file}")))
    except (ConfigError, SyntaxError, ValueError):
        return {}
    found: dict[str, ast.AST] = {"other statements": ast.Module([], [])}
    _collect(tree.body, "", found)
    return found


def _collect(body: list[ast.stmt], prefix: str, found: dict[str, Any]) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[f"{prefix}{node.name}"] = node
        elif isinstance(node, ast.ClassDef):
            _collect(node.body, f"{prefix}{node.name}.", found)
            node.body = []
            found[f"{prefix}{node.name}"] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found[f"{prefix}{', '.join(ast.unparse(target) for target in targets)}"] = node
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            found["other statements"].body.append(node)


def _changed_names(old: ast.AST | None, new: ast.AST | None) -> set[str]:
    """Names in what differs between two syntax trees, with the function of a call whose arguments differ."""
    if old is None or new is None or type(old) is not type(new):
        return {name for tree in (old, new) if tree for name in _names(tree)}
    pairs, alone = _aligned(list(ast.iter_child_nodes(old)), list(ast.iter_child_nodes(new)), old)
    differ = [pair for pair in pairs if ast.dump(pair[0]) != ast.dump(pair[1])]
    if not differ and not alone:  # in a field that is no tree: a name, a number
        return {*_names(old), *_names(new)}
    found = {name for pair in differ for name in _changed_names(*pair)}
    found |= {name for node in alone for name in _names(node)}
    return found | ({*_names(old.func)} if isinstance(old, ast.Call) else set())


def _aligned(
    ours: list[ast.AST], theirs: list[ast.AST], parent: ast.AST
) -> tuple[list[tuple[ast.AST, ast.AST]], list[ast.AST]]:
    """Children of two nodes that stand for one another, and those that have no partner.

    Statements find their partners among equal ones, so that one that was added concerns no other;
    of an expression whose parts are more or fewer every part counts.
    """
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True)), []
    if not hasattr(parent, "body") or isinstance(parent, ast.expr):
        return [], [*ours, *theirs]
    pairs: list[tuple[ast.AST, ast.AST]] = []
    alone: list[ast.AST] = []
    dumps = [ast.dump(node) for node in ours], [ast.dump(node) for node in theirs]
    for _, i, i_end, j, j_end in SequenceMatcher(None, *dumps, autojunk=False).get_opcodes():
        if i_end - i == j_end - j:
            pairs += zip(ours[i:i_end], theirs[j:j_end], strict=True)
        else:
            alone += [*ours[i:i_end], *theirs[j:j_end]]
    return pairs, alone


def _names(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
