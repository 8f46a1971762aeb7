"""Kernels run on the GPU where there is one, else under the interpreter; tests share the cores, one thread each."""

import pytest
import torch
from _pytest.junitxml import xml_key

from kernels import toolchain
from kernels.interpreter import install

INTERPRETED = install()
PTXAS = None if INTERPRETED else toolchain.select(blackwell=torch.cuda.get_device_capability() >= (10, 0))


def pytest_report_header():
    if INTERPRETED:
        return "kernels: interpreted, no GPU is used"
    return f"kernels: on {torch.cuda.get_device_name()}, {PTXAS}"


@pytest.hookimpl(trylast=True)  # after the plugin that writes the file
def pytest_configure(config):
    """Name in the JUnit file where the tests ran; the benchmark's page takes it from there.

    By ``record_testsuite_property`` it would not leave a worker of pytest-xdist.
    """
    if (junit := config.stash.get(xml_key, None)) is not None:
        junit.add_global_property("device", "interpreter" if INTERPRETED else torch.cuda.get_device_name())


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
