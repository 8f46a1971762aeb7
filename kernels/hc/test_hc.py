"""mHC against loops in 80 bits, Sinkhorn's properties, small cases by hand, and the stores of the residual."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_differs,
    assert_nearest,
    assert_rows_alone,
    assert_stored_once,
    assert_threads_agree,
    draw,
    to_bf16,
)
from kernels.formats import bf16
from kernels.hc.ref import collapse, expand, head_collapse, mix, sinkhorn

N, D = 4, 33
EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}


def site(N=N, D=D, seed=0):
    """fn, base and scale of one site: unequal scales, an asymmetric comb."""
    count = N * (N + 2)
    fn = draw(count, N * D, seed=seed) / math.sqrt(N * D)
    return {"fn": fn, "base": draw(count, seed=seed + 1), "scale": torch.tensor([0.7, -1.3, 2.1])}


def wide(x):
    return x.numpy().astype(np.longdouble)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sinkhorn_by_hand(logits, hc_eps, iterations, *, fault=""):
    """One matrix at a time, by loops; ``fault`` plants one of the known mistakes."""
    out = np.zeros_like(logits)
    for t, matrix in enumerate(logits):
        eps = 0 if fault == "eps left out" else hc_eps
        comb = np.exp(matrix - matrix.max(1, keepdims=True))
        comb = comb / comb.sum(1, keepdims=True) + eps

        def columns(m, eps=eps):
            return m / (m.sum(0, keepdims=True) + eps)

        def rows(m, eps=eps):
            return m / (m.sum(1, keepdims=True) + eps)

        first, second = (columns, rows) if fault == "rows first" else (rows, columns)
        comb = second(comb)
        for _ in range(0 if fault == "one pass" else iterations - 1):
            comb = second(first(comb))
        if fault == "one row pass more":
            comb = rows(comb)
        out[t] = comb.T if fault == "transposed" else comb
    return out


def mix_by_hand(streams, fn, base, scale, *, norm_eps, hc_eps, iterations, fault=""):
    N = streams.shape[1]
    x, fn, base, scale = wide(streams), wide(fn), wide(base), wide(scale)
    flat = x.reshape(len(x), N * x.shape[2])
    rms = np.sqrt(
        (flat * flat).mean(1, keepdims=True) + (hc_eps if fault == "hc_eps in the norm" else norm_eps)
    )
    logits = (flat / rms).astype(np.float32).astype(np.longdouble) @ fn.T  # the norm gives FP32
    pre = sigmoid(logits[:, :N] * scale[0] + base[:N]) + (0 if fault == "pre without eps" else hc_eps)
    post = 2 * sigmoid(logits[:, N : 2 * N] * scale[1] + base[N : 2 * N])
    if fault == "post halved":
        post = post / 2
    comb = (logits[:, 2 * N :] * scale[2] + base[2 * N :]).reshape(-1, N, N)
    return pre, post, sinkhorn_by_hand(comb, hc_eps, iterations, fault=fault)


SLACK = 1e-9  # logits are good to 2^-36 x K x maxima, under 1e-9 here; sigmoid and Sinkhorn contract


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("T", SIZES)
def test_mix_equals_loops_in_80_bits(T, iterations):
    streams, weights = draw(T, N, D, seed=1, decades=0.5), site(seed=2)
    got = mix(streams, **weights, **EPS, iterations=iterations)
    want = mix_by_hand(streams, **weights, **EPS, iterations=iterations)
    for tensor, exact in zip(got, want, strict=True):
        assert_nearest(tensor, exact, slack=SLACK)


FAULTS = {
    "pre without eps": 0,
    "hc_eps in the norm": 0,
    "post halved": 1,
    "transposed": 2,
    "one pass": 2,
    "rows first": 2,
    "one row pass more": 2,
    "eps left out": 2,
}


@pytest.mark.parametrize(("fault", "part"), FAULTS.items(), ids=FAULTS)
def test_a_known_mistake_would_show(fault, part):
    streams, weights = draw(40, N, D, seed=3) * 1e-2, site(seed=4)
    eps = {"norm_eps": 1e-6, "hc_eps": 1e-4}
    got = mix(streams, **weights, **eps, iterations=3)[part]
    right = mix_by_hand(streams, **weights, **eps, iterations=3)[part]
    wrong = mix_by_hand(streams, **weights, **eps, iterations=3, fault=fault)[part]
    assert_nearest(got, right, slack=SLACK)
    with pytest.raises(AssertionError, match="off, first at"):
        assert_nearest(got, wrong, slack=SLACK)


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    weights, streams = site(seed=6), draw(T, N, D, seed=5)
    for part in range(3):
        assert_rows_alone(lambda r, p=part: mix(r["x"], **weights, **EPS, iterations=20)[p], {"x": streams})
    pre, post, comb = mix(streams, **weights, **EPS, iterations=20)
    rows = {"x": streams, "y": draw(T, D, seed=7), "pre": pre, "post": post, "comb": comb}
    assert_rows_alone(lambda r: collapse(r["x"], r["pre"]), rows)
    assert_rows_alone(lambda r: expand(r["x"], r["y"], r["post"], r["comb"]), rows)
    head = {"fn": weights["fn"][:N], "base": weights["base"][:N], "scale": weights["scale"][:1]}
    assert_rows_alone(lambda r: head_collapse(r["x"], **head, **EPS), {"x": streams})


def test_threads_do_not_change_bits():
    streams, weights = draw(33, N, 512, seed=8), site(D=512, seed=9)
    for part in range(3):
        assert_threads_agree(lambda p=part: mix(streams, **weights, **EPS, iterations=20)[p])
    y, (pre, post, comb) = draw(33, 512, seed=10), mix(streams, **weights, **EPS, iterations=20)
    assert_threads_agree(lambda: collapse(streams, pre))
    assert_threads_agree(lambda: expand(streams, y, post, comb))


def test_stream_scale_leaves_the_weights_alone_without_eps():
    streams, weights = draw(9, N, D, seed=11), site(seed=12)
    one = mix(streams, **weights, norm_eps=0.0, hc_eps=1e-6, iterations=20)
    other = mix(streams * 2.0**30, **weights, norm_eps=0.0, hc_eps=1e-6, iterations=20)
    for a, b in zip(one, other, strict=True):
        assert_bitwise(a, b)


def test_zero_streams_give_the_bias_alone():
    weights = site(seed=13)
    pre, post, _ = mix(torch.zeros(2, N, D), **weights, **EPS, iterations=20)
    base = wide(weights["base"])
    assert_nearest(pre, np.tile(sigmoid(base[:N]) + 1e-6, (2, 1)))
    assert_nearest(post, np.tile(2 * sigmoid(base[N : 2 * N]), (2, 1)))


def test_sinkhorn_of_equal_logits_is_uniform_and_one_stream_is_trivial():
    comb = sinkhorn(torch.zeros(1, 4, 4, dtype=torch.float64), hc_eps=0.0, iterations=20)
    assert comb.tolist() == [[[0.25] * 4] * 4]
    one = sinkhorn(torch.full((1, 1, 1), 5.0, dtype=torch.float64), hc_eps=0.0, iterations=3)
    assert one.item() == 1.0


def test_sinkhorn_by_hand_for_one_iteration():
    eps = 0.5
    rows = [[0.75 + eps, 0.25 + eps], [0.5 + eps, 0.5 + eps]]  # softmax of log 3, 0 and of 0, 0
    logits = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]]], dtype=torch.float64)
    want = [
        [rows[0][0] / (rows[0][0] + rows[1][0] + eps), rows[0][1] / (rows[0][1] + rows[1][1] + eps)],
        [rows[1][0] / (rows[0][0] + rows[1][0] + eps), rows[1][1] / (rows[0][1] + rows[1][1] + eps)],
    ]
    np.testing.assert_allclose(sinkhorn(logits, hc_eps=eps, iterations=1)[0], want, rtol=1e-15)


def test_sinkhorn_ends_on_columns_and_becomes_doubly_stochastic():
    logits = draw(20, 4, 4, seed=14).double() * 3
    comb = sinkhorn(logits, hc_eps=0.0, iterations=20)
    np.testing.assert_allclose(comb.sum(-2), 1.0, rtol=1e-15)  # over the first index: exact, it is last
    rows = (comb.sum(-1) - 1).abs().max()
    assert 1e-6 < rows < 0.1
    assert (sinkhorn(logits, hc_eps=0.0, iterations=500).sum(-1) - 1).abs().max() < 1e-6


def test_sinkhorn_survives_extreme_logits():
    logits = torch.tensor([[[3e38, -3e38], [-3e38, 3e38]], [[1e4, 0.0], [1e4, 0.0]]], dtype=torch.float64)
    comb = sinkhorn(logits, hc_eps=1e-6, iterations=20)
    assert comb.isfinite().all()
    np.testing.assert_allclose(comb[0], np.eye(2), atol=2e-5)


def test_nan_and_infinity_stay_in_their_row():
    streams, weights = draw(5, N, D, seed=15), site(seed=16)
    clean = mix(streams, **weights, **EPS, iterations=20)
    streams[1, 2, 3], streams[3, 0, 0] = math.nan, math.inf
    got = mix(streams, **weights, **EPS, iterations=20)
    for tensor, before in zip(got, clean, strict=True):
        assert tensor[[1, 3]].isnan().all()
        assert_bitwise(tensor[[0, 2, 4]], before[[0, 2, 4]])


def collapse_by_hand(streams, pre):
    return (wide(streams) * wide(pre)[..., None]).sum(1)


def expand_by_hand(streams, y, post, comb):
    """Stream by stream: what goes to stream k."""
    x, y, post, comb = wide(streams), wide(y), wide(post), wide(comb)
    out = np.zeros_like(x)
    for target in range(x.shape[1]):
        out[:, target] = post[:, target, None] * y
        for source in range(x.shape[1]):
            out[:, target] += comb[:, source, target, None] * x[:, source]
    return out


def weights_of(T, seed):
    return draw(T, N, seed=seed), draw(T, N, seed=seed + 1), draw(T, N, N, seed=seed + 2)


@pytest.mark.parametrize("T", SIZES)
def test_collapse_and_expand_equal_loops(T):
    streams, y, (pre, post, comb) = draw(T, N, D, seed=17, decades=2), draw(T, D, seed=18), weights_of(T, 19)
    slack = 2.0**-48 * float(streams.abs().max()) * 8 if T else 0.0
    assert_nearest(collapse(streams, pre), collapse_by_hand(streams, pre), slack=slack)
    assert_nearest(expand(streams, y, post, comb), expand_by_hand(streams, y, post, comb), slack=slack)


def test_expand_sums_over_the_first_index_of_comb():
    streams = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])  # comb[from, to]
    got = expand(streams, torch.tensor([[100.0]]), torch.tensor([[1.0, 2.0]]), comb)
    assert got.tolist() == [[[120.0], [231.0]]]
    assert collapse(streams, torch.tensor([[5.0, 0.5]])).tolist() == [[10.0]]
    identity = torch.eye(2)[None]
    assert_bitwise(expand(streams, torch.zeros(1, 1), torch.ones(1, 2), identity), streams)


def test_expand_and_collapse_with_non_finite_values_and_powers_of_two():
    streams, y, (pre, post, comb) = draw(5, N, D, seed=22), draw(5, D, seed=23), weights_of(5, 24)
    assert_bitwise(collapse(streams * 4, pre), collapse(streams, pre) * 4)
    assert_bitwise(expand(streams * 4, y * 4, post, comb), expand(streams, y, post, comb) * 4)
    clean = expand(streams, y, post, comb)
    y[2, 7] = math.nan
    got = expand(streams, y, post, comb)
    assert got.isnan().nonzero().tolist() == [[2, n, 7] for n in range(N)]
    assert_bitwise(got.masked_fill(got.isnan(), 0.0), clean.masked_fill(got.isnan(), 0.0))
    assert collapse(torch.full((1, 2, 1), 3e38), torch.ones(1, 2)).item() == math.inf


@pytest.mark.parametrize("T", SIZES)
def test_head_collapse_equals_loops(T):
    streams, weights = draw(T, N, D, seed=27), site(seed=28)
    fn, base, scale = weights["fn"][:N], weights["base"][:N], weights["scale"][:1]
    flat = wide(streams).reshape(T, N * D)
    normed = flat / np.sqrt((flat * flat).mean(1, keepdims=True) + 1e-6) if T else flat
    pre = (
        sigmoid(normed.astype(np.float32).astype(np.longdouble) @ wide(fn).T * wide(scale) + wide(base))
        + 1e-6
    )
    want = (wide(streams) * pre.astype(np.float32)[..., None]).sum(1)  # weights are FP32
    got = head_collapse(streams, fn, base, scale, **EPS)
    # one ulp of pre may flip where the product's 2^-36 meets a tie
    assert_nearest(got, want, slack=2.0**-24 * float(streams.abs().max()) if T else 0.0)
    np.testing.assert_array_less(np.abs(got.numpy() - want).max(initial=0), 1e-5)


def test_out_is_the_last_step_and_happens_once():
    streams, y, (pre, post, comb) = draw(129, N, D, seed=29), draw(129, D, seed=30), weights_of(129, 31)
    assert_stored_once(lambda out: collapse(streams, pre, out=out))
    assert_stored_once(lambda out: expand(streams, y, post, comb, out=out))
    weights = site(seed=34)
    head = {"fn": weights["fn"][:N], "base": weights["base"][:N], "scale": weights["scale"][:1]}
    assert_stored_once(lambda out: head_collapse(streams, **head, **EPS, out=out))


@pytest.mark.parametrize("T", SIZES)
def test_bf16_stores_equal_the_emulation(T):
    streams, y, (pre, post, comb) = draw(T, N, D, seed=35), draw(T, D, seed=36), weights_of(T, 37)
    want = to_bf16(collapse_by_hand(streams, pre).astype(np.float32))
    assert_bitwise(collapse(streams, pre, out=bf16.round), want)
    want = to_bf16(expand_by_hand(streams, y, post, comb).astype(np.float32))
    assert_bitwise(expand(streams, y, post, comb, out=bf16.round), want)


def test_a_store_in_another_place_would_show():
    streams, y, (pre, post, comb) = draw(129, N, D, seed=40), draw(129, D, seed=41), weights_of(129, 42)
    stored = expand(streams, y, post, comb, out=bf16.round)
    carried = expand_by_hand(streams, torch.zeros_like(y), post, comb).astype(np.float32)
    added = wide(post)[..., None] * wide(y)[:, None]
    faults = {
        "carried part stored first": to_bf16((to_bf16(carried) + added).astype(np.float32)),
        "y stored first": expand_by_hand(streams, bf16.round(y), post, comb),
        "streams stored first": expand_by_hand(bf16.round(streams), y, post, comb),
        "weights in BF16": expand_by_hand(streams, y, bf16.round(post), bf16.round(comb)),
        "comb by its second index": expand_by_hand(streams, y, post, comb.transpose(1, 2)),
    }
    for fault in faults.values():
        assert_differs(stored, to_bf16(fault.astype(np.float32)))
    terms = to_bf16((wide(streams) * wide(pre)[..., None]).astype(np.float32))
    assert_differs(collapse(streams, pre, out=bf16.round), to_bf16(terms.sum(1, dtype=np.float32)))
