"""The shape of an op folder, read from its syntax trees: what it holds, and what its functions state."""

import ast
import re

import pytest

from kernels._tree import OPS, ROOT, parsed


def test_every_op_is_listed_once():
    folders = [p.parent.name for p in sorted((ROOT / "kernels").glob("*/ref.py"))]
    assert tuple(folders) == OPS


@pytest.mark.parametrize("op", OPS)
def test_an_op_folder_holds_a_sentence_a_ref_and_a_test(op):
    folder = ROOT / "kernels" / op
    init = parsed(folder / "__init__.py")
    sentence = ast.get_docstring(init)
    assert len(init.body) == 1, f"kernels/{op}/__init__.py holds more than its docstring"
    assert sentence is not None
    assert re.fullmatch(r"[A-Z][^.]*[^.\s]\.", sentence), (
        f"kernels/{op}/__init__.py: not one sentence: {sentence!r}"
    )
    assert (folder / "ref.py").is_file()
    test = parsed(folder / f"test_{op}.py")
    assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in test.body)


def public_functions(op: str) -> list[ast.FunctionDef]:
    nodes = parsed(ROOT / "kernels" / op / "ref.py").body
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


SHAPE = re.compile(r"\((?:[^()]*,[^()]*|\.\.\.|)\)|\[[^\]]*,[^\]]*\]")
NO_TENSOR_IN = {"inverse_frequencies"}


@pytest.mark.parametrize("op", OPS)
def test_every_public_function_of_a_ref_states_its_shapes(op):
    functions = public_functions(op)
    assert functions
    assert ast.get_docstring(parsed(ROOT / "kernels" / op / "ref.py"))
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
