"""Modules that are reached by imports, by names in strings and through other interpreters."""

import pytest

from dsv4.closure.conftest import HERE, check

PKG = {"pkg/__init__.py": "", "pkg/a.py": "", "pkg/b.py": ""}
INIT = "pkg/__init__.py"
CU = {"k/a.cu": "", "k/b.cu": ""}

# name: (text of main.py, other files, live, maybe)
FOUND = {
    # imports
    "plain": ("import pkg.a", PKG, {INIT, "pkg/a.py"}, set()),
    "as": ("import pkg.a as x", PKG, {INIT, "pkg/a.py"}, set()),
    "package alone": ("import pkg", PKG, {INIT}, set()),
    "from, a submodule": ("from pkg import a", PKG, {INIT, "pkg/a.py"}, set()),
    "from, an attribute": ("from pkg import a", PKG | {INIT: "a = 1"}, {INIT}, set()),
    "from, what the package imported": (
        "from pkg import f",
        PKG | {INIT: "from .a import f"},
        {INIT, "pkg/a.py"},
        set(),
    ),
    "relative": (
        "import pkg.a",
        PKG | {"pkg/a.py": "from . import b"},
        {INIT, "pkg/a.py", "pkg/b.py"},
        set(),
    ),
    "relative, a module": (
        "import pkg.a",
        PKG | {"pkg/a.py": "from .b import x", "pkg/b.py": "x = 1"},
        {INIT, "pkg/a.py", "pkg/b.py"},
        set(),
    ),
    "relative, two up": (
        "import pkg.s.t",
        PKG | {"pkg/s/__init__.py": "", "pkg/s/t.py": "from ..a import x", "pkg/a.py": "x = 1"},
        {INIT, "pkg/s/__init__.py", "pkg/s/t.py", "pkg/a.py"},
        set(),
    ),
    "star": ("from pkg import *", PKG | {INIT: "__all__ = ['a']"}, {INIT, "pkg/a.py"}, set()),
    "star without __all__": ("from pkg import *", PKG, {INIT}, set()),
    "namespace package": (
        "import ns.deep.m",
        {"ns/deep/m.py": "", "ns/other.py": ""},
        {"ns/deep/m.py"},
        set(),
    ),
    "from a namespace package": ("from ns import m", {"ns/m.py": "", "ns/other.py": ""}, {"ns/m.py"}, set()),
    "from the root, relative": (
        "import pkg.a",
        PKG | {"pkg/a.py": "from .. import c", "c.py": ""},
        {INIT, "pkg/a.py", "c.py"},
        set(),
    ),
    "lazy attributes": (
        "import pkg",
        PKG
        | {
            INIT: "import importlib\nT = {'f': '.a'}\ndef __getattr__(n):\n    importlib.import_module(T[n], __name__)"
        },
        {INIT, "pkg/a.py"},
        set(),
    ),
    "in a function": ("def f():\n    import pkg.a", PKG, {INIT, "pkg/a.py"}, set()),
    "in a condition": (
        "import sys\nif sys.argv:\n    import pkg.a\nelse:\n    import pkg.b",
        PKG,
        {INIT, "pkg/a.py", "pkg/b.py"},
        set(),
    ),
    "in try": (
        "try:\n    import pkg.a\nexcept ImportError:\n    import pkg.b",
        PKG,
        {INIT, "pkg/a.py", "pkg/b.py"},
        set(),
    ),
    "never": ("if False:\n    import pkg.a", PKG, set(), set()),
    "main of a library": (
        "import lib",
        PKG | {"lib.py": "if __name__ == '__main__':\n    import pkg.a"},
        {"lib.py"},
        set(),
    ),
    "main of the entry": ("if __name__ == '__main__':\n    import pkg.a", PKG, {INIT, "pkg/a.py"}, set()),
    "beside a built-in": ("import sys", {"sys.py": ""}, set(), set()),
    "package before module": (
        "import both",
        {"both/__init__.py": "", "both.py": ""},
        {"both/__init__.py"},
        set(),
    ),
    "docstring": ('"""See pkg.a and k/a.cu."""', PKG | CU, set(), set()),
    # search paths
    "sys.path": ("import sys\nsys.path.insert(0, 'lib')\nimport m", {"lib/m.py": ""}, {"lib/m.py"}, set()),
    "sys.path from __file__": (
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'lib'))\nimport m",
        {"lib/m.py": ""},
        {"lib/m.py"},
        set(),
    ),
    "sys.path from Path": (
        HERE + "import sys\nsys.path.insert(0, str(HERE / 'lib'))\nimport m",
        {"lib/m.py": ""},
        {"lib/m.py"},
        set(),
    ),
    "src layout": ("import m", {"src/m/__init__.py": ""}, {"src/m/__init__.py"}, set()),
    # dynamic imports
    "import_module": ("import importlib\nimportlib.import_module('pkg.a')", PKG, {INIT, "pkg/a.py"}, set()),
    "import_module, renamed": (
        "from importlib import import_module as im\nim('pkg.a')",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "import_module, relative": (
        "import importlib\nimportlib.import_module('.a', 'pkg')",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "import_module, a constant": (
        "import importlib\nNAME = 'pkg' + '.a'\nimportlib.import_module(NAME)",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "import_module, a loop": (
        "import importlib\nfor n in ('a', 'b'):\n    importlib.import_module(f'pkg.{n}')",
        PKG | {"pkg/c.py": ""},
        {INIT, "pkg/a.py", "pkg/b.py"},
        set(),
    ),
    "import_module, a table": (
        "import importlib\nT = {'x': 'pkg.a'}\nimportlib.import_module(T[input()])",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "import_module, f-string": (
        "import importlib\nimportlib.import_module(f'pkg.{input()}')",
        PKG | {"other.py": ""},
        {INIT} - {INIT},
        {INIT, "pkg/a.py", "pkg/b.py"},
    ),
    "import_module, concatenation": (
        "import importlib, sys\nimportlib.import_module('pkg.' + sys.argv[1])",
        PKG,
        set(),
        {INIT, "pkg/a.py", "pkg/b.py"},
    ),
    "import_module, format": (
        "import importlib, sys\nimportlib.import_module('pkg.{}'.format('a'))",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "import_module, an argument": (
        "import importlib\ndef get(n):\n    return importlib.import_module('pkg.' + n)\nget('b')",
        PKG,
        {INIT, "pkg/b.py"},
        set(),
    ),
    "__import__": ("__import__('pkg.a')", PKG, {INIT, "pkg/a.py"}, set()),
    "__import__, fromlist": ("__import__('pkg', fromlist=['b'])", PKG, {INIT, "pkg/b.py"}, set()),
    "spec from a file": (
        "import importlib.util as u\nu.spec_from_file_location('x', 'odd/x.py')",
        {"odd/x.py": "", "odd/y.py": ""},
        {"odd/x.py"},
        set(),
    ),
    "exec": ("exec('import pkg.a')", PKG, {INIT, "pkg/a.py"}, set()),
    "exec of a file": ("exec(open('odd/x.py').read())", {"odd/x.py": ""}, {"odd/x.py"}, set()),
    "plugin table": (
        "T = {'x': 'pkg.a:run'}",
        PKG | {"pkg/a.py": "def run(): pass"},
        {INIT, "pkg/a.py"},
        set(),
    ),
    "no plugin": ("T = 'pkg.a:nothing'", PKG, set(), set()),
    "dotted string": (
        "T = ['pkg.a', 'pkg.b.K']",
        PKG | {"pkg/b.py": "class K: pass"},
        set(),
        {INIT, "pkg/a.py", "pkg/b.py"},
    ),
    # other interpreters
    "run_module": (
        "import runpy\nrunpy.run_module('pkg')",
        PKG | {"pkg/__main__.py": "import pkg.a"},
        {INIT, "pkg/__main__.py", "pkg/a.py"},
        set(),
    ),
    "run_path": ("import runpy\nrunpy.run_path('odd/x.py')", {"odd/x.py": ""}, {"odd/x.py"}, set()),
    "subprocess": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pkg.a'])",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "subprocess, a name": (
        "import subprocess, sys\ncmd = [sys.executable, '-m', 'pkg.a']\nsubprocess.run(cmd)",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "subprocess, a script": (
        "import subprocess\nsubprocess.run(['python', 'odd/x.py'])",
        {"odd/x.py": ""},
        {"odd/x.py"},
        set(),
    ),
    "shell, in brackets": (
        "import os\nos.system('((.venv/bin/python -m pkg.a) && (python -m pkg.b || true))')",
        PKG,
        {INIT, "pkg/a.py", "pkg/b.py"},
        set(),
    ),
    "shell, an f-string": (
        "import subprocess, sys\nsubprocess.run(f'{sys.executable} -m pkg.a {sys.argv[1]}', shell=True)",
        PKG,
        {INIT, "pkg/a.py"},
        set(),
    ),
    "shell": (
        "import os\nos.system('python -u -m pkg.a --x 1 && python3 odd/x.py')",
        PKG | {"odd/x.py": ""},
        {INIT, "pkg/a.py", "odd/x.py"},
        set(),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_exactly_what_is_reached(name, tmp_path):
    check(tmp_path, FOUND[name])
