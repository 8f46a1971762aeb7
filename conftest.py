"""What holds for every test."""

import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--every-fault``: every fault that is planted in a kernel; without it the first of each of its functions."""
    parser.addoption(
        "--every-fault", action="store_true", help="plant every fault in the kernels, not only the first"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``--every-fault`` asks for, unless it is given or a test is named."""
    if config.getoption("--every-fault") or any("::" in name for name in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("more_faults")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("more_faults")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse an xdist that ignores groups: it would make what a group shares once a process, and not say so."""
    in_group = getattr(item.config.option, "loadgroup", False) and item.get_closest_marker("xdist_group")
    if in_group and "@" not in item.nodeid:
        pytest.fail(
            f"xdist_group is ignored: this pytest-xdist does not know pytest {pytest.__version__};"
            " install the versions of constraints.txt (make setup)",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def _gradients_on():
    """A stage switches gradients off for its whole process; the next test must not inherit that."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_grad_enabled(True)
