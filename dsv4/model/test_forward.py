"""A row's bits do not depend on how its sequence was cut, or on what else was computed with it."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.model import numerics
from dsv4.model._trace import Trace, differing, trace
from dsv4.model.config import CSA_RATIO
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.model.weights import on_device
from dsv4.plan import Plan, unflatten

NARROW = unflatten(
    {
        **{field: "fused" for field in ("norm_quant", "mhc_quant", "q_a_norm", "kv_norm")},
        **{f"casts.{site}": "native" for site in ("router", "swiglu", "attn_out", "head")},
        **{field: "fp8" for field in ("q_format", "rope_format", "pv_format", "index_score")},
        **{"kv_read": "in_place", "kv_record": "aligned"},
    }
)
OTHER = unflatten(
    {"kv_format": "nvfp4", "q_format": "fp8x2", "index_score": "fp4", "residual": "fp32_first_half"}
)
NUMERICS = {
    "plain": numerics.plain,
    "trained": numerics.trained,
    "B0_unfused": lambda config: numerics.of_plan(Plan(), config),
    "narrow": lambda config: numerics.of_plan(NARROW, config),
    "other": lambda config: numerics.of_plan(OTHER, config),
}
every_numerics = pytest.mark.parametrize("name", NUMERICS)

CONFIGS: dict[str, dict[str, Any]] = {
    "small": {"num_hidden_layers": 3, "compress_ratios": [0, 4, 8]},
    "published": {
        **{"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "sliding_window": 128},
        **{"index_topk": 40, "num_experts_per_tok": 4},
    },
}


@cache
def model(name: str, config: str = "small", page_size: int = 8) -> Transformer:
    sizes = small_config(**CONFIGS[config])
    return Transformer(sizes, random_weights(sizes, 0), NUMERICS[name](sizes), page_size=page_size)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def whole(name: str, length: int, config: str = "small", seed: int = 0) -> Trace:
    return trace(model(name, config), [tokens(length, seed)])[0]


def cut(length: int, chunk: int) -> list[list[int]]:
    return [[min(chunk, length - start)] for start in range(0, length, chunk)]


@every_numerics
@pytest.mark.parametrize("chunk", range(1, 10))
def test_chunked_is_whole(name, chunk):
    length = 40  # over topk * ratio = 24, and over two turns of the window's ring of 16
    chunked = trace(model(name), [tokens(length)], cut(length, chunk))[0]
    assert differing(chunked, whole(name, length)) == []


@every_numerics
@pytest.mark.parametrize("chunk", [127, 128, 129])
def test_long_chunks_are_whole(name, chunk):
    length = 300  # 37 HCA entries: their slots grow from 32 to 64 on the way
    chunked = trace(model(name), [tokens(length)], cut(length, chunk))[0]
    assert differing(chunked, whole(name, length)) == []


@pytest.mark.parametrize("name", ["plain", "B0_unfused"])
@pytest.mark.parametrize("calls", [[127, 1, 1, 1, 35], [128, 37], [129, 3, 33], [63, 64, 38]], ids=str)
def test_chunks_around_the_published_window_and_ratio_are_whole(name, calls):
    chunked = trace(model(name, "published"), [tokens(165)], [[n] for n in calls])[0]
    assert differing(chunked, whole(name, 165, "published")) == []


LENGTHS = {
    1: [25],
    2: [129, 3],
    3: [1, 23, 128],
    8: [1, 3, 4, 5, 7, 8, 127, 24],
    65: [1 + 7 * i % 26 for i in range(65)],
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in NUMERICS
        for size in LENGTHS
        if size < 65 or name in ("plain", "B0_unfused", "narrow")
    ],
)
def test_batch_of_unequal_lengths_is_each_alone(name, size):
    lengths = LENGTHS[size]
    streams = [tokens(131, seed=1 + i % 5) for i in range(size)]
    sequences = [stream[: length + 2] for stream, length in zip(streams, lengths, strict=True)]
    idle = [[i % 3 != 0 for i in range(size)], [i % 3 == 0 for i in range(size)]]  # a call may bring nothing
    calls = [lengths, [int(x) for x in idle[0]], [int(x) for x in idle[1]], [1] * size]
    batched = trace(model(name), sequences, calls)
    for index, got in enumerate(batched):
        assert differing(got, whole(name, 131, seed=1 + index % 5)) == [], f"sequence {index} of {size}"


@pytest.mark.parametrize("name", ["plain", "B0_unfused"])
def test_order_in_the_batch_does_not_matter(name):
    sequences = [tokens(length, seed=length) for length in (9, 130, 4, 33)]
    forward = trace(model(name), sequences)
    backward = trace(model(name), sequences[::-1])[::-1]
    assert [differing(one, other) for one, other in zip(forward, backward, strict=True)] == [[]] * 4


@pytest.mark.parametrize("name", ["plain", "narrow"])
def test_longest_probe_lengths(name):
    lengths = [255, 256, 257, 511, 512, 513]
    batched = trace(model(name), [tokens(length) for length in lengths])
    for got in batched[:-1]:
        assert differing(got, batched[-1]) == []
    assert differing(trace(model(name), [tokens(513)], [[256], [257]])[0], batched[-1]) == []


@pytest.mark.parametrize("name", ["plain", "narrow"])
def test_number_of_threads_does_not_matter(name):
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs.append(trace(model(name), [tokens(150), tokens(90, seed=1)]))
    finally:
        torch.set_num_threads(before)
    assert [differing(one, two) for one, two in zip(*runs, strict=True)] == [[], []]


@every_numerics
@pytest.mark.parametrize("page_size", [1, 64])
def test_page_size_does_not_matter(name, page_size):
    got = trace(model(name, page_size=page_size), [tokens(40)], [[33], [7]])[0]
    expected = whole(name, 40)
    got.stored |= {
        key: value for key, value in expected.stored.items() if key[1] == "window"
    }  # a longer ring
    assert differing(got, expected) == []


@every_numerics
def test_warm_second_turn_is_cold(name):
    config = model(name)
    first, second = tokens(37), tokens(26, seed=1)
    cache = config.new_cache()
    trace(config, [first], [[30], [1], [1], [5]], [cache])
    trace(config, [tokens(50, seed=2)])  # another request in between
    warm = trace(config, [second], [[25], [1]], [cache])[0]
    cold = trace(config, [torch.cat((first, second))])[0]
    for key, value in warm.taps.items():  # the warm trace holds the second turn's rows and entries alone
        cold.taps[key] = cold.taps[key][-len(value) :] if len(value) else cold.taps[key][:0]
    assert differing(warm, cold) == []


@every_numerics
def test_second_identical_request_is_the_first(name):
    runs = [trace(model(name), [tokens(40)])[0] for _ in range(2)]
    assert differing(*runs) == []


@pytest.mark.parametrize("value", ["fused_scalar_gsa", "fused_launch_gsa"])
def test_scalar_gsa_ties_a_row_to_its_batch(value):
    """The plans that may not pass: what the ladder keeps as leaves to show it."""
    config = small_config(**CONFIGS["small"])
    tied = numerics.of_plan(unflatten({"norm_quant": value}), config)
    got = trace(Transformer(config, random_weights(config, 0), tied), [tokens(40), tokens(33, seed=1)])[0]
    alone = trace(Transformer(config, random_weights(config, 0), tied), [tokens(40)])[0]
    assert differing(got, alone)[0] == "0.attn_in_q"


# Faults in what is kept between calls: the comparison must see them, and name the first tensor that is wrong.


def forget(what: str) -> Any:
    """Chunked run whose caches lose something at the border."""
    transformer = model("plain")
    sequence, cache = tokens(40), transformer.new_cache()
    first = trace(transformer, [sequence[:26]], None, [cache])[0]
    for layer in cache.layers:
        if what == "half-window" and layer.index is not None:
            layer.tails["compressor"].gate[:CSA_RATIO] = -torch.inf  # the window before the open one
        if what == "ring":
            layer.window.table.reverse()
        if what == "index keys" and layer.index is not None:
            layer.index.pages.zero_()
    rest = trace(transformer, [sequence[26:]], None, [cache])[0]
    for key, value in whole("plain", 40).taps.items():
        width = value.shape[1] if key[1] == "index_scores" else None
        pieces = [t.taps[key] for t in (first, rest)]
        if width is not None:
            pieces = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=-torch.inf) for p in pieces]
        rest.taps[key] = torch.cat(pieces)
    return rest


@pytest.mark.parametrize(
    ("what", "first"),
    [("half-window", "1.comp"), ("ring", "0.attn_out"), ("index keys", "1.index_scores")],
)
def test_what_is_lost_between_calls_is_seen(what, first):
    assert differing(forget(what), whole("plain", 40))[0] == first


def test_masked_keys_are_never_read():
    """What a row may not see is made NaN in the pool: no NaN may come out."""

    def poisoned(q: Tensor, pool: Tensor, idx: Tensor, sinks: Tensor, **kwargs: Any) -> Any:
        outs = []
        for row in range(len(q)):
            seen = torch.zeros(len(pool), dtype=torch.bool)
            seen[idx[row][idx[row] >= 0]] = True
            outs.append(
                REFS.sparse_attn(
                    q[row : row + 1],
                    pool.masked_fill(~seen[:, None], torch.nan),
                    idx[row : row + 1],
                    sinks,
                    **kwargs,
                )
            )
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])

    clean = model("plain")
    hurt = replace(clean, ops=replace(REFS, sparse_attn=poisoned))
    assert differing(trace(hurt, [tokens(40)], [[26], [14]])[0], whole("plain", 40)) == []


def test_too_long_a_sequence_is_refused():
    config = small_config(**CONFIGS["small"], max_position_embeddings=20)
    short = Transformer(config, random_weights(config, 0), numerics.plain(config))
    cache = short.new_cache()
    short.forward([cache], [tokens(19)])
    with pytest.raises(ValueError, match="sequence 0 would reach 21 tokens; max_position_embeddings is 20"):
        short.forward([cache], [tokens(2)])
    assert cache.length == 19
    assert short.forward([cache], [tokens(1)]).shape == (1, 64)


@pytest.mark.parametrize("bad", [-1, 64])
def test_token_outside_the_vocabulary_is_refused(bad):
    transformer = model("plain")
    caches = [transformer.new_cache() for _ in range(2)]
    with pytest.raises(ValueError, match=r"sequence 1 has a token id outside 0\.\.63"):
        transformer.forward(caches, [tokens(3), torch.tensor([1, bad])])
    assert [cache.length for cache in caches] == [0, 0]


def test_a_probes_value_is_what_the_next_stage_reads():
    transformer = model("plain")
    seen: dict[str, Tensor] = {}

    def probe(layer: int | str, name: str, value: Any) -> Any:
        if (layer, name) == (1, "attn_in"):
            value = torch.zeros_like(value)
        if layer == 1:
            seen[name] = value
        return value

    transformer.forward([transformer.new_cache()], [tokens(9)], probe)
    assert not seen["qr"].any()
    assert not seen["kv"].any()
    assert seen["streams"].any()


def test_empty_calls_change_nothing():
    transformer = model("B0_unfused")
    cache = transformer.new_cache()
    none = torch.empty(0, dtype=torch.int64)
    assert transformer.forward([cache], [none]).shape == (0, 64)
    got = trace(transformer, [tokens(40)], [[0], [26], [0], [14], [0]], [cache])[0]
    assert differing(got, whole("B0_unfused", 40)) == []


@every_numerics
def test_every_tensor_is_made_where_the_weights_are(name):
    subject, ids = model(name), tokens(40)
    want = subject.forward([subject.new_cache()], [ids])
    cache = subject.new_cache()
    with torch.device("meta"):  # what is made without saying where has no values
        got = subject.forward([cache], [ids])
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: refs compared on the CPU only")
@every_numerics
def test_refs_on_a_gpu_are_refs_on_a_cpu(name):
    subject, ids = model(name), tokens(40)
    want = subject.forward([subject.new_cache()], [ids])
    there = replace(subject, weights=on_device(subject.weights, "cuda"))
    got = there.forward([there.new_cache()], [ids.cuda()]).cpu()
    assert torch.linalg.norm(got - want) <= 1e-5 * torch.linalg.norm(want)
