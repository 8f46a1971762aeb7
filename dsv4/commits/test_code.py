"""What of a commit runs: equal but for comments and docstrings is equal, and nothing else is."""

import shutil
from pathlib import Path

import pytest

from dsv4.commits.code import differing, fingerprint

FILES = {
    "dsv4/__init__.py": "",
    "dsv4/run/__init__.py": "",
    "dsv4/run/variant.py": '"""Run."""\nfrom dsv4.model import f\nimport kernels.op.ref\n',
    "dsv4/model.py": '"""Model."""\n\n\ndef f(x):\n    """Doc."""\n    return x + 1  # one more\n',
    "dsv4/unused.py": "x = 1\n",
    "kernels/__init__.py": "",
    "kernels/op/__init__.py": "",
    "kernels/op/ref.py": "TABLE = 'table.json'\n",
    "kernels/op/table.json": "{}",
    "rules/config.schema.yaml": "type: object\n",
}


def tree(folder, **changes):
    """Write a tree of :data:`FILES` with some replaced or, for None, left out."""
    for name, text in (FILES | changes).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("file", "text", "differ"),
    [
        ("dsv4/model.py", '"""Another word."""\n\ndef f(x):\n    return (x + 1)\n', False),
        ("dsv4/unused.py", "x = 2\n", False),
        ("README.md", "words", False),
        ("dsv4/model.py", "def f(x):\n    return x + 2\n", True),
        ("dsv4/model.py", "def f(y):\n    return y + 1\n", True),  # it must be run to be known
        ("dsv4/model.py", '"""Model."""\n\n\ndef f(x):\n    """Doc."""\n    return x + 1.0\n', True),
        ("kernels/op/table.json", "[]", True),
        ("rules/config.schema.yaml", "type: array\n", True),
        ("docs/a.html", "words", False),
        ("Makefile", "all:", False),  # of another program, and no module names it
        ("rules/a.smk", "rule a:", False),
        (".ci/run", "make", False),
        ("kernels/Makefile", "all:", True),
        ("dsv4/test_unused.py", "x = 1\n", False),
        ("data/scale.json", "2", True),  # read through Path(__file__).parents
        ("kernels/op/csrc/y.cu", "code", True),
        ("kernels/op/csrc/y.cuh", "code", True),  # included by a source that is loaded
        ("kernels/op/ref.bin", "0", True),  # read by with_suffix
        ("numpy.py", "", True),  # goes before the installed one
        ("sitecustomize.py", "x = 1\n", True),
        ("data/two.py", "x = 1\n", True),
    ],
)
def test_what_runs_is_told_from_what_does_not(tmp_path, file, text, differ):
    one, other = (
        fingerprint(tree(tmp_path / "a"), "ref"),
        fingerprint(tree(tmp_path / "b", **{file: text}), "ref"),
    )
    assert one is not None
    assert other is not None
    assert differing(one, other) == ([file] if differ else [])


@pytest.mark.parametrize(
    ("code", "file"),
    [
        ("x = open('Makefile').read()\n", "Makefile"),
        ("f = lambda: Path('rules').glob('*.smk')\n", "rules/a.smk"),
    ],
)
def test_a_file_of_another_program_counts_where_a_module_names_it(tmp_path, code, file):
    one, other = (
        fingerprint(tree(tmp_path / name, **{"dsv4/model.py": code, file: name}), "ref")
        for name in ("a", "b")
    )
    assert differing(one, other) == [file]


def test_a_module_that_moved_is_another(tmp_path):
    moved = {"dsv4/model.py": None, "dsv4/model/__init__.py": FILES["dsv4/model.py"]}
    one, other = fingerprint(tree(tmp_path / "a"), "ref"), fingerprint(tree(tmp_path / "b", **moved), "ref")
    assert differing(one, other) == ["dsv4/model.py", "dsv4/model/__init__.py"]


def test_a_link_is_what_it_names(tmp_path):
    for name, target in (("a", "one"), ("b", "two")):
        (tree(tmp_path / name) / "data").symlink_to(target)
    one, other = fingerprint(tmp_path / "a", "ref"), fingerprint(tmp_path / "b", "ref")
    assert differing(one, other) == ["data"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import importlib\nf = lambda op: importlib.import_module(f'kernels.{op}.ref')\n", False),
        ("from importlib import import_module\nimport_module('.op', 'kernels')\n", False),
        ("from importlib import import_module as load\nload('kernels.op')\n", False),
        ("x = __import__(name)\n", False),
        ("exec(open('x.py').read())\n", False),
        ("load = eval\n", False),
        ("import runpy\nrunpy.run_path('dsv4/unused.py')\n", False),
        ("import builtins\nbuiltins.exec('x')\n", False),
        ("from importlib import import_module\nimport_module('dsv4.unused')\n", True),
        ("def f(model):\n    return model.eval()\n", True),
    ],
)
def test_of_code_that_loads_what_it_does_not_name_nothing_is_said(tmp_path, code, told):
    found = fingerprint(tree(tmp_path, **{"dsv4/model.py": code}), "ref")
    assert (found is not None) == told
    assert not told or ("dsv4/unused.py" in found) == ("dsv4.unused" in code)


def test_words_of_this_project_are_no_code(tmp_path):
    """The project itself: words in docs and docstrings are proved to change nothing, on either backend."""
    root = Path(__file__).resolve().parents[2]
    left = shutil.ignore_patterns(".*", "results", "__pycache__", "shared")
    shutil.copytree(root, tmp_path / "a", ignore=left, symlinks=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    for file, old, new in (
        ("README.md", "a", "A"),
        ("docs/engines.md", "a", "A"),
        ("Makefile", "\n", "\n# word\n"),
        ("dsv4/model/stages.py", '"""', '"""Word. '),
        ("dsv4/plan.py", "\n\n", "\n# word\n"),
    ):
        path = tmp_path / "b" / file
        path.write_text(path.read_text().replace(old, new, 1))
    for backend in ("ref", "kernel"):
        one, other = fingerprint(tmp_path / "a", backend), fingerprint(tmp_path / "b", backend)
        assert one is not None
        assert one == other


@pytest.mark.parametrize("changes", [{"dsv4/run/variant.py": None}, {"dsv4/model.py": "def f(:\n"}])
def test_of_what_cannot_be_read_nothing_is_said(tmp_path, changes):
    assert fingerprint(tree(tmp_path, **changes), "ref") is None
