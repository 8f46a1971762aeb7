"""FP8 rows as a GEMM reads them; see :func:`quantise`. The format: :mod:`kernels.formats.fp8_block`."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import fp8_block


class Fp8Rows(NamedTuple):
    """Codes (T, D) float8_e4m3fn; scales (T, D / 128) FP32, powers of two."""

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """What the bytes stand for: (T, D) FP32."""
        return fp8_block.dequantise(self.codes.view(torch.uint8), self.scales, fp8_block.GROUP)


def quantise(x: Tensor) -> Fp8Rows:
    """Store rows as FP8, each run of 128 values under its own scale.

    Parameters
    ----------
    x : (T, D) floating
        128 divides D.

    Returns
    -------
    Fp8Rows of (T, D), (T, D / 128)
    """
    codes, scales = fp8_block.quantise(x, fp8_block.GROUP)
    return Fp8Rows(codes.view(torch.float8_e4m3fn), scales)
