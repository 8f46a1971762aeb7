"""What a model's stages run on: refs on the CPU, or kernels on this machine's GPU; asked of the driver, without torch.

The references and the noise floor are always refs. Variants on kernels have a results folder of their own, named by
the device, so that no dump of one backend or card stands for another's.
"""

import ctypes
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Kind = Literal["ref", "kernel"]
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # CUdevice_attribute, cuda.h
INTERPRETER = "TRITON_INTERPRET"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU: its name and compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What variants run on.

    Attributes
    ----------
    kind : refs or kernels.
    device : where torch puts their tensors.
    name : of the device, for labels.
    capability : compute capability; None without a GPU.
    """

    kind: Kind
    device: str
    name: str
    capability: tuple[int, int] | None = None

    @property
    def suffix(self) -> str:
        """Of the results folder: nothing for refs, ``-nvidia_h200`` for kernels on that card."""
        return "" if self.kind == "ref" else "-" + re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")


class NoDeviceError(ValueError):
    """Kernels are asked for, and there is nothing to run them on."""


@cache
def card() -> Card | None:
    """The first CUDA device that the driver shows, None without one."""
    cuda, count = _driver()
    if cuda is None or not count:
        return None
    device = ctypes.c_int()
    name, numbers = ctypes.create_string_buffer(256), []
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, len(name), device)
    for attribute in (COMPUTE_MAJOR, COMPUTE_MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return Card(name=name.value.decode(), capability=(numbers[0], numbers[1]))


def _driver() -> tuple[ctypes.CDLL | None, int]:
    """CUDA's driver and how many devices it shows."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    count = ctypes.c_int()
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return cuda, 0 if failed else count.value


def visible() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each device that the driver shows, in its order."""
    _, count = _driver()
    given = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return (given or [str(number) for number in range(count)])[:count]


def resolve(wanted: str) -> Backend:
    """``auto``, ``ref`` or ``kernel`` of config.yaml on this machine: auto is kernels where there is a GPU.

    Raises
    ------
    NoDeviceError
        ``kernel`` without a GPU, and Triton's interpreter is not asked for either.
    """
    found = card()
    if wanted == "ref" or (wanted == "auto" and found is None):
        return Backend(kind="ref", device="cpu", name="cpu")
    if found is not None:
        return Backend(kind="kernel", device="cuda", name=found.name, capability=found.capability)
    if os.environ.get(INTERPRETER) == "1":
        return Backend(kind="kernel", device="cpu", name="Triton's interpreter")
    raise NoDeviceError(
        f"backend = kernel: the driver shows no CUDA device; set backend: auto or ref, or {INTERPRETER}=1"
    )
