"""The shape of the code, read from its syntax trees: what an op folder holds, and which way imports go."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "dsv4")
OPS = (
    "compress",
    "fp8_quantise",
    "gather_dequantise",
    "grouped_ffn",
    "hadamard",
    "hc",
    "index_key",
    "index_logits",
    "index_query",
    "index_topk",
    "kv_norm_rope_store",
    "kv_store",
    "linear",
    "matmul",
    "mhc_rmsnorm_quantise_nvfp4",
    "nvfp4_quantise",
    "page_slots",
    "q_norm_rope_quantise",
    "rmsnorm",
    "rmsnorm_quantise_nvfp4",
    "rope",
    "route",
    "sparse_attn",
    "swiglu",
    "swiglu_quantise_nvfp4",
)
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
HELPERS = ("conftest.py", "_check.py", "_mutate.py", "_oracle.py")  # of tests
FLOOR_MAY_SHARE = {"Weight"}  # what holds a checkpoint's values; it computes nothing


@dataclass(frozen=True)
class Import:
    """One imported module: ``name`` of it if one was named, and when the import happens."""

    module: str
    name: str | None
    at_start: bool  # runs when the module is imported, so that it can close a circle
    typing_only: bool


def sources() -> dict[str, Path]:
    """Modules of ours by dotted name, without tests."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.startswith("test_") or path.name in HELPERS:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports(module: str) -> tuple[Import, ...]:
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(_imports(tree(path), package, at_start=True, typing_only=False))


def _imports(node: ast.AST, package: str, *, at_start: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, None, at_start, typing_only)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*above, *filter(None, [child.module])])
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                is_module = inner in SOURCES
                yield Import(
                    inner if is_module else base, None if is_module else alias.name, at_start, typing_only
                )
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, package, at_start=False, typing_only=True)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, at_start=at_start and not inside, typing_only=typing_only)


def runs(module: str) -> Iterator[str]:
    """Modules that running ``module`` can import, its packages included; not those for type checkers."""
    parts = module.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))
    yield from (found.module for found in imports(module) if not found.typing_only)


def below(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def offenders(inside: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    """``module -> import`` for every direct import of something forbidden, wherever it stands."""
    return [
        f"{module} -> {found.module}"
        for module in SOURCES
        if below(module, *inside)
        for found in imports(module)
        if below(found.module, *forbidden)
    ]


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
    found = list(_imports(ast.parse(line), package, at_start=True, typing_only=False))
    assert [(i.module, i.name) for i in found] == [(module, name)]
    assert found[0].at_start != line.startswith("def")


def test_every_op_is_listed_once():
    folders = [p.parent.name for p in sorted((ROOT / "kernels").glob("*/ref.py"))]
    assert tuple(folders) == OPS


@pytest.mark.parametrize("op", OPS)
def test_an_op_folder_holds_a_sentence_a_ref_and_a_test(op):
    folder = ROOT / "kernels" / op
    init = tree(folder / "__init__.py")
    sentence = ast.get_docstring(init)
    assert len(init.body) == 1, f"kernels/{op}/__init__.py holds more than its docstring"
    assert sentence is not None
    assert re.fullmatch(r"[A-Z][^.]*[^.\s]\.", sentence), (
        f"kernels/{op}/__init__.py: not one sentence: {sentence!r}"
    )
    assert (folder / "ref.py").is_file()
    test = tree(folder / f"test_{op}.py")
    assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in test.body)


def public_functions(op: str) -> list[ast.FunctionDef]:
    nodes = tree(ROOT / "kernels" / op / "ref.py").body
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


SHAPE = re.compile(r"\((?:[^()]*,[^()]*|\.\.\.|)\)|\[[^\]]*,[^\]]*\]")
NO_TENSOR_IN = {"inverse_frequencies"}


@pytest.mark.parametrize("op", OPS)
def test_every_public_function_of_a_ref_states_its_shapes(op):
    functions = public_functions(op)
    assert functions
    assert ast.get_docstring(tree(ROOT / "kernels" / op / "ref.py"))
    for function in functions:
        text = ast.get_docstring(function) or ""
        shapes = SHAPE.findall(text)
        wanted = 1 if function.name in NO_TENSOR_IN else 2  # an input and the result
        # a class of tensors (Weight, Activation, Mix) states the shapes of its own
        named = len(
            re.findall(r"\b(?:Weight|Activation|Mix|Slices|Nvfp4Rows|Fp8Rows|NormedRows|QuantisedQ)\b", text)
        )
        assert len(shapes) + named >= wanted, (
            f"kernels/{op}/ref.py: {function.name} states no shapes: {text!r}"
        )
        hints = [a.annotation for a in (*function.args.args, *function.args.kwonlyargs)] + [function.returns]
        assert all(hint is not None for hint in hints), (
            f"kernels/{op}/ref.py: {function.name} is not annotated"
        )


@pytest.mark.parametrize("op", OPS)
def test_a_rounding_point_is_a_keyword_that_rounds_nothing_by_default(op):
    for function in public_functions(op):
        for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if argument.annotation is not None and ast.unparse(argument.annotation) == "Round":
                assert default is not None
                assert ast.unparse(default) == "exact"
        positional = [ast.unparse(a.annotation) for a in function.args.args if a.annotation is not None]
        assert "Round" not in positional, f"{function.name}: a rounding point must be named by its caller"


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
    helpers = re.compile(r"(^|\.)(test_\w+|conftest|_check|_mutate|_oracle|derive_\w+)$")
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
    monkeypatch.setattr(sys.modules[__name__], "SOURCES", planted)
    imports.cache_clear()
    assert_no_circle()  # an import inside a function closes none
    (tmp_path / "c.py").write_text("from kernels import a")
    tree.cache_clear()
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
            if loaded and found.module in SOURCES and not below(module, found.module):
                visit(found.module)
        path.pop()
        done.add(module)

    for module in SOURCES:
        visit(module)
