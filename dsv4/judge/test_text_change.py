"""A change is said to have moved text as often as it should be, by chance and by a shift."""

from math import gamma, pi, sqrt

import numpy as np
import pytest

from dsv4.judge.text_change import BLOCK, ERRORS, LEAST_BLOCKS, mean_of_blocks, paired_change

LENGTHS = (576, 541, 61, 34)  # positions of the shipped prompts' texts, about
SIMULATIONS = 8_000


def tail(dof, at=ERRORS):
    """P(|t| > at) of Student's distribution, by the trapezoid rule."""
    x = np.linspace(0.0, at, 20_001)
    density = gamma((dof + 1) / 2) / (sqrt(dof * pi) * gamma(dof / 2)) * (1 + x**2 / dof) ** (-(dof + 1) / 2)
    return 1 - 2 * float(np.trapezoid(density, x))


def test_the_least_number_of_blocks_is_the_first_with_one_false_alarm_in_a_hundred():
    assert tail(LEAST_BLOCKS - 1) < 0.01 < tail(LEAST_BLOCKS - 2)
    assert tail(39) == pytest.approx(0.0047, abs=5e-5)
    assert tail(1e2) == pytest.approx(0.0034, abs=5e-5)


def blocks_of(lengths):
    ids, first = [], 0
    for length in lengths:
        ids.append(first + np.arange(length) // BLOCK)
        first = int(ids[-1][-1]) + 1
    return np.concatenate(ids)


def correlated(rng, phi):
    """Stationary AR(1) noise of unit variance, prompt by prompt, of all simulations at once."""
    parts = []
    for length in LENGTHS:
        x = rng.standard_normal((SIMULATIONS, length))
        for at in range(1, length):
            x[:, at] = phi * x[:, at - 1] + sqrt(1 - phi**2) * x[:, at]
        parts.append(x)
    return np.concatenate(parts, axis=1)


def expected(phi):
    """False alarms that follow from the covariance: Student's, after how much too small the squared error is.

    Blocks of one prompt share their ends' correlation, which clusters leave out. With u = M x, x the positions of
    covariance C and M the mean's and the blocks' sums, both expectations are sums over M C M'.
    """
    blocks, size = blocks_of(LENGTHS), sum(LENGTHS)
    edges = np.cumsum((0, *LENGTHS))
    at = np.arange(size)
    prompt = np.searchsorted(edges, at, "right")
    covariance = phi ** np.abs(at[:, None] - at) * (prompt[:, None] == prompt)
    sums = (blocks == np.arange(blocks[-1] + 1)[:, None]).astype(float)
    weights = np.full(size, 1 / size)
    away = sums - sums.sum(1, keepdims=True) * weights  # of each block's sum from its share of the mean
    count = len(sums)
    squared = count / (count - 1) * np.einsum("bi,ij,bj->", away, covariance, away) / size**2
    true = weights @ covariance @ weights
    return tail(count - 1, ERRORS / sqrt(true / squared)), true / squared


@pytest.mark.parametrize(("phi", "ratio"), [(0.0, 1.0), (0.8, 1.13)])
def test_correlated_noise_moves_text_as_seldom_as_derived(phi, ratio):
    rate, inflated = expected(phi)
    assert inflated == pytest.approx(ratio, abs=0.03)
    blocks, alarms = blocks_of(LENGTHS), 0
    for values in correlated(np.random.default_rng(11), phi):
        mean, se, count = mean_of_blocks(values, blocks)
        alarms += abs(mean) > ERRORS * se
    assert count == 18 + 17 + 2 + 2
    # Unequal blocks are not quite Student's; four standard errors of the count, and a tenth of the rate for that.
    assert abs(alarms / SIMULATIONS - rate) < 4 * sqrt(rate / SIMULATIONS) + 0.1 * rate


def test_without_blocks_the_same_noise_would_move_many_texts():
    values = correlated(np.random.default_rng(11), 0.8)[:2000]
    alarms = np.abs(values.mean(1)) > ERRORS * values.std(1, ddof=1) / sqrt(values.shape[1])
    assert alarms.mean() > 0.2


def test_the_error_of_equal_blocks_is_that_of_their_means():
    values = np.array([1.0, 3.0, 2.0, 2.0, 6.0, 4.0])
    mean, se, count = mean_of_blocks(values, np.array([0, 0, 1, 1, 2, 2]))
    assert (mean, count) == (3.0, 3)
    assert se == pytest.approx(np.std([2.0, 2.0, 5.0], ddof=1) / sqrt(3))
    assert mean_of_blocks(values, np.zeros(6, int))[1:] == (None, 1)


def test_a_shift_moves_and_noise_does_not(texts):
    parent = texts.table(kl=1e-3, noise=1e-4)
    other = texts.table(kl=1e-3, noise=1e-4, seed=1)
    found = paired_change(other, parent)
    assert not found.moved
    assert found.blocks == 18 + 17 + 2 + 2
    # Two independent noises of 1e-4 each, over 1212 positions.
    assert found.se == pytest.approx(1e-4 * sqrt(2 / len(parent)), rel=0.35)
    shifted = paired_change(other.assign(kl_nats=other["kl_nats"] + 2e-5), parent)
    assert shifted.moved
    assert shifted.mean == pytest.approx(found.mean + 2e-5)
    assert paired_change(
        parent.assign(kl_nats=parent["kl_nats"] - 5e-5), parent
    ).moved  # of a fixed size: no error


def test_rows_are_paired_by_prompt_and_step_whatever_their_order(texts):
    parent = texts.table(kl=1e-3, noise=1e-4)
    own = parent.assign(kl_nats=parent["kl_nats"] + 1e-6)
    found = paired_change(own.sample(frac=1.0, random_state=3), parent.sample(frac=1.0, random_state=4))
    assert found == paired_change(own, parent)
    assert found.se < 1e-12
    with pytest.raises(ValueError, match=r"1211 and 1212 positions of which some have no pair"):
        paired_change(own.iloc[1:], parent)


def test_below_the_least_kl_and_the_least_blocks_nothing_moves(texts):
    parent = texts.table(kl=1e-11)
    assert not paired_change(parent.assign(kl_nats=5e-10), parent).moved
    assert paired_change(parent.assign(kl_nats=5e-9), parent).moved
    short = texts.table()
    short = short[short["prompt"] != "opposites"]
    short = short[(short["prompt"] != "code") | (short["step"] < 10 * BLOCK)]
    found = paired_change(short.assign(kl_nats=0.5), short)
    assert (found.blocks, found.moved) == (14, False)
