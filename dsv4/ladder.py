"""The ladder: which variant stands on which, and what each one changes.

``config.yaml`` maps every rung to its parent and to the one plan field that it sets (or, for
an engineer's own branch, to a commit). This module checks that map and nothing else; it
imports no torch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dsv4.plan import Plan, change, difference, unflatten

OWN = "own model"  # what runs a rung that names no engine
B5 = "B5"  # target: the A/B with an FP32 residual, all rungs on request that change this field


class State(StrEnum):
    """What became of a rung; the one list of states, in files and in the report."""

    PASS = "pass"
    FAIL = "fail"
    BLOCKED = "blocked"
    NOT_NEEDED = "not_needed"
    NOT_RUN = "not_run"
    CANNOT_MEASURE = "cannot_measure"


class LadderError(ValueError):
    """The ladder in the configuration cannot be judged; the message names the rung."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One rung or leaf.

    Attributes
    ----------
    id : name in targets, folders and the report.
    parent : the variant that it stands on; None for the bottom of the ladder.
    plan : its numerics; of an engine what it claims, so that its floor and limits are known.
    engine : the engine in ``config.yaml`` that runs it, or None: this project's own model.
    commit : the commit whose own code runs it, or None. What stands on it runs on that commit too, until
        another is named.
    change : ``{field: (from, to)}`` against the parent: exactly one entry, none at the bottom. For another
        engine than the parent's that entry is ``engine``, whatever plan it claims; for another commit of
        the same plan it is ``commit``.
    spine : stacked and enforced, or a leaf that is only tried and reported.
    needs : variants that must be among the ancestors.
    on_request : not part of ``all``; run by naming it.
    why : one sentence for the report.
    """

    id: str
    parent: str | None
    plan: Plan
    engine: str | None = None
    commit: str | None = None
    change: Mapping[str, tuple[str, str]]
    spine: bool
    needs: tuple[str, ...]
    on_request: bool
    why: str


class Ladder:
    """The checked ladder of a configuration, parents before children.

    Parameters
    ----------
    rungs : mapping of variant id to ``{parent, set, engine, commit, spine, needs, on_request, why}``.
    engines : names that ``engine`` may have.

    Raises
    ------
    LadderError
        No single bottom, unknown parent or engine, a circle, unknown field or value, more or fewer
        than one field changed, a spine rung on a leaf, or a need that is no ancestor.
    """

    def __init__(self, rungs: Mapping[str, Mapping[str, Any]], engines: Collection[str] = ()) -> None:
        self._engines = engines
        self._variants: dict[str, Variant] = {}
        bottoms = [name for name, rung in rungs.items() if rung.get("parent") is None]
        if len(bottoms) != 1:
            raise LadderError(f"ladder: exactly one rung has no parent, found {bottoms or 'none'}")
        for name in rungs:
            self._add(name, rungs, ())

    @classmethod
    def of(cls, variants: Iterable[Variant]) -> "Ladder":
        """Ladder of variants that were made elsewhere, parents first; how many fields each changes is not checked."""
        ladder = cls.__new__(cls)
        ladder._engines, ladder._variants = (), {variant.id: variant for variant in variants}
        return ladder

    def _add(self, name: str, rungs: Mapping[str, Mapping[str, Any]], above: tuple[str, ...]) -> None:
        if name in self._variants:
            return
        if name in above:
            raise LadderError(f"ladder.{name}: circle of parents: {' -> '.join((*above, name))}")
        rung, parent = rungs[name], rungs[name].get("parent")
        if parent is not None and parent not in rungs:
            raise LadderError(f"ladder.{name}.parent = {parent!r}: no such rung; rungs: {', '.join(rungs)}")
        if parent is not None:
            self._add(parent, rungs, (*above, name))
        self._variants[name] = self._variant(name, rung, parent)

    def _variant(self, name: str, rung: Mapping[str, Any], parent: str | None) -> Variant:
        values = {key: str(value) for key, value in (rung.get("set") or {}).items()}
        base = self._variants[parent] if parent is not None else None
        try:
            plan = change(base.plan, values) if base else unflatten(values)
        except ValueError as error:
            raise LadderError(f"ladder.{name}.set: {error}") from error
        engine = rung.get("engine", base.engine if base and "commit" not in rung else None)
        if engine is not None and engine not in self._engines:
            raise LadderError(
                f"ladder.{name}.engine = {engine!r}: no such engine; engines: {', '.join(self._engines) or 'none'}"
            )
        commit = rung.get("commit", base.commit if base and "engine" not in rung else None)
        if commit and engine:
            raise LadderError(
                f"ladder.{name}: runs on engine {engine} or on the code of commit {commit}, not on both"
            )
        changed = difference(base.plan, plan) if base else {}
        if base and engine != base.engine:
            changed = {"engine": (base.engine or OWN, engine or OWN)}
        elif base and commit and commit != base.commit and not changed:
            changed = {"commit": (base.commit or OWN, commit or OWN)}
        if base and len(changed) != 1:
            listed = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items()) or "nothing"
            raise LadderError(
                f"ladder.{name} changes {listed} against {parent}; a rung changes exactly one field"
            )
        spine = bool(rung.get("spine", False))
        if base and spine and not base.spine:
            raise LadderError(
                f"ladder.{name} is on the spine but its parent {parent} is a leaf; nothing stacks on a leaf"
            )
        needs = tuple(rung.get("needs", ()))
        missing = [need for need in needs if need not in self._lineage(parent)]
        if missing:
            raise LadderError(
                f"ladder.{name} needs {', '.join(missing)} among its ancestors; parent is {parent}"
            )
        return Variant(
            id=name,
            parent=parent,
            plan=plan,
            engine=engine,
            commit=commit,
            change=changed,
            spine=spine,
            needs=needs,
            on_request=bool(rung.get("on_request", False)),
            why=str(rung.get("why", "")),
        )

    def _lineage(self, name: str | None) -> list[str]:
        chain = []
        while name is not None:
            chain.append(name)
            name = self._variants[name].parent
        return chain[::-1]

    def __getitem__(self, name: str) -> Variant:
        if name not in self._variants:
            raise LadderError(f"unknown variant {name!r}; variants: {', '.join(self._variants)}")
        return self._variants[name]

    def __contains__(self, name: str) -> bool:
        return name in self._variants

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._variants.values())

    def lineage(self, name: str) -> list[Variant]:
        """The variant and its ancestors, bottom first."""
        return [self._variants[ancestor] for ancestor in self._lineage(self[name].id)]

    def residuals(self) -> list[Variant]:
        """The rungs on request that change the residual's format: one A/B, judged together."""
        return [variant for variant in self if variant.on_request and "residual" in variant.change]

    def about(self, target: str | None) -> list[Variant]:
        """What a page is about, parents first: a variant and its ancestors, those of ``B5``, or with None every rung.

        Raises
        ------
        LadderError
            No such variant; ``B5``, and no rung changes the residual.
        """
        if target is None:
            return list(self)
        if target != B5 or B5 in self:
            return self.lineage(target)
        named = {rung.id for each in self.residuals() for rung in self.lineage(each.id)}
        if not named:
            raise LadderError(
                f"{B5}: no rung on request changes the residual; see `residual` in dsv4/plan.py"
            )
        return [rung for rung in self if rung.id in named]

    def spine(self) -> list[Variant]:
        """Stacked rungs, bottom first."""
        return [variant for variant in self if variant.spine]

    def default(self) -> list[Variant]:
        """What ``all`` runs: everything that is not on request."""
        return [variant for variant in self if not variant.on_request]
