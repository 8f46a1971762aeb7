import math

import numpy as np
import pytest

from dsv4.judge.tails import next_count, student, unseen


@pytest.mark.parametrize(
    ("alpha", "degrees", "table"),
    [
        (0.05, 1, 6.3138),
        (0.05, 2, 2.9200),
        (0.025, 3, 3.1824),
        (0.025, 10, 2.2281),
        (0.0005, 7, 5.4079),
        (0.0005, 30, 3.6460),
        (0.001, 120, 3.1595),
        (1e-7, math.inf, 5.1993),
    ],
)
def test_student_is_the_printed_table(alpha, degrees, table):
    assert student(alpha, degrees) == pytest.approx(table, rel=2e-4)


@pytest.mark.parametrize(("seen", "exposures"), [(0, 8), (3, 8), (400, 8), (25, 640)])
def test_next_count_is_exceeded_as_rarely_as_stated(seen, exposures):
    """Against the negative binomial itself, summed."""
    alpha, r, q = 1e-6, seen + 0.5, 1 / (exposures + 1)
    bound = float(next_count(np.array(seen), exposures, alpha))
    x = np.arange(math.floor(bound) + 1)
    log_pmf = [
        math.lgamma(n + r) - math.lgamma(r) - math.lgamma(n + 1) + r * math.log1p(-q) + n * math.log(q)
        for n in x
    ]
    beyond = 1 - math.fsum(math.exp(value) for value in log_pmf)
    assert beyond < alpha
    assert bound < 8 + 2 * seen / exposures + 8 * math.sqrt(seen / exposures + 1)  # and not far beyond it


def test_unseen_events():
    assert unseen(639, np.array(1.0), 1e-6) == math.ceil(6 / math.log10(640))
    assert unseen(8, np.array([1.0, 8.0]), 1e-3).tolist() == [4, 10]
