"""A pytest plugin for racecheck: in this process every thread of a group arrives at an mbarrier by itself.

``python -m pytest -p kernels.sparse_attn.each_arrival``; see :func:`~kernels.sparse_attn.hopper_softmax_kernel.arrive`.
"""

from types import ModuleType

from triton.experimental.gluon import language as gl

from kernels.sparse_attn import hopper_kernel, hopper_softmax_kernel


def each_thread_arrives(*others: ModuleType) -> None:
    """From now on, in this process, no group's arrival is one thread's, in attention's and ``others``' kernels."""
    for module in (hopper_kernel, hopper_softmax_kernel, *others):
        vars(module)["ARRIVALS"] = gl.constexpr(128)


def pytest_configure() -> None:
    """Before a kernel is compiled."""
    each_thread_arrives()
