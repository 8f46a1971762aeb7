"""Faults in kernels' sources: how they are planted, and that no kernel of this tree is without one."""

import ast
import importlib
import traceback
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels import _mutate
from kernels._mutate import Faults, Seen, edited, plant, planted

FOLDER = Path(__file__).parent


@triton.jit
def _twice(x):
    return 2 * x  # of x


@triton.jit
def _double(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, _twice(tl.load(x_ptr + at)))


def doubled(device):
    x, y = torch.arange(4.0, device=device), torch.empty(4, device=device)
    _double[(1,)](x, y, SIZE=4)
    return y.tolist()


def check_doubled(accelerator, by=2):
    assert doubled(accelerator) == [0, by, 2 * by, 3 * by]


FAULTS = [
    Faults(_twice, Seen(check_doubled), {"three times": ("2 * x", "3 * x")}),
    Faults(
        _double, Seen(check_doubled), {"not doubled": ("_twice(tl.load(x_ptr + at))", "tl.load(x_ptr + at)")}
    ),
]
test_faults_of_the_kernel_above_are_seen = planted(FAULTS)


def test_an_edit_is_bound_everywhere_and_taken_back(accelerator):
    true = _double
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, [(_twice, "2 * x", "3 * x")])
        check_doubled(accelerator, by=3)
        assert _double is not true  # a compiled kernel holds what it calls
    assert _double is true
    check_doubled(accelerator)


def test_a_fault_that_no_test_sees_fails(request):
    same = planted([Faults(_twice, Seen(check_doubled), {"the same": ("2 * x", "x * 2")})])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="was not seen"):
        same(by=Seen(check_doubled), edits=[(_twice, "2 * x", "x * 2")], monkeypatch=patch, request=request)


NAMED = r"unknown|_double"  # what is wrong, or by a compiler where


def test_an_error_is_no_fault_that_was_seen(request):
    broken = planted([Faults(_twice, Seen(check_doubled), {})])
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Exception, match=NAMED) as error,
    ):
        broken(
            by=Seen(check_doubled),
            edits=[(_twice, "2 * x", "unknown * x")],
            monkeypatch=patch,
            request=request,
        )
    assert not isinstance(error.value, AssertionError)


@pytest.mark.parametrize(
    ("old", "new", "times"),
    [("4 * x", "3 * x", 0), ("x", "y", 3), ("2 * x", "2 * x", 1)],
    ids=["not there", "more than once", "no change"],
)
def test_an_edit_that_means_nothing_is_refused(old, new, times):
    with pytest.raises(ValueError, match=rf"_twice: '.*' is {times} times in its source"):
        edited(_twice, old, new)


def test_a_traceback_shows_the_faulty_line():
    copy = edited(_twice, "2 * x", "2 / x")
    try:
        copy.fn(0)
    except ZeroDivisionError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        assert last.line == "return 2 / x  # of x"
        assert last.lineno == edited(_twice).fn.__code__.co_firstlineno + 2


def test_callers_are_found_at_any_depth():
    from kernels.formats import nvfp4_kernel
    from kernels.nvfp4_quantise import kernel

    found = _mutate.callers([nvfp4_kernel.finite])
    assert any(function is kernel._nvfp4_quantise_kernel for function in found)
    assert all(function is not nvfp4_kernel.finite for function in found)


@cache
def kernels_and_faults():
    """Launched jit functions of this tree as ``module.name``, and those of them that have faults of their own."""
    for path in sorted(FOLDER.glob("*/*.py")):
        if path.name.endswith("kernel.py") or "faults" in path.name:
            importlib.import_module(f"kernels.{path.parent.name}.{path.stem}")
    every = [f for f in _mutate.functions() if not f.fn.__module__.rpartition(".")[2].startswith("test_")]
    called = {id(other) for function in every for other in _mutate.called(function)}
    found = {name(f) for f in every if id(f) not in called}
    modules = [m for m in _mutate.modules() if m.__name__.endswith("faults") and hasattr(m, "FAULTS")]
    return found, {name(some.function): some for m in modules for some in m.FAULTS if some.edits}


def name(function):
    return f"{function.fn.__module__}.{function.fn.__name__}"


def launched():
    """The same names by the text alone: a jit function that no jit function's body names."""
    defined, named = {}, set()
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name.startswith("test_"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                ".jit" in ast.unparse(d) for d in node.decorator_list
            ):
                module = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
                defined[f"{module}.{node.name}"] = node.name
                named |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                named |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return {full for full, short in defined.items() if short not in named}


def test_every_kernel_has_a_fault_in_its_own_body():
    kernels, faults = kernels_and_faults()
    assert kernels == launched()
    assert len(kernels) > 40
    assert sorted(kernels - set(faults)) == []


def test_every_op_with_a_kernel_plants_its_faults():
    ops = {path.parent.name for path in FOLDER.glob("*/*kernel.py") if not path.name.startswith("test_")}
    assert sorted(op for op in ops if not (FOLDER / op / "test_faults.py").is_file()) == []


def test_every_edit_is_of_text_that_is_there():
    """Those that a GPU must run too."""
    modules = [
        importlib.import_module(f"kernels.{path.parent.name}.{path.stem}")
        for path in FOLDER.glob("*/test_*faults.py")
    ]
    for some in (some for module in modules for some in module.FAULTS):
        for old, new in some.edits.values():
            edited(some.function, old, new)
