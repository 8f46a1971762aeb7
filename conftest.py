"""What holds for every test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _gradients_on():
    """A stage switches gradients off for its whole process; the next test must not inherit that."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_grad_enabled(True)
