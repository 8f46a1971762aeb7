"""Which way imports go, read from the syntax trees."""

import ast
import re

import pytest

from kernels import _tree
from kernels._tree import OPS, PACKAGES, SOURCES, below, imports, imports_of, offenders, parsed, runs

TORCH_FREE = (
    "dsv4.plan",
    "dsv4.ladder",
    "dsv4.taps",
    "dsv4.config",
    "dsv4.schema",
    "dsv4.dump",
    "dsv4.judge",
    "dsv4.report",
)
FLOOR_MAY_SHARE = {"Weight"}  # what holds a checkpoint's values; it computes nothing


def test_the_walk_sees_this_tree():
    assert "kernels.matmul.ref" in SOURCES
    assert "dsv4.plan" in SOURCES
    seen = {found.module for found in imports("kernels.linear.ref")}
    assert {"torch", "kernels.formats.bf16", "kernels.matmul.ref", "kernels.rounding"} <= seen


@pytest.mark.parametrize(
    ("line", "module", "name"),
    [
        ("import torch.nn", "torch.nn", None),
        ("from torch import Tensor as T", "torch", "Tensor"),
        ("from kernels.formats import bf16", "kernels.formats.bf16", None),
        ("from .matmul import ref", "kernels.matmul.ref", None),
        ("from ..rounding import exact", "kernels.rounding", "exact"),
        ("def f():\n    import triton", "triton", None),
        ("try:\n    import triton\nexcept ImportError: pass", "triton", None),
    ],
)
def test_every_form_of_import_is_seen(line, module, name):
    package = "kernels.op" if line.startswith("from ..") else "kernels"
    found = list(imports_of(ast.parse(line), package, at_start=True, typing_only=False))
    assert [(i.module, i.name) for i in found] == [(module, name)]
    assert found[0].at_start != line.startswith("def")


def test_refs_need_no_triton_and_know_no_model():
    refs = tuple(f"kernels.{op}.ref" for op in OPS)
    assert offenders(refs, ("triton", "dsv4", "transformers")) == []
    formats = offenders(("kernels.formats", "kernels.rounding"), ("triton", "dsv4", "transformers"))
    shared = ("kernels.formats.device", "kernels.formats.nvfp4_kernel")  # by kernels
    assert {found.split(" ->")[0] for found in formats} == set(shared)
    assert offenders(refs, shared) == []


def test_kernels_do_not_import_the_rest():
    assert offenders(("kernels",), ("dsv4", "rules", "data")) == []


def test_formats_do_not_import_ops():
    ops = tuple(f"kernels.{op}" for op in OPS)
    assert offenders(("kernels.formats", "kernels.rounding"), ops) == []


def test_the_model_does_not_import_what_runs_or_judges_it():
    above = ("dsv4.run", "dsv4.judge", "dsv4.report", "dsv4.floor", "dsv4.faults")
    assert offenders(("dsv4.model",), above) == []
    assert offenders(("dsv4.floor",), ("dsv4.run", "dsv4.judge", "dsv4.report")) == []
    assert offenders(("dsv4.run",), ("dsv4.report",)) == []


def test_the_floor_shares_no_op_with_what_it_judges():
    ops = tuple(f"kernels.{op}" for op in OPS)
    shared = {
        f"{module}: {found.module}.{found.name}"
        for module in SOURCES
        if below(module, "dsv4.floor")
        for found in imports(module)
        if below(found.module, *ops) and found.name not in FLOOR_MAY_SHARE
    }
    assert shared == set()


def derives(module: str) -> bool:
    """Whether ``module`` is a script that derives a limit: run by hand and by a test, never by the judge."""
    return module.rpartition(".")[2].startswith("derive_")


def test_the_judge_and_the_report_know_files_only():
    allowed = [
        module for module in SOURCES if below(module, "dsv4.judge", "dsv4.report") and not derives(module)
    ]
    for module in allowed:
        bad = [
            i.module
            for i in imports(module)
            if below(i.module, "torch", "triton", "kernels", "dsv4.model", "dsv4.floor", "dsv4.run")
        ]
        assert not bad, f"{module} imports {bad}"
        assert not [i.module for i in imports(module) if derives(i.module)], (
            f"{module} imports a derive script"
        )


def test_what_files_and_rules_read_needs_no_torch_however_deep():
    for start in [module for module in SOURCES if below(module, *TORCH_FREE) and not derives(module)]:
        seen, stack = {start: start}, [start]
        while stack:
            module = stack.pop()
            for found in runs(module):
                if below(found, "torch", "triton", "transformers", "kernels"):
                    raise AssertionError(f"{start} needs {found}: {seen[module]} -> {found}")
                if found in SOURCES and found not in seen:
                    seen[found] = f"{seen[module]} -> {found}"
                    stack.append(found)


def test_nobody_imports_a_script_or_a_test_helper():
    helpers = re.compile(r"(^|\.)(test_\w+|conftest|_check|_mutate|_oracle|_tree|derive_\w+)$")
    found = [
        f"{module} -> {i.module}.{i.name}"
        for module in SOURCES
        if not below(module, "dsv4.engine.examples")  # run by tests: transformers' model is an oracle too
        for i in imports(module)
        if below(i.module, *PACKAGES) and (helpers.search(i.module) or helpers.search(f".{i.name}"))
    ]
    assert found == []


def test_no_circular_imports():
    assert_no_circle()


def test_a_planted_circle_is_found(tmp_path, monkeypatch):
    lines = {
        "a": "from kernels import b",
        "b": "import kernels.c",
        "c": "def f():\n    from kernels import a",
    }
    planted = {"kernels": tmp_path / "__init__.py"} | {f"kernels.{n}": tmp_path / f"{n}.py" for n in lines}
    (tmp_path / "__init__.py").write_text("")
    for name, line in lines.items():
        (tmp_path / f"{name}.py").write_text(line)
    monkeypatch.setattr(_tree, "SOURCES", planted)
    imports.cache_clear()
    assert_no_circle()  # an import inside a function closes none
    (tmp_path / "c.py").write_text("from kernels import a")
    parsed.cache_clear()
    imports.cache_clear()
    with pytest.raises(
        AssertionError, match=r"circular: kernels\.a -> kernels\.b -> kernels\.c -> kernels\.a"
    ):
        assert_no_circle()
    imports.cache_clear()


def assert_no_circle() -> None:
    """Modules as they are when imported, and names for type checkers; not what stands in functions."""
    done, path = set(), []

    def visit(module: str) -> None:
        if module in path:
            raise AssertionError("circular: " + " -> ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for found in imports(module):
            # a package's own modules are reached through it: the package is loaded first, and is no circle
            loaded = found.at_start or found.typing_only
            if loaded and found.module in _tree.SOURCES and not below(module, found.module):
                visit(found.module)
        path.pop()
        done.add(module)

    for module in _tree.SOURCES:
        visit(module)
