"""Routing kernels: ids equal to the ref's, weights to its FP64 rounded once, scores within what FP32 sums lose."""

import math

import numpy as np
import pytest
import torch

from kernels._check import assert_bitwise, assert_nearest, draw
from kernels.route import ref
from kernels.route.kernel import route, route_by_table, router_scores

SIZES = (0, 1, 3, 127)


def scores_of(T, E, seed=1):
    """Strided rows of few distinct values, so that ties are everywhere."""
    return (draw(T, 2 * E, seed=seed).abs() * 4).round()[:, :E] / 4


def weights_hold(weights, scores, ids, scaling):
    chosen = scores.double().gather(1, ids.long())
    want = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scaling
    assert_nearest(weights.cpu(), want.numpy(), slack=np.abs(want.numpy()) * 2.0**-48)


@pytest.mark.parametrize(("E", "k"), [(13, 4), (256, 6), (3, 3), (1, 1)])
@pytest.mark.parametrize("T", SIZES)
def test_choice_is_the_refs_with_ties_to_the_smaller_index(accelerator, T, E, k):
    scores, bias = scores_of(T, E), (draw(E, seed=2) * 2).round() / 4
    ids, weights = route(scores.to(accelerator), bias.to(accelerator), k, scaling=1.5)
    want = ref.choose_experts(scores, bias, k)
    assert_bitwise(ids.cpu().long(), want)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    weights_hold(weights, scores, want, 1.5)
    if T > 3 and k < E:
        assert (ref.choose_experts(scores, bias.flip(0), k) != want).any()  # the bias matters here
        later = E - 1 - ref.choose_experts(scores.flip(1), bias.flip(0), k).flip(1)
        assert (later != want).any()  # and so do ties


def test_sums_below_zero_rank_in_order(accelerator):
    """A bias may be strongly negative: FP32 of negative sign order backwards as integers."""
    scores, bias = scores_of(3, 13), (draw(13, seed=2) * 2).round() / 4 - 10
    ids, weights = route(scores.to(accelerator), bias.to(accelerator), 4, scaling=1.5)
    want = ref.choose_experts(scores, bias, 4)
    assert_bitwise(ids.cpu().long(), want)
    weights_hold(weights, scores, want, 1.5)


def test_nan_signed_zeros_and_infinities_rank_as_in_a_sort(accelerator):
    scores = torch.tensor(
        [[0.0, -0.0, 0.0, -0.0, 1.0], [math.nan, 1, math.nan, 5, math.nan], [math.inf, 2, 3, 4, 1]]
    )
    bias = torch.tensor([-0.0, -0.0, 0.0, -0.0, -1.0])
    ids, _ = route(scores.to(accelerator), bias.to(accelerator), 2, scaling=1.0)
    assert ids.tolist() == ref.choose_experts(scores, bias, 2).tolist()
    assert ids.tolist() == [[0, 1], [0, 2], [0, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("E", "k"), [(13, 4), (256, 6), (16, 8)])
@pytest.mark.parametrize("T", SIZES)
def test_a_table_gives_its_row_ascending(accelerator, T, E, k, dtype):
    rng = np.random.default_rng([T, E])
    table = torch.from_numpy(np.stack([rng.permutation(E)[:k] for _ in range(50)]))
    tokens, scores = torch.from_numpy(rng.integers(0, 50, T)), scores_of(T, E)
    given = (scores.to(accelerator), tokens.to(dtype).to(accelerator), table.to(dtype).to(accelerator))
    ids, weights = route_by_table(*given, scaling=2.5)
    want = ref.hash_experts(tokens, table)
    assert_bitwise(ids.cpu().long(), want)
    weights_hold(weights, scores, want, 2.5)


def test_equal_ids_of_a_table_and_zero_scores_are_kept(accelerator):
    table, tokens = torch.tensor([[5, 2, 5]]), torch.zeros(2, dtype=torch.int64)
    scores = torch.zeros(2, 9)
    scores[1, 5] = 1
    ids, weights = route_by_table(
        scores.to(accelerator), tokens.to(accelerator), table.to(accelerator), scaling=2.0
    )
    assert ids.tolist() == [[2, 5, 5]] * 2
    assert weights.tolist() == [[0, 0, 0], [0, 1, 1]]


def score_slack(x, weight, want):
    """FP32 sums: (K + 2) * 2^-24 of sum |a||b|; the score's slope is at most half of itself and at most a half."""
    logit = (x.shape[1] + 2) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    return (
        logit * torch.minimum(want, torch.ones_like(want)) / 2 * 1.01
    ).numpy()  # 1.01: the slope on the way


@pytest.mark.parametrize(("E", "D"), [(13, 67), (48, 2048)])
@pytest.mark.parametrize("T", [0, 1, 3, 17])
def test_scores_are_the_refs_within_fp32_sums(accelerator, T, E, D):
    x, weight = draw(T, 2 * D, seed=3)[:, :D], draw(E, D, seed=4) / math.sqrt(D) * 3
    got = router_scores(x.to(accelerator), weight.to(accelerator)).cpu()
    wide = torch.nn.functional.softplus(x.double() @ weight.double().T, threshold=100.0).sqrt()
    assert_nearest(got, wide.numpy(), slack=score_slack(x, weight, wide))
    if T:
        fault = torch.nn.functional.softplus(x.double() @ weight.double().T)  # no root
        with pytest.raises(AssertionError):
            assert_nearest(got, fault.numpy(), slack=score_slack(x, weight, wide))


def test_scores_hold_at_the_ends(accelerator):
    logits = [0.0, 1.0, 100.0, 101.0, 1e30, -16.9, -17.1, -50.0, -100.0, -200.0, -3e38, math.nan, math.inf]
    x, one = torch.tensor(logits)[:, None], torch.ones(1, 1)
    got = router_scores(x.to(accelerator), one.to(accelerator)).cpu()
    want = ref.router_scores(x[:11], one)
    assert_nearest(got[:11], want.double().numpy(), slack=want.double().numpy() * 2.0**-24 + 2.0**-150)
    assert got[9] > 0
    assert got[11].isnan()
    assert got[12] == math.inf


def test_rows_do_not_see_their_batch(accelerator):
    scores, bias = scores_of(17, 256).to(accelerator), draw(256, seed=5).to(accelerator)
    ids, weights = route(scores, bias, 6, scaling=1.5)
    for row in (0, 9, 16):
        alone = route(scores[row : row + 1], bias, 6, scaling=1.5)
        assert_bitwise(alone[0].cpu(), ids[row : row + 1].cpu())
        assert_bitwise(alone[1].cpu(), weights[row : row + 1].cpu())


def test_planted_faults_show(accelerator):
    """Ties to the larger index, and a weight one ulp and a half off."""
    scores, bias = scores_of(7, 13), torch.zeros(13)
    ids, weights = route(scores.to(accelerator), bias.to(accelerator), 4, scaling=1.5)
    turned = 12 - route(scores.flip(1).to(accelerator), bias.to(accelerator), 4, scaling=1.5)[0].flip(1)
    want = ref.choose_experts(scores, bias, 4)
    assert (ids.cpu() == want).all()
    assert (turned.cpu() != want).any()
    with pytest.raises(AssertionError):
        weights_hold(weights * 1.0000002, scores, want, 1.5)


def test_what_does_not_fit_is_refused_by_name():
    scores, bias = scores_of(3, 13), torch.zeros(13)
    with pytest.raises(ValueError, match="bias is"):
        route(scores, bias[:12], 4, scaling=1.0)
    with pytest.raises(TypeError, match=r"scores is torch\.bfloat16"):
        route(scores.bfloat16(), bias, 4, scaling=1.0)
    for k in (0, 14, 33):
        with pytest.raises(ValueError, match="k = "):
            route(scores, bias, k, scaling=1.0)
    with pytest.raises(ValueError, match="ids is"):
        route(scores, bias, 4, scaling=1.0, ids=torch.empty(3, 5, dtype=torch.int32))
