"""The indexer's choice against sorting by hand: ties, masks, padding, NaN."""

import math

import numpy as np
import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_rows_alone, assert_threads_agree, draw
from kernels.index_topk.ref import index_topk


def oracle(scores, visible, k):
    """Python's stable sort of (score descending, index); NaN above all, as torch sorts."""
    chosen = []
    for row, limit in zip(scores.tolist(), visible.tolist(), strict=True):
        seen = [(-math.inf if math.isnan(v) else -v, s) for s, v in enumerate(row[: max(limit, 0)])]
        nan = [math.isnan(v) for v in row]
        ranked = sorted(seen, key=lambda pair: (not nan[pair[1]], pair))
        best = sorted(s for _, s in ranked[:k])
        chosen.append(best + [-1] * (k - len(best)))
    return np.array(chosen, dtype=np.int64).reshape(len(scores), k)


def case(T, C, seed):
    """Scores with many ties (a few distinct values, both zeros, -inf) and limits below, at and over C."""
    rng = np.random.default_rng([seed, T, C])
    values = np.array([-math.inf, -1.5, -0.0, 0.0, 1.0, 1.0 + 2.0**-23, 7.0], np.float32)
    scores = torch.from_numpy(rng.choice(values, (T, C)))
    return scores, torch.from_numpy(rng.integers(-1, C + 3, T))


@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.parametrize("C", [1, 8, 37])
@pytest.mark.parametrize("T", SIZES)
def test_equals_a_stable_sort(T, C, k):
    scores, visible = case(T, C, 1)
    got = index_topk(scores, visible, k)
    assert got.dtype == torch.int64
    assert_bitwise(got, oracle(scores, visible, k))


@pytest.mark.parametrize("T", SIZES[1:])
def test_equals_a_stable_sort_of_distinct_scores(T):
    scores = draw(T, 200, seed=2, decades=3)
    visible = torch.arange(T) % 203
    assert_bitwise(index_topk(scores, visible, 40), oracle(scores, visible, 40))


def test_all_equal_scores_keep_the_first_entries():
    got = index_topk(torch.full((4, 9), 2.5), torch.tensor([0, 2, 4, 9]), 4)
    assert got.tolist() == [[-1, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_tie_at_the_cut_goes_to_the_smaller_index():
    scores = torch.tensor([[1.0, 3.0, 2.0, 5.0, 2.0, 2.0]])
    assert index_topk(scores, torch.tensor([6]), 3).tolist() == [[1, 2, 3]]
    assert index_topk(scores, torch.tensor([6]), 4).tolist() == [[1, 2, 3, 4]]
    assert index_topk(torch.tensor([[0.0, -0.0, 0.0]]), torch.tensor([3]), 2).tolist() == [[0, 1]]
    assert index_topk(torch.tensor([[-0.0, 0.0]]), torch.tensor([2]), 1).tolist() == [[0]]  # -0 == 0


def test_visible_is_a_count_not_a_last_index():
    scores = torch.tensor([[1.0, 2.0, 9.0]])
    assert index_topk(scores, torch.tensor([2]), 1).tolist() == [[1]]
    # position 7 of ratio 4 closes its second entry
    assert index_topk(scores, (torch.tensor([7]) + 1) // 4, 3).tolist() == [[0, 1, -1]]
    assert index_topk(scores, (torch.tensor([6]) + 1) // 4, 3).tolist() == [[0, -1, -1]]


def test_minus_infinity_is_chosen_only_after_all_else_and_never_when_hidden():
    scores = torch.tensor([[-math.inf, 1.0, -math.inf, -math.inf, 5.0]])
    assert index_topk(scores, torch.tensor([4]), 3).tolist() == [[0, 1, 2]]
    assert index_topk(scores, torch.tensor([3]), 4).tolist() == [[0, 1, 2, -1]]


def test_nan_is_never_hidden_when_visible_and_never_seen_when_not():
    scores = torch.tensor([[1.0, math.nan, 3.0, math.inf, math.nan]])
    assert index_topk(scores, torch.tensor([4]), 2).tolist() == [[1, 3]]
    assert index_topk(scores, torch.tensor([1]), 2).tolist() == [[0, -1]]


def test_hidden_scores_have_no_effect():
    scores, _ = case(50, 37, 3)
    visible = torch.arange(50) % 37
    hidden = torch.arange(37) >= visible[:, None]
    whole = index_topk(scores, visible, 8)
    for value in (math.nan, math.inf, -math.inf, 0.0):
        assert_bitwise(index_topk(scores.masked_fill(hidden, value), visible, 8), whole)
    longer = torch.cat((scores, draw(50, 11, seed=4)), dim=1)  # entries that closed later
    assert_bitwise(index_topk(longer, visible, 8), whole)


def test_empty_inputs():
    assert index_topk(torch.zeros(2, 0), torch.tensor([0, 3]), 3).tolist() == [[-1] * 3] * 2
    assert index_topk(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 3).shape == (0, 3)


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    scores, visible = case(T, 37, 5)
    assert_rows_alone(lambda r: index_topk(r["s"], r["v"], 8), {"s": scores, "v": visible})


def test_threads_and_scales_do_not_matter():
    scores, visible = case(200, 600, 7)
    whole = index_topk(scores, visible, 40)
    assert_threads_agree(lambda: index_topk(scores, visible, 40))
    assert_bitwise(index_topk(scores * 2.0**20, visible, 40), whole)


def test_order_of_entries_matters_only_in_ties():
    scores = draw(20, 60, seed=8)
    order = torch.from_numpy(np.random.default_rng(9).permutation(60))
    visible = torch.full((20,), 60)
    there = index_topk(scores[:, order], visible, 8)
    assert_bitwise(order[there].sort(-1).values, index_topk(scores, visible, 8))
