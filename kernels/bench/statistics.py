"""Medians and spreads of interleaved samples."""

from collections.abc import Sequence
from statistics import median, quantiles


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, smallest and number of samples, in their unit.

    Raises
    ------
    ValueError
        No samples.
    """
    if not samples:
        raise ValueError("no samples")
    low, middle, high = quantiles(samples, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(samples), "n": len(samples)}


def ratio(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Spread of ours / other, sample by sample: both were taken side by side, so what drifts cancels.

    Raises
    ------
    ValueError
        The two were not sampled equally often.
    """
    return spread([a / b for a, b in zip(ours, other, strict=True)])


def order(names: Sequence[str], turn: int) -> list[str]:
    """Order of the paths in a turn: each path is first equally often and follows each other one."""
    start = turn % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated if (turn // len(names)) % 2 == 0 else rotated[::-1]


def geometric_mean(values: Sequence[float]) -> float:
    """Mean of ratios: one over a mean is the mean of the inverses.

    Raises
    ------
    ValueError
        No values, or one that is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"no geometric mean of {list(values)}")
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


__all__ = ["geometric_mean", "median", "order", "ratio", "spread"]
