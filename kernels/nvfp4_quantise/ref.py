"""NVFP4 rows as a GEMM reads them, packed; see :func:`quantise`. The format: :mod:`kernels.formats.nvfp4`."""

from typing import NamedTuple

from torch import Tensor

from kernels.formats import e2m1, nvfp4


class Nvfp4Rows(NamedTuple):
    """Codes (T, D / 2) uint8, even index in the low nibble; scales (T, D / 16) uint8, E4M3; gsa (T,) FP32."""

    codes: Tensor
    scales: Tensor
    gsa: Tensor

    def values(self) -> Tensor:
        """What the bytes stand for: (T, D) FP32."""
        return nvfp4.dequantise(e2m1.unpack(self.codes), self.scales, self.gsa[:, None])


def quantise(x: Tensor) -> Nvfp4Rows:
    """Store rows as NVFP4, each under its own gsa.

    Parameters
    ----------
    x : (T, D) floating
        16 divides D.

    Returns
    -------
    Nvfp4Rows of (T, D / 2), (T, D / 16), (T,)
    """
    codes, scales, gsa = nvfp4.quantise(x)
    return Nvfp4Rows(e2m1.pack(codes), scales, gsa.squeeze(-1))
