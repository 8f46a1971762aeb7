"""Runs of nano are on one thread, and their dumps are not packed."""

import pytest
import torch

from dsv4.conftest import unpacked


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


@pytest.fixture(scope="module", autouse=True)
def _unpacked():
    with unpacked():
        yield
