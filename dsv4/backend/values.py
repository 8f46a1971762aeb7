"""What stages on kernels write besides tensors: packed rows, and values that no kernel writes to memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.backend.launches import uncounted
from kernels.rmsnorm_quantise_nvfp4.ref import Rows


def on_cpu(value: Any) -> Tensor:
    """A value of a stage as a tap takes it: on the CPU; BF16 values in FP32."""
    tensor = value if isinstance(value, Tensor) else value.dequantised()
    tensor = tensor.cpu()
    # cast: exempt(a tap's value, on the CPU; no step comes here)
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class Packed:
    """NVFP4 or FP8 rows as a GEMM reads them, which taps see as the values that they stand for."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def dequantised(self) -> Tensor:
        """(T, K) FP32."""
        return self.rows.values()

    def __getitem__(self, rows: Tensor | slice) -> "Packed":
        """Chosen rows."""
        return Packed(type(self.rows)(*(part[rows] for part in self.rows)))

    @staticmethod
    def cat(parts: "Sequence[Packed]") -> "Packed":
        """Rows of several, one after the other."""
        columns = zip(*(part.rows for part in parts), strict=True)
        return Packed(type(parts[0].rows)(*(torch.cat(column) for column in columns)))


class Pending:
    """A value that a fused kernel keeps in registers: made by the unfused ones when a tap asks for it.

    Parameters
    ----------
    make : rows of ``inputs`` -> the value; row by row.
    inputs : tensors whose axis 0 counts the value's rows.
    """

    def __init__(self, make: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.make, self.inputs = make, inputs

    def dequantised(self) -> Tensor:
        """The value; its launches belong to the tap, not to the model."""
        with uncounted():
            return self.make(*self.inputs)

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, rows: Tensor | slice) -> "Pending":
        """Chosen rows."""
        return Pending(self.make, *(part[rows] for part in self.inputs))

    def split(self, counts: Sequence[int]) -> "list[Pending]":
        """Consecutive runs of rows."""
        columns = [part.split(list(counts)) for part in self.inputs]
        return [Pending(self.make, *parts) for parts in zip(*columns, strict=True)]

    @staticmethod
    def cat(parts: "Sequence[Pending | Tensor]") -> Tensor:
        """Rows of several as one tensor: a probe has changed some."""
        made = [part if isinstance(part, Tensor) else part.dequantised() for part in parts]
        return torch.cat([one.to(made[0].device, made[0].dtype) for one in made])


class Fused:
    """Second results of fused kernels, each good for the very value that it was made beside.

    A stage that computes two taps in one launch keeps the second here under the name of the first. The stage that
    writes the second tap takes it if the first tap's value reached it unchanged; where a probe or isolated mode
    put another value in its place, it takes nothing and runs the unfused kernels on what it was given.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, int, Any]] = {}

    def keep(self, name: str, value: Any, second: Any) -> None:
        """Keep ``second``, made in the same launch as ``value``."""
        self._kept[name] = value, _version(value), second

    def take(self, name: str, value: Any) -> Any:
        """What was kept for ``value``, once; None if it is another value, or was written to since."""
        kept, version, second = self._kept.pop(name, (None, -1, None))
        return second if kept is value and version == _version(value) else None


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0
