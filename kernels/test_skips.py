"""A test that does not run says what is missing: the device or the file, as ``no GPU: …``. No folder is passed over."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from kernels._tree import PACKAGES, ROOT, parsed

FOLDERS = (*PACKAGES, "rules", "data")
NAMES = ("skip", "skipif", "xfail", "importorskip")
AT_ONCE = ("pytest.skip", "pytest.xfail")  # whose reason comes first


def reasons(tree: ast.AST) -> Iterator[str]:
    """How the reason of every skip begins; of one without a text, its code."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in NAMES:
            continue
        name = ast.unparse(node)
        if name.startswith("pytest."):
            call = calls.get(id(node))
            yield (_begins(call, name) if call else None) or ast.unparse(call or node)


def _begins(call: ast.Call, name: str) -> str | None:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    given += call.args[:1] if name in AT_ONCE else []
    text = given[0] if given else None
    first = text.values[0] if isinstance(text, ast.JoinedStr) else text
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def test_every_skip_of_this_tree_names_what_is_missing():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [path for path in files if any(name in path.read_text(encoding="utf-8") for name in NAMES)]
    found = [(path.relative_to(ROOT), said) for path in files for said in reasons(parsed(path))]
    assert len(found) > 20
    assert [f"{path}: {said}" for path, said in found if not said.startswith("no ")] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pytest.skip('no GPU: not interpreted')", "no GPU: not interpreted"),
        ("pytest.skip(f'no Hopper: {why}')", "no Hopper: "),
        ("pytest.skip(why)", "pytest.skip(why)"),
        ("pytest.skip()", "pytest.skip()"),
        ("pytest.mark.skipif(GPU, reason='slow')", "slow"),
        ("pytest.mark.skipif(GPU)", "pytest.mark.skipif(GPU)"),
        ("pytest.importorskip('rich')", "pytest.importorskip('rich')"),
        ("x = pytest.mark.xfail", "pytest.mark.xfail"),
    ],
)
def test_a_skip_is_seen_in_every_form(line, said):
    assert list(reasons(ast.parse(line))) == [said]


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")]
    passed_over = [
        f"{path}: {pattern}"
        for path in files
        for pattern in pytestconfig.getini("norecursedirs")
        if any(fnmatch(folder, pattern) for folder in path.parts[:-1])
    ]
    assert passed_over == []
    assert {path.parts[0] for path in files} == {*pytestconfig.getini("testpaths")}
