"""Faults planted in a kernel's own source, for tests: an edited copy of a jit function in place of the true one.

A test that compares a kernel with its ref is worth what it would notice. Here one edit of the function's text (a
sign, a mask, a scale left out) is compiled to a fresh jit function, bound wherever the true one was, and the op's own
test is run on it: it must fail as an assertion. The same copy without an edit must pass, so that nothing but the edit
is to blame. An edit whose text is not found exactly once is refused: no fault outlives the line that it changes.
"""

import inspect
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kernels._check import assert_fault_seen


class Seen:
    """An op's own test and the arguments that it is run with: ``Seen(tests.test_every_width, D=130)``.

    What else the test must be given is a fixture of that name.
    """

    def __init__(self, test: Callable[..., None], **arguments: Any) -> None:
        self.test, self.arguments = test, arguments

    def __call__(self, request: pytest.FixtureRequest) -> None:
        """Run the test."""
        parameters = inspect.signature(self.test).parameters.values()
        fixtures = [p.name for p in parameters if p.name not in self.arguments and p.default is p.empty]
        self.test(**self.arguments, **{name: request.getfixturevalue(name) for name in fixtures})

    def __str__(self) -> str:
        """Name of the test and its arguments."""
        arguments = ",".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.test.__name__}({arguments})"


COPIES = itertools.count(1)
Edit = tuple[Any, str, str]  # jit function, text, and what stands in its place


@dataclass(frozen=True)
class Faults:
    """Edits of one jit function: what each does wrong, the text it replaces, and what stands there instead."""

    function: Any
    by: Seen
    edits: dict[str, tuple[str, str]]

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.fn.__name__


def planted(faults: Sequence[Faults], *marks: pytest.MarkDecorator) -> Callable[..., None]:
    """A test of every fault, and of each function's copy without one.

    Without ``marks`` it runs under the interpreter alone: on a GPU a wrong address ends the process. Of a function
    the faults after the first are tried with ``--every-fault``, see conftest.py.
    """
    compiled = not triton.knobs.runtime.interpret
    marks = marks or (pytest.mark.skipif(compiled, reason="no interpreter: this process compiles kernels"),)
    rows = [
        pytest.param(by, [(some.function, "", "") for some in faults if some.by is by], id=f"as it is-{by}")
        for by in dict.fromkeys(some.by for some in faults)
    ]
    tried = set[str]()
    for some in faults:
        for what, edit in some.edits.items():
            more = [pytest.mark.more_faults] if some.name in tried else []
            tried.add(some.name)
            rows.append(pytest.param(some.by, [(some.function, *edit)], id=f"{some.name}-{what}", marks=more))

    @pytest.mark.usefixtures("poisoned")
    @pytest.mark.parametrize(("by", "edits"), rows)
    def test(
        by: Seen, edits: list[Edit], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> None:
        plant(monkeypatch, edits)
        if any(old for _, old, _ in edits):
            assert_fault_seen(lambda: by(request))
        else:
            by(request)

    for mark in marks:
        test = mark(test)
    test.faults = faults  # type: ignore[attr-defined] - for the test that every kernel has some
    return test


def plant(monkeypatch: pytest.MonkeyPatch, edits: Sequence[Edit]) -> None:
    """Bind edited copies wherever their jit functions are bound in this project, until the test ends.

    What calls them is copied too: a compiled caller would keep the true one.
    """
    copies = {id(function): edited(function, old, new) for function, old, new in edits}
    for caller in callers([function for function, _, _ in edits]):
        copies.setdefault(id(caller), edited(caller))
    for module in modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                monkeypatch.setattr(module, name, copies[id(value)])


def edited(function: Any, old: str = "", new: str = "") -> Any:
    """A fresh jit function of the same source and globals, with ``old`` replaced by ``new``.

    Raises
    ------
    ValueError
        ``old`` is not in the source exactly once, or ``new`` says the same.
    """
    fn = function.fn
    lines, first = inspect.getsourcelines(fn)
    source = "".join(lines)
    if old:
        if source.count(old) != 1 or old == new:
            raise ValueError(
                f"{fn.__module__}.{fn.__name__}: {old!r} is {source.count(old)} times in its source and would become"
                f" {new!r}; a fault needs text that is there once, and another in its place"
            )
        source = source.replace(old, new)
    # as many lines before it as in the module, and known to linecache: tracebacks and jit read the source from there
    text = "\n" * (first - 1) + source
    file = f"<copy {next(COPIES)} of {fn.__module__}.{fn.__name__}>"  # PTX names it: no quotes
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), fn.__globals__, scope)
    return scope[fn.__name__]


def modules() -> list[ModuleType]:
    """Modules of kernels that are loaded, tests among them."""
    return [module for name, module in list(sys.modules.items()) if name.startswith("kernels.")]


def is_jit(value: Any) -> bool:
    """Whether this is a function for Triton or Gluon, compiled or interpreted."""
    return isinstance(value, (JITFunction, InterpretedFunction))


def functions() -> list[Any]:
    """Every jit function of the loaded modules, each once."""
    found = {id(value): value for module in modules() for value in vars(module).values() if is_jit(value)}
    return list(found.values())


def called(function: Any) -> Iterator[Any]:
    """Jit functions that a jit function names, bare or as a module's."""
    names, known = function.fn.__code__.co_names, function.fn.__globals__
    spaces = [known, *(vars(known[name]) for name in names if isinstance(known.get(name), ModuleType))]
    yield from (space[name] for name in names for space in spaces if is_jit(space.get(name)))


def callers(functions_: Sequence[Any]) -> list[Any]:
    """Jit functions that reach one of these, at any depth."""
    calls = [(function, {id(other) for other in called(function)}) for function in functions()]
    reached, found = {id(function) for function in functions_}, []
    while new := [f for f, others in calls if others & reached and id(f) not in reached]:
        reached |= {id(function) for function in new}
        found += new
    return found
