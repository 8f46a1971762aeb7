"""Results folders of made-up audits."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from dsv4.report.load import Audit, load
from dsv4.report.page import render
from dsv4.report.samples import CONFIG, write


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of an audit in which B2 and some leaves fail."""
    return write(tmp_path_factory.mktemp("a") / "nano-3f2a9c1d-77aa01bc", failing=True)


@pytest.fixture(scope="session")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of an audit in which everything that ran passes."""
    return write(tmp_path_factory.mktemp("b") / "nano-3f2a9c1d-77aa01bc", failing=False)


def read(results: Path, target: str | None = None) -> Audit:
    """An audit of a folder that no test changes, read once; the caller may change what it gets."""
    return deepcopy(_read(results, target))


@cache
def _read(results: Path, target: str | None) -> Audit:
    return load(results, CONFIG, target)


@pytest.fixture(scope="session")
def page(failing: Path) -> str:
    """The whole page of the audit that fails; it takes seconds."""
    return render(load(failing, CONFIG))
