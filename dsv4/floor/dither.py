"""How far FP32 accumulation may move a value before it is rounded."""

import math

import numpy as np
import torch
from torch import Tensor

from dsv4.floor.accumulation import FP32_UNIT


class Dither:
    """Perturb FP64 values as one FP32 accumulation of some length would.

    A sum of K products in FP32 adds K rounding errors of relative size up to 2^-24 (standard
    deviation 2^-24 / sqrt(12) x 2 = 2^-24 / sqrt(3) of the partial sum at hand). Partial sums
    grow as a random walk, sigma sqrt(k), so the error's standard deviation relative to the
    result's own spread is 2^-24 / sqrt(3) * sqrt(K / 2). The spread is taken over the row.

    Parameters
    ----------
    seed : int or None
        None: no perturbation, the emulation itself.
    normals : dtype of the random numbers
        FP32 ones take a fifth of the time; a seed gives other draws in it.
    """

    def __init__(self, seed: int | None, normals: torch.dtype = torch.float64) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._normals = normals

    def normals(self, *shape: int) -> Tensor | None:
        """Draw the random numbers of one call ahead of it, FP64 on the CPU; None without a seed.

        Calls whose numbers are drawn one after the other may then be made as one.
        """
        if self._generator is None:
            return None
        return torch.randn(shape, generator=self._generator, dtype=self._normals).double()

    def __call__(
        self, x: Tensor, terms: int, unit: float = FP32_UNIT, normals: Tensor | None = None
    ) -> Tensor:
        """Return ``x`` as a sum of ``terms`` FP32 products would have it.

        Parameters
        ----------
        x : (..., D) FP64
        terms : int
            Length of the accumulation behind each value; 1: a single rounding.
        unit : float
            Largest relative error of one addition: see :mod:`dsv4.floor.accumulation`.
        normals : (..., D) FP64
            From :meth:`normals`, overwritten; None: drawn here.
        """
        if self._generator is None or x.numel() == 0:
            return x
        spread = x.square().mean(-1, keepdim=True).sqrt() if terms > 1 else x.abs()
        sigma = unit / math.sqrt(3) * math.sqrt(max(terms / 2, 1.0))
        noise = self.normals(*x.shape) if normals is None else normals
        assert noise is not None
        moved = noise.to(x.device).mul_(sigma * spread).add_(x)
        if math.isfinite(moved.sum()):  # then so is every value, and every x
            return moved
        return torch.where(torch.isfinite(x), moved, x)


def draw_seed(seed: int, stream: str, draw: int) -> int:
    """Give every draw of every stream (a prompt, the free runs) its own random numbers, from the audit's seed."""
    entropy = (seed, draw, *stream.encode())
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
