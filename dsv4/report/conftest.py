"""Results folders of made-up audits."""

from pathlib import Path

import pytest

from dsv4.report.load import load
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


@pytest.fixture(scope="session")
def page(failing: Path) -> str:
    """The whole page of the audit that fails; it takes seconds."""
    return render(load(failing, CONFIG))
