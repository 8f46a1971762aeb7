"""mHC's mixing matrices in the reference's dumps: row and column sums and the spectral norm of every comb.

``X'_k = sum_j comb[j, k] X_j``: no stream mix can grow the residual while the spectral norm is 1 or less. Sinkhorn ends
on columns; rows are off 1 by what its 20 iterations leave, 5% at most in nano, where the norm reaches 1.011.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.dump import DumpError, DumpReader
from dsv4.taps import PHASES

EXPANSIVE = 1 + 1e-3  # spectral norm above which the claim does not hold; column sums alone are off by 1e-6


@dataclass
class Mixing:
    """Every comb that was seen.

    Attributes
    ----------
    row, column : smallest and largest sum of a row, of a column.
    spectral_norm : the largest.
    prompts : dumps that were read.
    """

    row: tuple[float, float] = (np.inf, -np.inf)
    column: tuple[float, float] = (np.inf, -np.inf)
    spectral_norm: float = 0.0
    prompts: int = 0

    def add(self, comb: np.ndarray) -> None:
        """Note combs (T, N, N) FP64, all finite."""
        if len(comb):
            self.row, self.column = _wider(self.row, comb.sum(2)), _wider(self.column, comb.sum(1))
            largest = float(np.linalg.norm(comb, 2, axis=(1, 2)).max())
            self.spectral_norm = max(self.spectral_norm, largest)

    @property
    def non_expansive(self) -> bool:
        """Whether no mix grew the streams."""
        return self.spectral_norm <= EXPANSIVE

    def as_dict(self) -> dict[str, Any]:
        """As ``residual.json`` has it."""
        return {
            "row_sum": list(self.row),
            "column_sum": list(self.column),
            "spectral_norm_max": self.spectral_norm,
            "non_expansive": self.non_expansive,
        }


def _wider(span: tuple[float, float], sums: np.ndarray) -> tuple[float, float]:
    return min(span[0], float(sums.min())), max(span[1], float(sums.max()))


def off_one(span: tuple[float, float]) -> float:
    """How far sums are from 1 at most."""
    return max(abs(span[0] - 1), abs(span[1] - 1))


def mixing(results: Path) -> Mixing:
    """All combs of all reference dumps.

    Raises
    ------
    DumpError
        No reference dump holds comb, or one holds NaN or Inf.
    """
    found = Mixing()
    for path in sorted((results / "reference").glob("*.h5")):
        found.prompts += 1
        for place, comb in _combs(path):
            if not np.isfinite(comb).all():
                raise DumpError(f"{place} holds NaN or Inf")
            found.add(comb)
    if not found.spectral_norm:
        raise DumpError("no reference dump holds comb")
    return found


def _combs(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every comb of a reference dump and its place."""
    with DumpReader(path) as dump:
        for phase in PHASES:
            for layer in dump.layers("compounded", phase):
                for tap in ("attn_comb", "moe_comb"):
                    if dump.has("compounded", phase, layer, tap):
                        comb = dump.get("compounded", phase, layer, tap).astype(np.float64)
                        yield f"{path.name}: {phase}/{layer}/{tap}", comb
