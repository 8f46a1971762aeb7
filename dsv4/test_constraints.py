"""Both kinds of machine get the same versions of everything but torch and triton, and pyproject.toml allows them."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OWN = {"torch", "triton"}  # a GPU machine brings its own
KINDS = ("constraints-cpu.txt", "constraints-gpu.txt")


def constraints(name: str) -> dict[str, Requirement]:
    """What pip reads from a constraints file, included files too."""
    found: dict[str, Requirement] = {}
    for line in (ROOT / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-c "):
            more = constraints(text.removeprefix("-c ").strip())
        else:
            more = {one.name: one for one in [Requirement(text)]} if text else {}
        assert not found.keys() & more.keys(), f"{name}: {line} stands twice"
        found |= more
    return found


def wanted() -> list[Requirement]:
    """Every requirement of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [text for texts in project["optional-dependencies"].values() for text in texts]
    return [Requirement(text) for text in (*project["dependencies"], *extra)]


def test_the_two_kinds_agree_on_all_but_torch_and_triton():
    cpu, gpu = (constraints(name) for name in KINDS)
    assert cpu.keys() == gpu.keys() == {need.name for need in wanted()}
    assert {name for name in cpu if str(cpu[name]) != str(gpu[name])} == OWN


@pytest.mark.parametrize("need", wanted(), ids=lambda need: need.name)
def test_every_requirement_is_pinned_to_a_version_that_it_allows(need):
    (pin,) = constraints("constraints-cpu.txt")[need.name].specifier
    assert pin.operator == "=="
    assert pin.version in need.specifier
    if need.name in OWN:
        assert constraints("constraints-gpu.txt")[need.name].specifier == need.specifier
