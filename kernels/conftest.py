"""Kernels run on the GPU where there is one, else under the interpreter; tests share the cores, one thread each."""

import pytest
import torch

from kernels.interpreter import install

INTERPRETED = install()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def accelerator() -> str:
    """Device on which Triton kernels run in this process."""
    return "cpu" if INTERPRETED else "cuda"
