"""Quantiles that the limits rest on: Student's t, and the next count after some counts."""

import math
from statistics import NormalDist

import numpy as np

from dsv4.judge.metrics import Array


def student(alpha: float, degrees: float) -> float:
    """Upper ``alpha`` quantile of Student's t (Hill, Algorithm 396, CACM 13 (1970) 619); 1e-5 relative.

    >>> round(student(0.025, 10), 3)
    2.228
    """
    n, p = float(degrees), 2.0 * alpha
    if math.isinf(n):
        return NormalDist().inv_cdf(1.0 - alpha)
    if n == 2:
        return math.sqrt(2.0 / (p * (2.0 - p)) - 2.0)
    if n == 1:
        return 1.0 / math.tan(p * math.pi / 2.0)
    a = 1.0 / (n - 0.5)
    b = 48.0 / a**2
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * n
    y = (d * p) ** (2.0 / n)
    if y <= 0.05 + a:
        y = 1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0)
        y = (y * (d * p) ** (2.0 / n) - 1.0) * (n + 1.0) / (n + 2.0) + (d * p) ** (-2.0 / n)
        return math.sqrt(n * y)
    x = NormalDist().inv_cdf(alpha)
    y = x * x
    if n < 5:
        c += 0.3 * (n - 4.5) * (x + 0.6)
    c = (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b + c
    y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
    return math.sqrt(n * math.expm1(a * y * y))


def next_count(seen: Array, exposures: float, alpha: float) -> Array:
    """Upper bound of the next count, after ``seen`` in all over ``exposures`` independent counts.

    The predictive distribution of a Poisson count under Jeffreys' prior is negative binomial
    with ``r = seen + 1/2`` and ``q = 1 / (exposures + 1)``; its Chernoff bound
    ``P(N >= x) <= exp(-I(x))``, ``I(x) = x ln(x / (q (x + r))) - r ln(1 - q) + r ln(r / (x + r))``,
    is solved for ``I(x) = -ln(alpha)``, so the bound holds for every count, small or large.

    Parameters
    ----------
    seen : total counts, any shape.
    exposures : number of counts that ``seen`` is the sum of.
    alpha : probability that the next count exceeds the bound, at most.
    """
    r, q = np.asarray(seen, float) + 0.5, 1.0 / (exposures + 1.0)
    low = r * q / (1.0 - q)
    high = low + 2.0 * np.sqrt(low * -math.log(alpha)) - 4.0 * math.log(alpha) * (1.0 + q)
    for _ in range(60):
        x = (low + high) / 2.0
        rate = x * np.log(x / (q * (x + r))) - r * math.log(1.0 - q) + r * np.log(r / (x + r))
        low, high = np.where(rate < -math.log(alpha), x, low), np.where(rate < -math.log(alpha), high, x)
    return high


def unseen(exposures: float, ahead: Array | float, alpha: float) -> Array:
    """Number of events that may come in ``ahead`` counts, when none came in ``exposures``.

    ``P(n or more) <= (ahead / (exposures + ahead))^n`` for an unknown rate; the smallest n at
    which that is under ``alpha``.
    """
    ahead = np.asarray(ahead, float)
    return np.ceil(math.log(alpha) / np.log(ahead / (exposures + ahead)))


def most_hits(tries: int, chance: float, alpha: float) -> int:
    """Largest number of hits that ``tries`` independent tries exceed with probability ``alpha`` at most."""
    tail = 0.0
    for hits in range(tries, 0, -1):
        log = math.lgamma(tries + 1) - math.lgamma(hits + 1) - math.lgamma(tries - hits + 1)
        tail += math.exp(log + hits * math.log(chance) + (tries - hits) * math.log1p(-chance))
        if tail > alpha:
            return hits
    return 0
