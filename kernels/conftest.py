"""Kernels run on the GPU where there is one, else under the interpreter; tests share the cores, one thread each."""

import pytest
import torch

from kernels import toolchain
from kernels.interpreter import install

INTERPRETED = install()
PTXAS = None if INTERPRETED else toolchain.select(blackwell=torch.cuda.get_device_capability() >= (10, 0))


def pytest_report_header():
    if INTERPRETED:
        return "kernels: interpreted, no GPU is used"
    return f"kernels: on {torch.cuda.get_device_name()}, {PTXAS}"


@pytest.fixture(scope="session", autouse=True)
def _device(record_testsuite_property):
    """Name in the JUnit file where the tests ran; the benchmark's page takes it from there."""
    record_testsuite_property("device", "interpreter" if INTERPRETED else torch.cuda.get_device_name())


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


@pytest.fixture
def poisoned(monkeypatch):
    """``torch.empty`` gives memory full of NaN, or of 0xaa: what a kernel does not write shows."""
    empty = torch.empty

    def filled(*args, **kwargs):
        memory = empty(*args, **kwargs)
        return memory.fill_(float("nan") if memory.is_floating_point() else 0xAA)

    monkeypatch.setattr(torch, "empty", filled)
