"""Cases small enough to check by hand: the equations in FP64, written again without the refs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dsv4.model._equations import TOKENS, array, close, run, sigmoid
from dsv4.model._oracle import oracle_config
from dsv4.model.layer import rope_frequencies
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_tensors, random_weights, small_config
from dsv4.taps import MODEL
from kernels.hc.ref import expand, mix, sinkhorn
from kernels.rope.ref import cos_sin, inverse_frequencies, rope
from kernels.route.ref import choose_experts, expert_weights, hash_experts, router_scores
from kernels.sparse_attn.ref import sparse_attn
from kernels.swiglu.ref import swiglu

# mHC


def test_streams_are_mixed_over_the_first_index_of_comb():
    streams = torch.tensor([[[1.0, 0.0], [0.0, 10.0]]])  # stream 0 is (1, 0), stream 1 is (0, 10)
    comb = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])  # of stream 0, 0.9 stays and 0.1 goes to stream 1
    post, y = torch.tensor([[2.0, 3.0]]), torch.tensor([[100.0, 1000.0]])
    close(expand(streams, y, post, comb), [[[200.9, 2003.0], [300.1, 3007.0]]])


def test_sinkhorn_is_rows_then_columns_each_with_its_epsilon():
    eps, logits = 0.1, [[0.0, math.log(3)], [math.log(4), 0.0]]
    m = [[math.exp(x) / sum(map(math.exp, row)) + eps for x in row] for row in logits]
    assert np.allclose(m, [[0.35, 0.85], [0.9, 0.3]])

    def columns(m):
        return [[m[j][k] / (m[0][k] + m[1][k] + eps) for k in range(2)] for j in range(2)]

    def rows(m):
        return [[x / (sum(row) + eps) for x in row] for row in m]

    given = torch.tensor([logits], dtype=torch.float64)
    for iterations in (1, 2, 3):
        expected = columns(m)
        for _ in range(iterations - 1):
            expected = columns(rows(expected))
        got = sinkhorn(given, hc_eps=eps, iterations=iterations)[0]
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13)


def test_mix_is_one_projection_of_the_normed_streams():
    rng = np.random.default_rng(0)
    n, size, norm_eps, hc_eps = 3, 2, 0.5, 0.25  # large and unequal: neither may stand for the other
    x, fn = rng.standard_normal((n, size)), rng.standard_normal((n * (n + 2), n * size))
    base, scale = rng.standard_normal(n * (n + 2)), np.array([0.5, 2.0, 3.0])
    flat = x.ravel() / math.sqrt((x**2).mean() + norm_eps)
    logits = [sum(w * v for w, v in zip(row, flat, strict=True)) for row in fn]
    pre = [sigmoid(logits[i] * 0.5 + base[i]) + hc_eps for i in range(n)]
    post = [2 * sigmoid(logits[n + i] * 2.0 + base[n + i]) for i in range(n)]
    at = [[2 * n + n * j + k for k in range(n)] for j in range(n)]  # row j: from stream j
    comb = torch.tensor([[[logits[i] * 3.0 + base[i] for i in row] for row in at]], dtype=torch.float64)
    given = [torch.tensor(a, dtype=torch.float32) for a in (x[None], fn, base, scale)]
    got = mix(*given, norm_eps=norm_eps, hc_eps=hc_eps, iterations=4)
    close(got.pre[0], pre, 1e-6)
    close(got.post[0], post, 1e-6)
    expected = sinkhorn(comb, hc_eps=hc_eps, iterations=4)
    close(got.comb, expected.numpy(), 1e-6)
    assert not np.allclose(expected[0], expected[0].T, atol=0.05)  # a transposed comb would show


def test_the_head_collapses_with_one_sigmoid_a_stream():
    config = small_config(hc_eps=0.125, rms_norm_eps=0.25)
    weights = random_weights(config, 0)
    taps = run(config, weights)
    x = array(taps[3, "streams"])  # [T, N, D]
    flat = x.reshape(len(x), -1)
    flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 0.25)
    pre = 1 / (
        1
        + np.exp(
            -(flat @ array(weights.hc_head.fn).T * array(weights.hc_head.scale) + array(weights.hc_head.base))
        )
    )
    hidden = ((pre + 0.125)[:, :, None] * x).sum(1)
    hidden = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 0.25) * array(weights.norm)
    close(taps[MODEL, "hidden"], hidden, 1e-6)


# Attention


def test_the_sink_joins_the_denominator_but_not_the_lse():
    v = torch.tensor([[8.0, 4.0]])
    q = torch.zeros(1, 2, 2)  # q . k = 0: weight 1
    sinks = torch.tensor([math.log(3), -math.inf])
    out, lse = sparse_attn(q, v, torch.tensor([[0]]), sinks, n_rope=1, scale=1.0)
    close(out, [[[2.0, 1.0], [8.0, 4.0]]])  # v / (1 + 3), v / (1 + 0)
    close(lse, [[0.0, 0.0]])


def test_two_keys_and_a_hole():
    pool = torch.tensor([[1.0, 0.0], [0.0, 2.0], [50.0, 50.0]])  # the last is named by no row
    q, scale = torch.tensor([[[2.0, 3.0]]]), 0.5
    out, lse = sparse_attn(q, pool, torch.tensor([[1, -1, 0]]), torch.tensor([0.5]), n_rope=1, scale=scale)
    a, b = math.exp(0.5 * 2.0), math.exp(0.5 * 6.0)
    total = a + b + math.exp(0.5)
    close(out, [[[a / total, 2 * b / total]]])
    close(lse, [[math.log(a + b)]])


def test_a_row_without_keys_is_zero():
    out, lse = sparse_attn(
        torch.ones(1, 1, 2), torch.ones(1, 2), torch.tensor([[-1, -1]]), torch.zeros(1), n_rope=1, scale=1.0
    )
    assert not out.any()
    assert lse.item() == -math.inf


def test_scale_is_head_dim_to_the_minus_half():
    config = small_config(compress_ratios=[0] * 4, sliding_window=1)
    taps = run(config)
    for layer in range(4):
        q, k = array(taps[layer, "q"]), array(taps[layer, "kv_store"])
        close(taps[layer, "lse"], (q * k[:, None]).sum(-1) / math.sqrt(128), 2e-6)  # one key: itself


def test_inverse_rope_undoes_rope_of_a_row_that_sees_itself_alone():
    config = small_config(compress_ratios=[0] * 4, sliding_window=1)
    weights = random_weights(config, 0)
    quiet = tuple(replace(layer, sinks=torch.full_like(layer.sinks, -torch.inf)) for layer in weights.layers)
    taps = run(config, replace(weights, layers=quiet))
    for layer in range(4):
        x = array(taps[layer, "attn_in"])
        kv = x @ array(weights.layers[layer].kv.values * weights.layers[layer].kv.scale)
        kv = kv / np.sqrt((kv**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        kv = kv * array(weights.layers[layer].kv_norm)  # never rotated
        close(taps[layer, "attn_out"], np.repeat(kv[:, None], 4, axis=1), 2e-6)
        turned = array(taps[layer, "kv"])
        assert np.abs(turned[1:, 64:] - kv[1:, 64:]).max() > 0.1
        close(torch.tensor(turned[:, :64]), kv[:, :64], 1e-6)


def test_each_head_is_normed_without_weight_before_its_rotation():
    taps = run(small_config())
    rms = (array(taps[1, "q"]) ** 2).mean(-1)
    np.testing.assert_allclose(rms, 1.0, rtol=1e-4)  # a rotation keeps it; eps takes a little


@pytest.mark.parametrize(("layer", "ratio"), [(0, 0), (1, 4), (2, 8)])
def test_a_row_sees_its_window_and_the_entries_closed_by_then(layer, ratio):
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(q: Tensor, pool: Tensor, idx: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((pool, idx))
        return REFS.sparse_attn(q, pool, idx, *args, **kwargs)

    config = small_config(sliding_window=5, index_topk=3)
    taps = run(config, sparse_attn=spy)
    pool, idx = seen[layer]
    assert torch.equal(pool[:40], taps[layer, "kv_store"])
    if ratio:
        assert torch.equal(pool[40:], taps[layer, "comp_store"])
    for t in range(40):
        named = sorted(i for i in idx[t].tolist() if i >= 0)
        window = [i for i in named if i < 40]
        entries = [i - 40 for i in named if i >= 40]
        closed = (t + 1) // ratio if ratio else 0  # t = 3 is the first row that sees an entry of ratio 4
        assert window == list(range(max(0, t - 4), t + 1))
        assert len({*entries}) == len(entries) == (min(closed, 3) if ratio == 4 else closed)
        assert all(0 <= entry < closed for entry in entries)


# RoPE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "rope_scaling": {
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            }
        },
        {
            "rope_scaling": {
                "factor": 16,
                "original_max_position_embeddings": 256,
                "beta_fast": 32,
                "beta_slow": 1,
            }
        },
        {
            "rope_scaling": {
                "factor": 4,
                "original_max_position_embeddings": 4096,
                "beta_fast": 8,
                "beta_slow": 2,
            }
        },
        {"compress_rope_theta": 1000000.0},
    ],
    ids=["small", "published", "nano", "other-betas", "other-theta"],
)
def test_frequencies_are_transformers_bit_for_bit(changes):
    config = small_config(**changes)
    theirs = oracle_config(config)
    compressed, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu", layer_type="compress")
    assert factor == 1.0  # no mscale
    assert torch.equal(rope_frequencies(config, 1), compressed)
    assert torch.equal(rope_frequencies(config, 2), compressed)
    plain = 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64))
    assert torch.equal(rope_frequencies(config, 0), plain)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    length, theta, factor = 65536, 160000.0, 16.0
    got = array(
        inverse_frequencies(64, theta, factor=factor, original_max_position=length, beta_fast=32, beta_slow=1)
    )
    plain = np.array([theta ** (-2 * i / 64) for i in range(32)])
    turns = length * plain / (2 * math.pi)  # of each pair over the original length
    kept, stretched = got / plain > 1 - 1e-6, got / plain < (1 + 1e-6) / factor
    # The paper's rule, the ramp's ends widened to whole pairs as in every published implementation.
    first = math.floor(64 * math.log(length / (32 * 2 * math.pi)) / (2 * math.log(theta)))
    last = math.ceil(64 * math.log(length / (1 * 2 * math.pi)) / (2 * math.log(theta)))
    assert kept.tolist() == [i <= first for i in range(32)]
    assert stretched.tolist() == [i >= last for i in range(32)]
    assert turns[first] >= 32 >= turns[first + 1]
    assert turns[last - 1] >= 1 >= turns[last]
    share = np.clip((np.arange(32) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(got, plain * (1 - share) + plain / factor * share, rtol=3e-7)


def test_pairs_are_neighbours_and_the_rest_stays():
    frequencies = torch.tensor([0.5, 0.25])
    x = torch.tensor([[7.0, 1.0, 0.0, 0.0, 1.0]])
    c, s = math.cos, math.sin
    got = rope(x, *cos_sin(torch.tensor([3]), frequencies))
    close(got, [[7.0, c(1.5), s(1.5), -s(0.75), c(0.75)]])
    close(rope(got, *cos_sin(torch.tensor([3]), frequencies), inverse=True), x.tolist())


# Experts


def test_router_score_is_the_root_of_softplus():
    x = torch.tensor([[1.0], [-40.0], [200.0]])
    got = router_scores(x, torch.tensor([[1.0], [0.0]]))
    wanted = [
        [math.sqrt(math.log1p(math.exp(v))) if v < 100 else math.sqrt(v), math.sqrt(math.log(2))]
        for v in (1, -40, 200)
    ]
    np.testing.assert_allclose(array(got), wanted, rtol=1e-6)


def test_bias_steers_the_choice_alone_and_ties_go_to_the_smaller_index():
    scores = torch.tensor([[0.5, 0.25, 1.0, 0.25], [1.0, 1.0, 1.0, 1.0]])
    ids = choose_experts(scores, torch.tensor([0.0, 0.5, 0.0, 0.5]), 2)
    assert ids.tolist() == [[1, 2], [1, 3]]  # 0.5, 0.75, 1.0, 0.75: expert 1 before 3
    assert choose_experts(scores, torch.zeros(4), 2).tolist() == [[0, 2], [0, 1]]
    close(expert_weights(scores, ids, scaling=1.5), [[0.3, 1.2], [0.75, 0.75]])


def test_hash_layers_read_the_token_id():
    table = torch.tensor([[3, 1], [0, 2], [2, 1]])
    assert hash_experts(torch.tensor([2, 0, 2]), table).tolist() == [[1, 2], [1, 3], [1, 2]]
    config = small_config()
    stored = random_tensors(config, 0)
    ids = run(config)[0, "expert_ids"]
    assert ids.tolist() == [sorted(stored["model.layers.0.mlp.gate.tid2eid"][t].tolist()) for t in TOKENS]


def test_clamp_bounds_the_gate_above_and_up_on_both_sides():
    gate, up = torch.tensor([[3.0, -3.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 5.0, -5.0]])
    wanted = [[2 * sigmoid(2), -3 * sigmoid(-3), sigmoid(1) * 2, sigmoid(1) * -2]]
    close(swiglu(gate, up, limit=2.0), wanted)


def test_routed_and_shared_experts_are_summed():
    config = small_config()
    weights = random_weights(config, 0)
    taps = run(config, weights)
    held = weights.layers[2]
    x, limit = array(taps[2, "moe_in"]), config.swiglu_limit

    def ffn(x, gate, up, down):
        g, u = np.minimum(x @ gate, limit), np.clip(x @ up, -limit, limit)
        return (g / (1 + np.exp(-g)) * u) @ down

    def matrix(w, expert=None):
        return array(w.values[expert] * w.scale[expert] if expert is not None else w.values * w.scale)

    shared = ffn(x, matrix(held.shared_gate), matrix(held.shared_up), matrix(held.shared_down))
    routed = np.zeros_like(x)
    for t in range(40):
        for expert, weight in zip(
            taps[2, "expert_ids"][t].tolist(), taps[2, "expert_weights"][t].tolist(), strict=True
        ):
            gate, up = np.split(matrix(held.experts_gate_up, expert), 2, axis=-1)
            routed[t] += weight * ffn(x[t], gate, up, matrix(held.experts_down, expert))
    close(taps[2, "shared"], shared, 2e-6)
    close(taps[2, "routed"], routed, 2e-6)
    close(taps[2, "moe_out"], shared + routed, 2e-6)
    assert (np.abs(x @ matrix(held.shared_up)) > limit).mean() > 0.05  # the clamp is exercised
