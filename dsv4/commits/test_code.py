"""What of a commit runs: equal but for comments and docstrings is equal, and nothing else is."""

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


def test_a_module_that_moved_is_another(tmp_path):
    moved = {"dsv4/model.py": None, "dsv4/model/__init__.py": FILES["dsv4/model.py"]}
    one, other = fingerprint(tree(tmp_path / "a"), "ref"), fingerprint(tree(tmp_path / "b", **moved), "ref")
    assert differing(one, other) == ["dsv4/model.py", "dsv4/model/__init__.py"]


@pytest.mark.parametrize("changes", [{"dsv4/run/variant.py": None}, {"dsv4/model.py": "def f(:\n"}])
def test_of_what_cannot_be_read_nothing_is_said(tmp_path, changes):
    assert fingerprint(tree(tmp_path, **changes), "ref") is None
