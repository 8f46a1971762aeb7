"""Compressor and indexer by hand: entries, scores and choice in FP64, written again without the refs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.model import numerics
from dsv4.model._equations import TOKENS, array, close, run
from dsv4.model._trace import trace
from dsv4.model.layer import rope_frequencies
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from kernels.index_topk.ref import index_topk

# Compressor


def rotated(x: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    out = x.copy()
    for pair, frequency in enumerate(frequencies):
        at = len(x) - 2 * len(frequencies) + 2 * pair
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        out[at], out[at + 1] = x[at] * c - x[at + 1] * s, x[at + 1] * c + x[at] * s
    return out


@pytest.mark.parametrize(
    ("layer", "ratio", "site"), [(1, 4, "compressor"), (1, 4, "indexer"), (2, 8, "compressor")]
)
def test_an_entry_is_the_gated_mean_of_its_slots(layer, ratio, site):
    config = small_config()
    weights = random_weights(config, 0)
    taps = run(config, weights)
    held = weights.layers[layer]
    compressor = held.indexer.compressor if site == "indexer" else held.compressor
    x = array(taps[layer, "attn_in"])
    kv, gate = x @ array(compressor.kv.values), x @ array(compressor.gate.values)
    size = len(compressor.norm)
    entries = []
    for w in range(40 // ratio):
        slots = []  # (value, gate) of each slot
        for t in range(w * ratio, (w + 1) * ratio):
            bias = array(compressor.position_bias)[t % ratio]
            if ratio == 4:  # Cb of this window, Ca of the one before
                slots.append((kv[t, size:], gate[t, size:] + bias[size:]))
                if w:
                    slots.append((kv[t - 4, :size], gate[t - 4, :size] + bias[:size]))
            else:
                slots.append((kv[t], gate[t] + bias))
        total = sum(np.exp(g) for _, g in slots)
        pooled = sum(np.exp(g) / total * v for v, g in slots)
        normed = pooled / math.sqrt((pooled**2).mean() + config.rms_norm_eps) * array(compressor.norm)
        entries.append(rotated(normed, w * ratio, array(rope_frequencies(config, layer))))
        assert len(slots) == (4 if ratio == 4 and w == 0 else 8)
    close(
        taps[layer, "index_k" if site == "indexer" else "comp"], entries, 2e-5
    )  # the angle is an FP32 product


# Indexer


def test_index_scores_are_weighted_relus_of_visible_entries():
    config = small_config()
    weights = random_weights(config, 0)
    taps = run(config, weights)
    q, k = array(taps[1, "index_q"]), array(taps[1, "index_k"])
    head = array(taps[1, "attn_in"]) @ array(weights.layers[1].indexer.weights_proj.values)
    for t in range(40):
        for s in range(10):
            dots = [max(0.0, sum(q[t, h] * k[s])) for h in range(2)]
            score = sum(head[t, h] * dots[h] for h in range(2)) * 64**-0.5 * 2**-0.5
            got = taps[1, "index_scores"][t, s].item()
            if s < (t + 1) // 4:
                assert got == pytest.approx(score, rel=1e-5, abs=1e-6)
            else:
                assert got == -math.inf


def test_hadamard_and_no_rounding_leave_the_scores():
    config = small_config()
    plain = numerics.plain(config)

    def turned(q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return numerics.hadamard(q), w

    keys = {"index_logits": lambda q, k, w, **kw: REFS.index_logits(q, numerics.hadamard(k), w, **kw)}
    model = Transformer(
        config, random_weights(config, 0), replace(plain, index_query=turned), ops=replace(REFS, **keys)
    )
    got, expected = trace(model, [TOKENS])[0].taps, run(config)
    finite = expected[1, "index_scores"].isfinite()
    close(got[1, "index_scores"][finite], array(expected[1, "index_scores"][finite]), 2e-6)


def test_top_k_takes_the_best_visible_and_ties_go_to_the_smaller_index():
    scores = torch.tensor(
        [[1.0, 5.0, 5.0, 5.0, 9.0], [0.0, -0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, -3.0, 0.0, 0.0]]
    )
    assert index_topk(scores, torch.tensor([4, 5, 3]), 2).tolist() == [[1, 2], [0, 1], [0, 1]]
    assert index_topk(scores, torch.tensor([1, 0, 3]), 2).tolist() == [[0, -1], [-1, -1], [0, 1]]
    assert index_topk(scores[:, :1], torch.tensor([1, 0, 1]), 2).tolist() == [[0, -1], [-1, -1], [0, -1]]
    assert index_topk(scores[:, :0], torch.tensor([0, 0, 0]), 2).tolist() == [[-1, -1]] * 3
