"""Batched prefill gives each sequence the caches and logits that it gets alone."""

from functools import cache

import pytest
import torch

from dsv4.model import numerics
from dsv4.model._trace import cache_bytes
from dsv4.model.prefill import passes, prefill, read
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan

PUBLISHED = {
    **{"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "sliding_window": 128},
    **{"index_topk": 40, "num_experts_per_tok": 4},
}
NUMERICS = {"trained": numerics.trained, "B0_unfused": lambda config: numerics.of_plan(Plan(), config)}
LENGTHS = {
    1: [129],
    2: [128, 1],
    3: [127, 3, 5],
    8: [129, 3, 127, 5, 1, 128, 4, 40],
    65: [(1, 3, 4, 5)[i % 4] for i in range(65)],
}


@cache
def model(name):
    config = small_config(**PUBLISHED)
    return Transformer(config, random_weights(config, 0), NUMERICS[name](config), page_size=8)


def tokens(length, seed=0):
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def alone(name, length, seed):
    """Logits after a prompt and after one token more, and the cache's bytes in between."""
    own = model(name).new_cache()
    last = model(name).forward([own], [tokens(length, seed)])[-1]
    held = cache_bytes(own)
    return last, held, model(name).forward([own], [torch.tensor([7])])[0]


@pytest.mark.parametrize(
    ("name", "size", "chunk"),
    [
        *(("trained", size, 128) for size in LENGTHS),  # between sequences, and inside them
        ("trained", 3, 31),
        ("trained", 8, 512),  # all in one pass
        ("B0_unfused", 8, 100),
    ],
)
def test_a_batch_of_unequal_lengths_is_each_alone(name, size, chunk):
    prompts = [(length, 1 + i % 2) for i, length in enumerate(LENGTHS[size])]
    caches = [model(name).new_cache() for _ in prompts]
    got = prefill(model(name), caches, [tokens(*prompt) for prompt in prompts], chunk)
    held = [cache_bytes(own) for own in caches]
    after = model(name).forward(caches, [torch.tensor([7])] * size)
    for index, prompt in enumerate(prompts):
        last, bytes_alone, next_alone = alone(name, *prompt)
        assert torch.equal(got[index], last), f"logits of sequence {index}"
        assert held[index].keys() == bytes_alone.keys()
        wrong = [key for key, value in bytes_alone.items() if not torch.equal(held[index][key], value)]
        assert wrong == [], f"cache of sequence {index}"
        assert torch.equal(after[index], next_alone), f"decode step of sequence {index}"


def test_a_warm_cache_is_extended():
    first, second = tokens(130), tokens(9, seed=1)
    caches = [model("trained").new_cache() for _ in range(2)]
    prefill(model("trained"), caches[:1], [first], 50)
    warm = prefill(model("trained"), caches, [second, tokens(3)], 5)
    cold = prefill(model("trained"), [model("trained").new_cache()], [torch.cat((first, second))])
    assert torch.equal(warm[:1], cold)


def test_reading_gives_every_rows_logits():
    subject, prompts = model("trained"), [tokens(5), tokens(9, seed=1)]
    rows = [[], []]
    for cut, logits in read(subject, [subject.new_cache() for _ in prompts], prompts, 4):
        for (sequence, _), part in zip(cut, logits.split([r.stop - r.start for _, r in cut]), strict=True):
            rows[sequence].append(part)
    for prompt, parts in zip(prompts, rows, strict=True):
        assert torch.equal(torch.cat(parts), subject.forward([subject.new_cache()], [prompt]))


@pytest.mark.parametrize(
    ("lengths", "chunk", "cut"),
    [
        ([3], 8, [[(0, 0, 3)]]),
        ([3, 2], 5, [[(0, 0, 3), (1, 0, 2)]]),
        ([3, 4, 1], 4, [[(0, 0, 3), (1, 0, 1)], [(1, 1, 4), (2, 0, 1)]]),
        ([5], 2, [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 5)]]),
        ([1, 0, 1], 1, [[(0, 0, 1)], [(2, 0, 1)]]),
    ],
)
def test_passes_are_full_and_in_order(lengths, chunk, cut):
    got = [[(sequence, rows.start, rows.stop) for sequence, rows in one] for one in passes(lengths, chunk)]
    assert got == cut


def test_only_sequences_with_rows_are_in_a_pass(monkeypatch):
    seen, subject = [], model("trained")
    forward = subject.forward

    def watched(caches, chunks, *rest):
        seen.append([len(chunk) for chunk in chunks])
        return forward(caches, chunks, *rest)

    monkeypatch.setattr(subject, "forward", watched)
    prefill(subject, [subject.new_cache() for _ in range(3)], [tokens(3), tokens(4), tokens(1)], 4)
    assert seen == [[3, 1], [3, 1]]


def test_what_cannot_be_read_is_refused_before_anything_runs():
    subject = model("trained")
    caches = [subject.new_cache() for _ in range(2)]
    with pytest.raises(ValueError, match=r"prefill of \[3, 0\] tokens: expected 1 or more each"):
        prefill(subject, caches, [tokens(3), tokens(0)])
    with pytest.raises(ValueError, match="chunk = 0"):
        prefill(subject, caches, [tokens(3), tokens(2)], 0)
    with pytest.raises(ValueError, match=r"sequence 1 has a token id outside 0\.\.63"):
        prefill(subject, caches, [tokens(3), torch.tensor([64])], 2)
    with pytest.raises(ValueError, match="sequence 1 would reach 1025 tokens"):
        prefill(subject, caches, [tokens(3), tokens(1025)], 2)
    assert [one.length for one in caches] == [0, 0]
