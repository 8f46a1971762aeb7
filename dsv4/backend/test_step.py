"""Decode steps of fixed shapes, as graphs on a GPU: the eager step's bits, on a batch of unequal lengths."""

import pytest
import torch

from dsv4.backend.conftest import PAGE, ROOT, SIZES, TOKENS
from dsv4.backend.fixed import OpenWindow
from dsv4.backend.model import KernelTransformer
from dsv4.backend.pool import stored_bytes
from dsv4.backend.step import DecodeStep
from dsv4.backend.test_bound import LADDER
from dsv4.backend.values import on_cpu
from dsv4.model.cache import Tail
from dsv4.model.checkpoint import load
from dsv4.model.random_model import random_weights, small_config
from dsv4.taps import BY_NAME
from kernels._check import assert_bitwise, assert_fault_seen

STEPS = 4
CLOSED_BY = {"index_k": "index_closed", "index_k_store": "index_closed"}  # else "comp_closed"
RUNGS = ("B0_unfused", "P4", "P4_launch_gsa", "P5", "B0", "KV_nvfp4", "B1a", "B1", "B1_q2", "B1_aligned")
RUNGS += ("B2", "B2_fp4", "B3", "B4_head")


def model_of(config, weights, rung, device, page=PAGE):
    return KernelTransformer(config, weights, LADDER[rung].plan, page_size=page, device=device)


def prefilled(model, prompts):
    caches = [model.new_cache() for _ in prompts]
    model.forward(caches, prompts)
    return caches


class Kept:
    """A probe that keeps what stages write."""

    def __init__(self):
        self.taps = {}

    def __call__(self, layer, name, value):
        self.taps[layer, name] = value
        return value

    def values(self, columns=None):
        """Taps of the latest step on the CPU; entries of windows that it closed; ``columns`` of scores."""
        found = {}
        for (layer, name), value in self.taps.items():
            if name.endswith("_closed"):
                continue
            value = on_cpu(value).clone()
            if BY_NAME[name].axis == "entry":
                runs = self.taps[layer, CLOSED_BY.get(name, "comp_closed")]
                entries = torch.cat([run.entries for run in runs]).cpu()
                value = value[entries >= 0] if len(entries) == len(value) else value
            if name == "index_scores" and columns:
                width = columns[layer, name].shape[1]
                assert (value[:, width:] == -torch.inf).all()
                value = value[:, :width]
            found[layer, name] = value
        return found


def cached(model, caches):
    """Bytes that later tokens may read of each sequence, layer and store."""
    found = {}
    for number, cache in enumerate(caches):
        for layer, kept in enumerate(cache.layers):
            first = max(cache.length - model.config.sliding_window, 0)
            rows = {"window": torch.arange(first, cache.length)}
            for name in ("entries", "index"):
                if (store := getattr(kept, name)) is not None:
                    rows[name] = torch.arange(store.rows)
            for name, some in rows.items():
                store = getattr(kept, name)
                parts = stored_bytes(store.pool, store.slots(some.to(model.device))) if len(some) else ()
                found |= {(number, layer, name, part): raw.cpu() for part, raw in enumerate(parts)}
            for name, tail in kept.tails.items():
                found |= {(number, layer, name, part): getattr(tail, part).cpu() for part in ("kv", "gate")}
                found[number, layer, name, "closed"] = torch.tensor(tail.closed)
    return found


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        try:
            assert_bitwise(got[key].contiguous(), value.contiguous())
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None


def eager(model, prompts, tokens):
    """Logits and taps of each step, and what the caches hold after all of them."""
    caches, steps = prefilled(model, prompts), []
    for column in tokens.T:
        kept = Kept()
        logits = model.forward(caches, list(column.split(1)), kept)
        steps.append({("", "logits"): logits} | kept.values())
    return steps, cached(model, caches)


def compare(model, prompts, tokens, again=True):
    """Every step of a graph, and a replay of it ``again``, against the eager step; then what is cached."""
    want, want_cache = eager(model, prompts, tokens)
    caches, kept = prefilled(model, prompts), Kept()
    step = DecodeStep(model, caches, tokens.shape[1], kept)
    for column, wanted in zip(tokens.T, want, strict=True):
        got = {("", "logits"): step(column).cpu()} | kept.values(wanted)
        assert_equal(got, wanted)
        if again:
            step.positions -= 1
            step.replay()
            step.positions += 1
            assert_equal({("", "logits"): step.logits.cpu()} | kept.values(wanted), wanted)
    with pytest.raises(RuntimeError, match="room for"):
        step(column)
    step.hand_back()
    assert_equal(cached(model, caches), want_cache)
    return want


def test_a_step_of_fixed_shapes_equals_an_eager_one(accelerator):
    """Of two sequences one closes a window."""
    config = small_config(**SIZES | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
    model = model_of(config, random_weights(config, 1), "B3", accelerator)
    (step,) = compare(model, [TOKENS[:1], TOKENS[1:4]], TOKENS[8:].unflatten(0, (2, 1)), again=False)
    assert len(step[0, "comp"]) == 1
    for name in ("logits", "attn_out", "index_scores"):
        key = next(key for key in step if key[1] == name)
        assert_fault_seen(lambda key=key: assert_equal(step | {key: step[key].flip(0)}, step))


@pytest.mark.parametrize("before", [0, 4], ids=["hca", "csa"])
def test_an_open_window_takes_a_tail_and_gives_it_back(before, accelerator):
    ratio, length, end = 4, 6, 24
    kv, gate = torch.randn(2, end + before, 8, generator=torch.Generator().manual_seed(0)).to(accelerator)
    gate[:before] = -torch.inf  # before the first window there is nothing
    first = length // ratio * ratio
    tail = Tail(kv=kv[first : length + before], gate=gate[first : length + before])
    window = OpenWindow(tail, ratio, before, length)
    OpenWindow.beside([window])
    bias = torch.zeros(ratio, 8, device=accelerator)
    for position in range(length, end):
        at = slice(before + position, before + position + 1)
        positions = torch.tensor([position], device=accelerator)
        _, (closed,), starts = window.add((None,), positions, kv[at], gate[at], bias)
        assert closed.entries.tolist() == [position // ratio if position % ratio == ratio - 1 else -1]
        assert starts.tolist() == [position // ratio * ratio]
        tail = window.tail(position + 1)
        first = (position + 1) // ratio * ratio
        assert tail.closed == (position + 1) // ratio
        assert_bitwise(tail.kv, kv[first : at.stop])
        assert_bitwise(tail.gate, gate[first : at.stop])


def test_a_sequence_without_a_token_has_no_step(small, accelerator):
    config, weights, _ = small
    model = model_of(config, weights, "B3", accelerator)
    with pytest.raises(ValueError, match="lengths"):
        DecodeStep(model, [model.new_cache()], 1)


@pytest.fixture(scope="module")
def nano():
    return load(ROOT / "data" / "nano")


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_a_replayed_graph_equals_eager_steps_of_nano(nano, rung):
    """One sequence closes its first HCA window, one CSA windows, one chooses among more entries than its top-k."""
    text = (ROOT / "data" / "nano" / "heldout.txt").read_bytes()[:1000]
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    prompts = [text[:3], text[3:128], text[200:401], text[500:760]]
    tokens = torch.stack([text[900 + STEPS * row :][:STEPS] for row in range(4)])
    model = model_of(nano.config, nano.weights, rung, "cuda", page=64)
    steps = compare(model, prompts, tokens)
    assert {key[1] for step in steps for key in step} >= set(BY_NAME)


@pytest.mark.gpu
def test_a_graph_whose_pools_grew_is_refused(nano):
    model = model_of(nano.config, nano.weights, "B3", "cuda", page=64)
    step = DecodeStep(model, prefilled(model, [torch.arange(5)]), 2)
    step(torch.tensor([7]))
    prefilled(model, [torch.arange(200) for _ in range(20)])
    with pytest.raises(RuntimeError, match="a pool of pages has grown"):
        step(torch.tensor([7]))
