"""Kernel files that are reached by loaders, paths and includes."""

# ruff: noqa: E501 - a tree's text in one line reads better than in pieces
import pytest

from dsv4.closure.conftest import HERE, LOAD, check

CU = {"k/a.cu": "", "k/b.cu": ""}

# name: (text of main.py, other files, live, maybe)
FOUND = {
    "load": (LOAD + "load(name='x', sources=['k/a.cu'])", CU, {"k/a.cu"}, set()),
    "load, positional": (LOAD + "load('x', ['k/a.cu', 'k/b.cu'])", CU, {"k/a.cu", "k/b.cu"}, set()),
    "load, os.path": (
        LOAD
        + "import os\nD = os.path.dirname(os.path.abspath(__file__))\nload('x', [os.path.join(D, 'k', 'a.cu')])",
        CU,
        {"k/a.cu"},
        set(),
    ),
    "load, Path": (LOAD + HERE + "load('x', [str(HERE / 'k' / 'a.cu')])", CU, {"k/a.cu"}, set()),
    "load, built up": (
        LOAD + HERE + "p = HERE\np = p / 'k'\nload('x', [str(p / 'b.cu')])",
        CU,
        {"k/b.cu"},
        set(),
    ),
    "load, comprehension": (
        LOAD + HERE + "load('x', [str(HERE / 'k' / f'{n}.cu') for n in ['a']])",
        CU,
        {"k/a.cu"},
        set(),
    ),
    "load, glob": (
        LOAD + "from glob import glob\nload('x', glob('k/*.cu'))",
        CU,
        {"k/a.cu", "k/b.cu"},
        set(),
    ),
    "load, Path.glob": (
        LOAD + HERE + "load('x', list(map(str, (HERE / 'k').glob('a*.cu'))))",
        CU,
        {"k/a.cu"},
        set(),
    ),
    "load, unknown name": (
        LOAD + HERE + "load('x', [str(HERE / 'k' / f'{input()}.cu')])",
        CU,
        set(),
        {"k/a.cu", "k/b.cu"},
    ),
    "load, list of another module": (
        LOAD + "import lists\nload('x', lists.SOURCES)",
        CU | {"lists.py": "SOURCES = ['k/' + 'a.cu']"},
        {"lists.py", "k/a.cu"},
        set(),
    ),
    "own loader": (
        "from loader import get\nget('a')",
        CU
        | {
            "loader.py": LOAD
            + HERE
            + "def get(name):\n    return load(name, [str(HERE / 'k' / f'{name}.cu')])"
        },
        {"loader.py", "k/a.cu"},
        set(),
    ),
    "own loader, a file": (
        "from loader import get\nget('a.cu')",
        CU | {"loader.py": "def get(file): ..."},
        {"loader.py", "k/a.cu"},
        set(),
    ),
    "own loader, re-exported": (
        "from tools import get\nget(name='b')",
        CU
        | {
            "tools/__init__.py": "from .loader import get",
            "tools/loader.py": "from pathlib import Path\ndef get(name, folder='k'):\n    return Path(folder, name + '.cu').read_text()",
        },
        {"tools/__init__.py", "tools/loader.py", "k/b.cu"},
        set(),
    ),
    "own loader, a method": (
        "from loader import Loader\nLoader('k').get('a')",
        CU
        | {
            "loader.py": "import os\nclass Loader:\n    def __init__(self, folder):\n        self.folder = folder\n    def get(self, name):\n        return open(os.path.join(self.folder, name + '.cu')).read()"
        },
        {"loader.py", "k/a.cu"},
        set(),
    ),
    "open": ("open('k/a.cu').read()", CU, {"k/a.cu"}, set()),
    "read_text": (HERE + "S = HERE / 'k/a.cu'\nS.read_text()", CU, {"k/a.cu"}, set()),
    "extension": (
        "from torch.utils.cpp_extension import CUDAExtension\nCUDAExtension('m', sources=['k/a.cu', 'k/b.cpp'])",
        CU | {"k/b.cpp": ""},
        {"k/a.cu", "k/b.cpp"},
        set(),
    ),
    "extension, imported": (
        "from pkg import _C\nimport fast",
        {
            "pkg/__init__.py": "",
            "setup.py": "from setuptools import setup\nfrom torch.utils.cpp_extension import CUDAExtension\n"
            "setup(ext_modules=[CUDAExtension('pkg._C', ['k/a.cu']), CUDAExtension(name='fast', sources=['k/b.cu'],"
            " include_dirs=['inc']), CUDAExtension('other', ['k/c.cu'])])",
            "k/a.cu": '#include "x.h"',
            "k/b.cu": "",
            "k/c.cu": "",
            "inc/x.h": "",
            "old/x.h": "",
        },
        {"pkg/__init__.py", "k/a.cu", "k/b.cu", "inc/x.h"},
        set(),
    ),
    "own loader, never called": (
        "def get(name):\n    return open(f'k/{name}.cu')",
        CU,
        set(),
        {"k/a.cu", "k/b.cu"},
    ),
    "a name that changes": ("p = 'k/a.cu'\nopen(p)\np = 'k/b.cu'", CU, {"k/a.cu"}, {"k/b.cu"}),
    "own loader, called later": (
        "from functools import partial\nfrom loader import get\nuse = partial(get, 'a')\nmap(get, ['b'])",
        CU
        | {
            "k/c.cu": "",
            "loader.py": HERE + "def get(name):\n    return open(HERE / 'k' / f'{name}.cu').read()",
        },
        {"loader.py", "k/a.cu", "k/b.cu"},
        set(),
    ),
    "own loader, recursive": (
        "def get(name):\n    return open(f'k/{name}.cu') if name else get(name or 'a')\nget('b')",
        CU | {"k/c.cu": ""},
        {"k/a.cu", "k/b.cu"},
        set(),
    ),
    "compiler": ("import os\nos.system('nvcc -O3 k/a.cu -o a.so')", CU, {"k/a.cu"}, set()),
    "compiler, a list": (
        "import subprocess\nsubprocess.run(['nvcc', 'k/a.cu', '-o', 'a.so'])",
        CU,
        {"k/a.cu"},
        set(),
    ),
    "package data": (
        "from importlib.resources import files\nfiles('pkg').joinpath('a.cu').read_text()",
        {"pkg/__init__.py": "", "pkg/a.cu": "", "other/a.cu": ""},
        {"pkg/a.cu"},
        set(),
    ),
    "mentioned": ("OLD = 'k/a.cu'", CU, set(), {"k/a.cu"}),
    "said": ("print('k/a.cu')", {"k/b.cu": ""}, set(), set()),
    "include": (
        "open('k/a.cu')",
        {
            "k/a.cu": '#include "b.cuh"\n#include <vector>',
            "k/b.cuh": '#pragma once\n  #  include "in/c.h"',
            "k/in/c.h": "",
            "k/d.h": "",
        },
        {"k/a.cu", "k/b.cuh", "k/in/c.h"},
        set(),
    ),
    "include in a comment": (
        "open('k/a.cu')",
        {"k/a.cu": '// #include "b.cuh"\n/*\n#include "b.cuh"\n*/', "k/b.cuh": ""},
        {"k/a.cu"},
        set(),
    ),
    "include folder": (
        LOAD + "load('x', ['k/a.cu'], extra_include_paths=['inc'])",
        {"k/a.cu": "#include <h/b.cuh>", "inc/h/b.cuh": ""},
        {"k/a.cu", "inc/h/b.cuh"},
        set(),
    ),
    "include folder, a flag": (
        LOAD + "load('x', ['k/a.cu'], extra_cflags=['-O3', '-Iinc'])",
        {"k/a.cu": '#include "b.cuh"', "inc/b.cuh": "", "other/c.cuh": ""},
        {"k/a.cu", "inc/b.cuh"},
        set(),
    ),
    "include folder not given": (
        "open('k/a.cu')",
        {"k/a.cu": '#include "h/b.cuh"', "inc/h/b.cuh": ""},
        {"k/a.cu"},
        {"inc/h/b.cuh"},
    ),
    "text that includes": (
        "S = '''\n#include \"k/b.cuh\"\n__global__ void f() {}'''\n",
        {"k/b.cuh": ""},
        {"k/b.cuh"},
        set(),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_exactly_what_is_reached(name, tmp_path):
    check(tmp_path, FOUND[name])
