"""Sparse attention against a loop over keys, key order and padding bit for bit."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_nearest,
    assert_rows_alone,
    assert_threads_agree,
    draw,
)
from kernels.formats import bf16, e4m3
from kernels.sparse_attn.ref import EQUATIONS, ROWS, AttnRounding, sparse_attn

H, NOPE, ROPE = 3, 32, 64
SCALE = 0.25


def case(T, *, S=13, N=40, seed=0, narrow=False):
    """q, pool, idx with -1 and repeats, distinct sinks; logits up to about 10."""
    rng = np.random.default_rng([seed, T, S])
    q, pool = draw(T, H, NOPE + ROPE, seed=seed), draw(N, NOPE + ROPE, seed=seed + 1) * 1.5
    idx = torch.from_numpy(rng.integers(0, N, (T, S)))
    idx[torch.from_numpy(rng.random((T, S)) < 0.2)] = -1
    if T > 2:
        idx[1], idx[2, 1:] = -1, -1  # no key at all; one key at most
    if narrow:
        q, pool = bf16.round(q), bf16.round(pool)
    return q, pool, idx, torch.tensor([-1.0, 0.5, 3.0])


def run(q, pool, idx, sinks, at=EQUATIONS, scale=SCALE):
    return sparse_attn(q, pool, idx, sinks, n_rope=ROPE, scale=scale, at=at)


def same(x):
    return x


def fp8_probability(p):
    return e4m3.decode(e4m3.encode(p * 256)) / 256


def emulate(q, pool, idx, sinks, *, narrow_logits=True, fault="", **at):
    """Attention by a loop over rows and heads, in numpy; ``at``: rounding points by field name (out=None: FP64)."""
    points = dict.fromkeys(("q_nope", "q_rope", "k_nope", "k_rope", "p_nope", "p_rope", "out"), same) | at
    fp32 = (lambda x: x.astype(np.float32).astype(np.float64)) if narrow_logits else same
    wide = np.float64 if narrow_logits else np.longdouble
    q, pool, idx, sinks = q.numpy(), pool.numpy(), idx.numpy(), sinks.numpy().astype(wide)

    def parts(x, nope, rope):
        return np.concatenate([points[nope](x[..., :NOPE]), points[rope](x[..., NOPE:])], -1)

    queries, keys = parts(q, "q_nope", "q_rope").astype(wide), parts(pool, "k_nope", "k_rope").astype(wide)
    values = keys if fault == "V rounded as K" else pool.astype(wide)
    out, lse = np.zeros(q.shape, wide), np.full(q.shape[:2], -np.inf, wide)
    for t, h in np.ndindex(*q.shape[:2]):
        chosen = idx[t][idx[t] >= 0]
        if not len(chosen):
            continue
        logits = fp32(keys[chosen] @ queries[t, h] * SCALE)
        peak = logits.max()
        p = fp32(np.exp(logits - peak))
        p_nope, p_rope = (
            points[f](p.astype(np.float32) if narrow_logits else p) for f in ("p_nope", "p_rope")
        )
        summed = p_nope if fault == "rounded p in the denominator" else p
        denominator = summed.astype(wide).sum() + np.exp(sinks[h] - peak)
        v = values[chosen]
        if fault == "p rounded after normalising":
            p_nope = points["p_nope"]((p / denominator).astype(np.float32)).astype(wide) * denominator
        total = np.concatenate([p_nope.astype(wide) @ v[:, :NOPE], p_rope.astype(wide) @ v[:, NOPE:]])
        if fault == "stored before the division":
            total = points["out"](total.astype(np.float32)).astype(wide)
        out[t, h], lse[t, h] = total / denominator, np.log(p.sum()) + peak
    if not narrow_logits or points["out"] is None:
        return out, lse
    return points["out"](out.astype(np.float32)), lse.astype(np.float32)


@pytest.mark.parametrize("T", SIZES)
def test_equals_the_equations_in_80_bits(T):
    args = case(T)
    out, lse = run(*args)
    want, want_lse = emulate(*args, narrow_logits=False)
    assert out.dtype == lse.dtype == torch.float32
    # logits are FP32: an error of half an ulp of 16 in each exponent, and half an ulp of p
    slack = 2.0**-20 + 2.0**-24
    assert_nearest(out, want, slack=2 * slack * float(args[1].abs().max()))
    finite = np.isfinite(want_lse)
    assert_bitwise(lse.isfinite(), finite)
    assert_nearest(lse[torch.from_numpy(finite)], want_lse[finite], slack=slack)


@pytest.mark.parametrize("T", SIZES)
def test_equals_the_loop_with_fp32_logits_and_probabilities(T):
    args = case(T, seed=3, narrow=True)
    out, lse = run(*args)
    want, want_lse = emulate(*args, out=None)
    assert_nearest(out, want, slack=2.0**-37 * 13 * float(args[1].abs().max()))
    assert_bitwise(lse, want_lse.astype(np.float32))


@pytest.mark.parametrize("T", [1, 3, ROWS - 1, ROWS, ROWS + 1, 129])
def test_a_row_does_not_see_its_batch(T):
    q, pool, idx, sinks = case(T, seed=5)
    at = AttnRounding(p_nope=bf16.round, p_rope=fp8_probability)
    for which in (0, 1):
        assert_rows_alone(lambda r, w=which: run(r["q"], pool, r["idx"], sinks, at)[w], {"q": q, "idx": idx})


def assert_same(one, other):
    assert_bitwise(one[0], other[0])
    assert_bitwise(one[1], other[1])


@pytest.mark.parametrize("S", [1, 13, 128, 641])
def test_order_of_keys_padding_and_pool_order_do_not_matter(S):
    q, pool, idx, sinks = case(9, S=S, N=200, seed=7)
    rng = np.random.default_rng(S)
    whole = run(q, pool, idx, sinks)
    by_row = torch.from_numpy(rng.permuted(np.tile(np.arange(S), (9, 1)), axis=1))
    assert_same(run(q, pool, idx.gather(1, by_row), sinks), whole)
    none = torch.full((9, 32), -1)
    for padded in (torch.cat((idx, none), 1), torch.cat((none, idx[:, :1], none[:, :5], idx[:, 1:]), 1)):
        assert_same(run(q, pool, padded, sinks), whole)
    order = torch.from_numpy(rng.permutation(200))
    moved = torch.where(idx >= 0, order.argsort()[idx], -1)
    assert_same(run(q, pool[order], moved, sinks), whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, 1e5])
@pytest.mark.parametrize("row", [0, 7])
def test_a_pool_row_that_is_not_named_has_no_effect(row, bad):
    q, pool, idx, sinks = case(40, seed=9)
    idx = torch.where(idx == row, -1, idx)
    whole = run(q, pool, idx, sinks)
    pool[row] = bad
    assert_same(run(q, pool, idx, sinks), whole)


def test_rows_with_many_keys_apart_fit_one_exact_sum():
    q, pool, _, sinks = case(3, N=50_000, seed=10)
    idx = torch.arange(3 * 16_600).view(3, -1)  # together more than 32,768 keys
    whole = run(q, pool, idx, sinks)
    alone = run(q[1:2], pool, idx[1:2], sinks)
    assert_same(alone, (whole[0][1:2], whole[1][1:2]))


def test_heads_do_not_see_each_other_and_threads_do_not_matter():
    q, pool, idx, sinks = case(129, S=100, seed=11)
    out, lse = run(q, pool, idx, sinks)
    one, one_lse = run(q[:, 1:2], pool, idx, sinks[1:2])
    assert_bitwise(one, out[:, 1:2])
    assert_bitwise(one_lse, lse[:, 1:2])
    assert_threads_agree(lambda: run(q, pool, idx, sinks)[0])


def test_powers_of_two_commute():
    q, pool, idx, sinks = case(9, seed=13)
    out, lse = run(q, pool, idx, sinks)
    assert_same(run(q / 8, pool * 8, idx, sinks), (out * 8, lse))
    assert_same(run(q * 4, pool, idx, sinks, scale=SCALE / 4), (out, lse))


def test_lse_is_without_the_sink():
    q, pool, idx, sinks = case(9, seed=15)
    assert_bitwise(run(q, pool, idx, sinks)[1], run(q, pool, idx, sinks + 50)[1])


def hand(logits, values, sink, idx=None):
    """One query of one head whose logit on key s is logits[s]; the value's first nope dim is values[s]."""
    pool = torch.zeros(len(logits), NOPE + ROPE)
    pool[:, -1], pool[:, 0] = torch.tensor(logits), torch.tensor(values)
    q = torch.zeros(1, 1, NOPE + ROPE)
    q[0, 0, -1] = 1 / SCALE
    idx = torch.arange(len(logits))[None] if idx is None else torch.tensor([idx])
    out, lse = run(q, pool, idx, torch.tensor([sink]))
    return out[0, 0, 0].item(), lse.item()


def test_one_key_without_a_sink_is_its_value():
    assert hand([3.25], [7.0], -math.inf) == (7.0, 3.25)


def test_one_key_with_a_sink():
    out, lse = hand([1.0], [7.0], 2.0)
    assert out == np.float32(7 / (1 + math.e))
    assert lse == 1.0


def test_equal_keys_share_equally():
    assert hand([2.0] * 4, [1.0, 2.0, 3.0, 6.0], -math.inf) == (3.0, np.float32(2 + math.log(4)))
    out, _ = hand([2.0] * 4, [1.0, 2.0, 3.0, 6.0], 2.0)
    assert out == np.float32(12 / 5)


def test_a_key_named_twice_counts_twice():
    out, lse = hand([1.0, 1.0], [3.0, 9.0], -math.inf, idx=[0, 0, 1])
    assert out == 5.0
    assert lse == np.float32(1 + math.log(3))


def test_a_dominant_sink_takes_everything():
    assert hand([1.0], [7.0], 60.0)[0] == np.float32(7 * math.exp(-59))
    assert hand([1.0], [7.0], 3e38) == (0.0, 1.0)
    assert hand([-3e38], [7.0], 0.0)[0] == 0.0


def test_a_row_without_keys_is_zero_with_lse_minus_infinity():
    for idx in ([-1], [-1, -1, -1]):
        assert hand([1.0], [7.0], 2.0, idx=idx) == (0.0, -math.inf)
    q, pool, _, sinks = case(3)
    for keys in (pool, pool[:0]):
        out, lse = run(q, keys, torch.empty(3, 0, dtype=torch.int64), sinks)
        assert out.tolist() == torch.zeros(3, H, NOPE + ROPE).tolist()
        assert (lse == -math.inf).all()


def test_logits_far_apart_do_not_overflow():
    assert hand([1e4, -1e4], [5.0, 9.0], 0.0) == (5.0, 1e4)
    assert hand([-1e4, -1e4], [5.0, 9.0], -math.inf) == (7.0, np.float32(-1e4 + math.log(2)))


def test_denormal_values_survive():
    assert hand([0.0, 0.0], [2.0**-149, 2.0**-149], -math.inf)[0] == 2.0**-149


def test_a_nan_key_stays_with_the_rows_that_name_it():
    q, pool, idx, sinks = case(20, seed=17)
    clean = run(q, pool, idx, sinks)
    pool[5, 3] = math.nan
    out, lse = run(q, pool, idx, sinks)
    names = (idx == 5).any(1)
    assert 0 < names.sum() < 20
    assert out[names].isnan().all()
    assert lse[names].isnan().all()
    assert_same((out[~names], lse[~names]), (clean[0][~names], clean[1][~names]))


def test_a_nan_query_stays_in_its_head():
    q, pool, idx, sinks = case(5, seed=19)
    clean, _ = run(q, pool, idx, sinks)
    q[3, 1, 0] = math.nan
    out, lse = run(q, pool, idx, sinks)
    assert out.isnan().any(-1).nonzero().tolist() == lse.isnan().nonzero().tolist() == [[3, 1]]
    out[3, 1] = clean[3, 1]
    assert_bitwise(out, clean)


@pytest.mark.parametrize("bad", [-2, 40])
def test_indices_outside_the_pool_are_refused(bad):
    q, pool, idx, sinks = case(3)
    idx[0, 0] = bad
    with pytest.raises(ValueError, match=r"idx spans .*, the pool has 40 rows"):
        run(q, pool, idx, sinks)
