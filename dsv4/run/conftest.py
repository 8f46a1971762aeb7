"""Runs of nano are on one thread."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
