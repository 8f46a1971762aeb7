"""How much work a search does, and what it says where it stops looking."""

import pytest

from dsv4.closure import once
from dsv4.closure.conftest import LOAD, search
from dsv4.closure.findings import Kind
from dsv4.closure.module import Rank
from dsv4.closure.values import Evaluator


def chain(length):
    """A kernel's name that goes through ``length`` functions to the call that loads it."""
    passed = "".join(f"def pass_{n}(name):\n    pass_{n - 1}(name)\n" for n in range(1, length))
    return {
        "main.py": f"{LOAD}def pass_0(name):\n    load(name)\n{passed}pass_{length - 1}('a.cu')\n",
        "a.cu": "",
    }


def questions(monkeypatch, folder, length):
    """Expressions that were read, each time that one was."""
    asked = []
    inner = Evaluator._values
    with monkeypatch.context() as patch:
        patch.setattr(
            Evaluator, "_values", lambda self, node, scope: asked.append(node) or inner(self, node, scope)
        )
        search(folder, chain(length)).closure()
    return len(asked)


@pytest.mark.parametrize("length", [once.DEEP // 4, once.DEEP])
def test_work_grows_with_the_tree_and_not_with_its_square(monkeypatch, tmp_path, length):
    """Also where a chain is deeper than the search looks: twice and four times the limit are both past it."""
    small = questions(monkeypatch, tmp_path, 2 * length)
    large = questions(monkeypatch, tmp_path, 4 * length)
    assert small > 2 * length
    assert large <= 2.1 * small


def test_chain_as_deep_as_the_limit_is_followed(tmp_path):
    closure = search(tmp_path, chain(once.DEEP - 1)).closure()
    assert closure.of(Rank.LIVE) == ["a.cu", "main.py"]


def test_deeper_than_the_limit_is_said_to_be_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(once, "DEEP", 20)
    files = chain(40)
    source = files["main.py"].replace("load(name)", "load('x', sources=[name])")
    closure = search(tmp_path, files | {"main.py": source}).closure()
    assert [note.text for note in closure.told(Kind.UNKNOWN)] == ["load: sources are named at run time"]
