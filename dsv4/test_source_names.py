"""Names in sources that are kept: the same as read anew, and never those of another content."""

import ast
import json
import os

import pytest

from dsv4 import code_inputs, source_names
from dsv4.closure.names import imported
from dsv4.code_inputs import PACKAGES, ROOT
from dsv4.source_names import Kept, Names


@pytest.fixture
def kept(tmp_path):
    """Return where names are kept, in a folder in which Snakemake works."""
    path = tmp_path / ".snakemake/names.json"
    path.parent.mkdir()
    return path


def names(path, source):
    """Names of a source, kept at ``path``."""
    store = Kept(path)
    found = store.names(source.encode(), "dsv4.run", PACKAGES, "a.py")
    store.write()
    return found


class Plain:
    """Everything that a source imports or has as a string, without a filter, parsed anew."""

    def names(self, source, package, packages, filename):
        nodes = [*ast.walk(ast.parse(source))]
        statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        imports = {name for node in statements for name in imported(node, package.split("."))}
        constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
        return Names(sorted(imports), [value for value in constants if isinstance(value, str)])


def test_every_module_of_the_tree_needs_what_a_plain_reading_of_it_says(monkeypatch, kept):
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = [
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if not file.name.startswith(("test_", "conftest"))
    ]

    def needs(store):
        monkeypatch.setattr(code_inputs, "_kept", lambda root: store)
        found = {module: code_inputs._needs.__wrapped__(module, ROOT) for module in modules}
        return {module: (each.modules, each.files) for module, each in found.items()}

    first = Kept(kept)
    anew = needs(first)
    first.write()
    monkeypatch.setattr(source_names, "read", None)  # all are kept now
    assert len(modules) > 300
    assert needs(Plain()) == anew == needs(Kept(kept))


def test_names_are_of_our_packages_and_of_files(kept):
    page = "a_folder/a_page_with_a_long_name.html.j2"
    source = (
        f"from . import b\nimport os, kernels.op.ref\nx = 'dsv4.e', '{page}', 'dsv4', 'a.py', 'no suffix'"
    )
    expected = Names(["dsv4.run", "dsv4.run.b", "kernels.op.ref"], [page, "dsv4.e"])
    assert names(kept, source) == expected == names(kept, source)


def test_an_edit_of_the_same_size_and_time_is_read(kept, tmp_path):
    file = tmp_path / "a.py"
    for name in ("dsv4.a", "dsv4.b"):
        file.write_text(f"import {name}")
        os.utime(file, (1, 1))
        assert names(kept, file.read_text()).imports == [name]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"found": 1}', "other reader", "other shape"])
def test_what_was_not_written_so_by_this_reader_is_read_anew(kept, content):
    right = names(kept, "import dsv4.a")
    there = json.loads(kept.read_text())
    ((key, _),) = there["found"].items()
    if content == "other reader":
        content = json.dumps({"reader": "0", "found": {key: [["dsv4.wrong"], []]}})
    elif content == "other shape":
        content = json.dumps(there | {"found": {key: 1}})
    kept.write_text(content)
    assert names(kept, "import dsv4.a") == right


def test_of_two_writers_the_last_ones_file_stays_whole(kept):
    stores = [Kept(kept), Kept(kept)]
    for store, name in zip(stores, "ab", strict=True):
        store.names(f"import dsv4.{name}".encode(), "dsv4", PACKAGES, "a.py")
    for store in stores:
        store.write()
    assert [each[0] for each in json.loads(kept.read_text())["found"].values()] == [["dsv4.b"]]
    assert list(kept.parent.iterdir()) == [kept]


def test_a_folder_without_snakemake_and_one_that_takes_no_file_are_left_alone(kept, tmp_path):
    names(tmp_path / "none/names.json", "import dsv4.a")
    assert not (tmp_path / "none").exists()
    kept.mkdir()
    assert names(kept, "import dsv4.a").imports == ["dsv4.a"]
    assert list(kept.parent.iterdir()) == [kept]


def test_old_names_go_when_there_are_too_many(kept, monkeypatch):
    monkeypatch.setattr(source_names, "MOST", 1)
    names(kept, "import dsv4.a")
    names(kept, "import dsv4.b")
    assert json.loads(kept.read_text())["found"] == {}
