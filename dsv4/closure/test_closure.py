"""What is told of a tree, how entries are named, and why a file is live."""

import json
import sys

import pytest

from dsv4.__main__ import main
from dsv4.closure.conftest import LOAD, ranks, search
from dsv4.closure.tree import ClosureError

PKG = {"pkg/__init__.py": "", "pkg/a.py": "", "pkg/b.py": ""}
INIT = "pkg/__init__.py"
CU = {"k/a.cu": "", "k/b.cu": ""}

# name: (text of main.py, other files, notes)
TOLD = {
    "import_module, no prefix": ("import importlib\nimportlib.import_module(input())", {}, {("unknown", 2)}),
    "pkgutil": (
        "import pkgutil, pkg\nfor m in pkgutil.iter_modules(pkg.__path__): ...",
        PKG,
        {("unknown", 2)},
    ),
    "entry points": (
        "from importlib.metadata import entry_points\nentry_points(group='x')",
        {},
        {("unknown", 2)},
    ),
    "exec of unknown text": ("exec(input())", {}, {("unknown", 1)}),
    "library": ("import ctypes\nctypes.CDLL('build/a.so')", CU, {("unknown", 2)}),
    "library of the system": ("import ctypes\nctypes.CDLL('libcuda.so.1')", CU, set()),
    "library like a kernel": ("import ctypes\nctypes.CDLL('liba.so')", CU, {("unknown", 2)}),
    "torch library": ("import torch\ntorch.ops.load_library('a.so')", CU, {("unknown", 2)}),
    "no such module": ("import pkg.nothing", PKG, {("broken", 1)}),
    "no such name": ("from pkg import nothing", PKG, {("broken", 1)}),
    "a name made at run time": ("from pkg import nothing", PKG | {INIT: "def __getattr__(name): ..."}, set()),
    "caught": ("try:\n    import pkg.nothing\nexcept ImportError:\n    pass", PKG, {("optional", 2)}),
    "beyond the top": ("from ... import x", {}, {("broken", 1)}),
    "no such file": (LOAD + "load('x', ['k/no.cu'])", CU, {("broken", 2)}),
    "no such import_module": ("import importlib\nimportlib.import_module('pkg.no')", PKG, {("broken", 2)}),
    "macro": ("open('k/a.cu')", {"k/a.cu": "\n#include WHICH"}, {("unknown", 2)}),
    "unread": ("import pkg.a", PKG | {"pkg/a.py": "def ("}, {("unknown", 1)}),
    "inline": (
        "from torch.utils.cpp_extension import load_inline\nload_inline('x', 'int f();', '__global__ void k() {}')",
        {},
        {("embedded", 2)},
    ),
    "raw": (
        "import cupy\nS = '''\n__global__ void k() {}\n'''\ncupy.RawModule(code=S)",
        {},
        {("embedded", 2), ("embedded", 5)},
    ),
    "inline, unknown": (
        "from torch.utils.cpp_extension import load_inline\nload_inline('x', cpp_sources=input())",
        {},
        {("unknown", 2)},
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_exactly_what_is_told(name, tmp_path):
    text, files, notes = TOLD[name]
    closure = search(tmp_path, {"main.py": text, **files}).closure()
    assert {(note.kind.value, note.line) for note in closure.notes if note.kind != "external"} == notes


def test_types_only_is_said(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.a\nelse:\n    import pkg.b"
    closure = search(tmp_path, {"main.py": text, **PKG, "pkg/a.py": "import deep", "deep.py": ""}).closure()
    assert ranks(closure) == ({INIT, "pkg/b.py"}, set(), {"pkg/a.py", "deep.py"})


def test_the_shortest_chain_has_lines(tmp_path):
    files = {
        "main.py": "import far\n\nimport near",
        "far.py": "import farther",
        "farther.py": "open('k/a.cu')",
        "near.py": "\n\nx = open('k/a.cu')",
        "k/a.cu": '\n#include "a.cuh"',
        "k/a.cuh": "",
    }
    closure = search(tmp_path, files).closure()
    assert closure.reached["k/a.cuh"].shown() == "main.py:3 -> near.py:3 -> k/a.cu:2 -> k/a.cuh"


@pytest.mark.parametrize("entry", ["pkg", "pkg.a", "pkg/a.py", "pkg.a:run", "pkg/a.py:run"])
def test_entries_of_every_kind(tmp_path, entry):
    files = PKG | {"pkg/a.py": "def run():\n    import pkg.b", "pkg/__main__.py": "import pkg.a"}
    closure = search(tmp_path, files, [entry]).closure()
    own = {"pkg": {INIT, "pkg/__main__.py"}}.get(entry, set())
    init = set() if entry == "pkg/a.py" else {INIT}
    assert set(closure.reached) == own | init | {INIT, "pkg/a.py", "pkg/b.py"}


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("k/a.cu", "kernel source is no entry"),
        ("nothing", "no such module"),
        ("no/such.py", "no such script"),
        ("pkg.a:nothing", "has no nothing"),
        ("../outside.py", "no such script"),
    ],
)
def test_what_is_no_entry_is_refused(tmp_path, entry, why):
    with pytest.raises(ClosureError, match=why):
        search(tmp_path, PKG | CU, [entry])


def test_tests_and_environments_are_left_out_and_counted(tmp_path):
    files = {
        "main.py": "",
        "test_main.py": "",
        "tests/helper.py": "",
        "env/pyvenv.cfg": "",
        "env/lib/x.py": "",
        ".git/hooks/x.py": "",
        "dead.py": "",
    }
    closure = search(tmp_path, files).closure()
    assert closure.dead == ("dead.py",)
    assert closure.left_out == {"tests": 2, "virtual environments": 1, "hidden and build folders": 1}


def test_a_root_that_is_a_package_imports_itself_by_name(tmp_path):
    files = {
        "__init__.py": "",
        "main.py": "from pkg.sub import a\nfrom . import b",
        "sub/a.py": "import pkg.c",
    }
    files |= {"b.py": "", "c.py": "", "d.py": ""}
    closure = search(tmp_path / "pkg", files).closure()
    assert set(closure.reached) == set(files) - {"d.py"}
    assert closure.dead == ("d.py",)


def test_snakefiles_start_stages(tmp_path):
    files = {
        "Snakefile": 'include: "rules/a.smk"\nfrom pkg import b\n',
        "rules/a.smk": 'rule a:\n    output: "x"\n    shell:\n        "python -m pkg.a"\n        " --x {output}"\n',
        "rules/unused.smk": "",
        **PKG,
    }
    closure = search(tmp_path, files, ["Snakefile"]).closure()
    assert set(closure.reached) == {"Snakefile", "rules/a.smk", *PKG}
    assert closure.reached["pkg/a.py"].shown() == "Snakefile:1 -> rules/a.smk:4 -> pkg/a.py"
    assert closure.dead == ("rules/unused.smk",)


ARCHIVED = {"main.py": "open('k/a.cu')\n", "k/a.cu": "", "k/b.cu": ""}


@pytest.mark.parametrize(
    ("glob", "status", "said"),
    [
        ("k/a.cu", 1, "archived k/a.cu: k/a.cu is live: main.py:1 -> k/a.cu"),
        ("k/*.cu", 1, "archived k/*.cu: k/a.cu is live: main.py:1 -> k/a.cu"),
        ("**/a.cu", 1, "archived **/a.cu: k/a.cu is live: main.py:1 -> k/a.cu"),
        ("k/b.cu", 0, "archived k/b.cu: all 1 dead"),
        ("*.cu", 0, "archived *.cu: no file of the tree matches"),
    ],
)
def test_an_archived_file_that_is_live_is_exit_status_1(tmp_path, capsys, monkeypatch, glob, status, said):
    search(tmp_path, ARCHIVED)
    command = ["closure", "main.py", "--root", str(tmp_path), "--archived", glob]
    assert run(monkeypatch, *command, "--json", str(tmp_path / "out.json")) == status
    assert said in capsys.readouterr().err
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["counts"] == {"live": 2, "maybe": 0, "types only": 0, "dead": 1}
    assert written["dead"] == ["k/b.cu"]
    assert written["live"][0]["chain"] == [
        {"file": "main.py", "line": 1, "how": "open"},
        {"file": "k/a.cu", "line": None, "how": ""},
    ]
    assert written["archived"][0]["verdict"] == {1: "live", 0: "dead" if "b" in glob else "no file"}[status]


def test_a_file_that_may_be_reached_is_said_and_not_failed(tmp_path, capsys, monkeypatch):
    search(tmp_path, ARCHIVED | {"main.py": "open(f'k/{input()}.cu')\n"})
    assert run(monkeypatch, "closure", "main.py", "--root", str(tmp_path), "--archived", "k/*.cu") == 0
    assert "k/b.cu is maybe: main.py:1 -> k/b.cu" in capsys.readouterr().err


def test_a_usage_error_is_exit_status_2(tmp_path, capsys, monkeypatch):
    search(tmp_path, ARCHIVED)
    assert run(monkeypatch, "closure", "k/a.cu", "--root", str(tmp_path)) == 2
    assert run(monkeypatch, "closure", "main.py", "--root", str(tmp_path / "nowhere")) == 2
    printed = capsys.readouterr()
    assert "kernel source is no entry" in printed.err
    assert "no such folder" in printed.err
    assert printed.out == ""


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dsv4", *arguments])
    return main()
