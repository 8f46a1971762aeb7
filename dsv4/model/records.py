"""How a cache stores rows: the byte formats behind one interface.

A record turns rows into data bytes and scale bytes and back. Pages hold the data of their
tokens, then the scales, as ``kernels.formats.kv_record`` lays them out.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.formats import aligned_record, e2m1, e4m3, fp8_scaled, mxfp4, ue8m0
from kernels.formats.kv_record import ROPE, RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.hadamard.ref import hadamard


class Record(Protocol):
    """One row's bytes. ``decode`` returns values (T, K) and, where a kernel keeps it apart, a row scale (T, 1)."""

    @property
    def data_bytes(self) -> int:
        """Bytes of a row's data."""
        ...

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales."""
        ...

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, K) FP32 -> data (T, data_bytes) and scales (T, scale_bytes), uint8."""
        ...

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bytes -> values (T, K) FP32 in the basis that the next op computes in, and their row scale."""
        ...


@dataclass(frozen=True)
class ExactRecord:
    """FP32 as it is: the ``plain`` reference."""

    size: int

    @property
    def data_bytes(self) -> int:
        """Four a value."""
        return 4 * self.size

    @property
    def scale_bytes(self) -> int:
        """None."""
        return 0

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        return x.contiguous().view(torch.uint8), torch.empty(len(x), 0, dtype=torch.uint8, device=x.device)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """See :class:`Record`."""
        return data.contiguous().view(torch.float32), None


@dataclass(frozen=True)
class Fp8Record:
    """nope in FP8 with a UE8M0 scale per 64, rope in BF16: the architecture's own cache (584 bytes at nope 448)."""

    nope: int

    @property
    def layout(self) -> RecordLayout:
        """Byte layout of tokens and pages."""
        return RecordLayout(self.nope)

    @property
    def data_bytes(self) -> int:
        """Nope + 128."""
        return self.layout.data_bytes

    @property
    def scale_bytes(self) -> int:
        """One per 64 nope, padded to 8."""
        return self.layout.scale_bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        return self.layout.encode(x)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """See :class:`Record`."""
        return self.layout.decode(data, scales), None


@dataclass(frozen=True)
class AlignedRecord:
    """One FP32 power-of-two scale a token."""

    nope: int

    @property
    def data_bytes(self) -> int:
        """Nope + 128."""
        return self.nope + 2 * ROPE

    @property
    def scale_bytes(self) -> int:
        """One FP32."""
        return 4

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        data, scale = aligned_record.encode(x)
        return data, scale.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """See :class:`Record`."""
        return aligned_record.decode(data, scales.contiguous().view(torch.float32)), None


@dataclass(frozen=True)
class Nvfp4Record:
    """nope in NVFP4 (gsa a row), rope in BF16: the ruled-out 4-bit cache (384 bytes at nope 448)."""

    nope: int

    @property
    def layout(self) -> Nvfp4Layout:
        """Byte layout of tokens and pages."""
        return Nvfp4Layout(self.nope)

    @property
    def data_bytes(self) -> int:
        """Half a byte a nope value, two a rope value."""
        return self.layout.data_bytes

    @property
    def scale_bytes(self) -> int:
        """One E4M3 per 16 nope and the FP32 gsa."""
        return self.layout.scale_bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        return self.layout.encode(x)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """See :class:`Record`."""
        return self.layout.decode(data, scales), None


@dataclass(frozen=True)
class Fp8Key:
    """Index key in E4M3 with one FP32 scale: the plan's cache, of unrotated, unrounded values."""

    size: int

    @property
    def data_bytes(self) -> int:
        """One a value."""
        return self.size

    @property
    def scale_bytes(self) -> int:
        """One FP32."""
        return 4

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        codes, scale = fp8_scaled.quantise(x)
        return codes, scale.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        return e4m3.decode(data), scales.contiguous().view(torch.float32)


@dataclass(frozen=True)
class Fp4Key:
    """Index key rotated by Hadamard, then MXFP4 per 32: how the model was trained."""

    size: int

    @property
    def data_bytes(self) -> int:
        """Half a byte a value."""
        return self.size // 2

    @property
    def scale_bytes(self) -> int:
        """One UE8M0 per 32."""
        return self.size // 32

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Record`."""
        codes, scale = mxfp4.quantise(hadamard(x))
        return e2m1.pack(codes), ue8m0.encode(scale)

    def decode(self, data: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """See :class:`Record`; values stay rotated, as the scores want them."""
        return mxfp4.dequantise(e2m1.unpack(data), ue8m0.decode(scales)), None
