"""``plain`` is transformers' DeepseekV4ForCausalLM: its values, our choices replayed; its choices, but for ties."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV4Config

from dsv4.model import numerics
from dsv4.model._oracle import Oracle, OracleRun, Taps
from dsv4.model._trace import trace
from dsv4.model.checkpoint import Tensors, build
from dsv4.model.config import FIXED, ModelConfig, load_config
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_tensors, small_config
from dsv4.model.transformer import Transformer
from dsv4.taps import MODEL
from kernels.compress.ref import windows
from kernels.hc.ref import Mix

LIMIT = 1e-5  # relative L2; the oracle's own FP32 rounding reaches 2e-6
TIE = 1e-5  # relative margin at a cut, under which FP32 may choose either (with two index heads, many scores are 0)
NANO = Path(__file__).parents[2] / "data" / "nano"

CASES: dict[str, dict[str, Any]] = {
    "window-only": {"compress_ratios": [0, 0, 0], "num_hidden_layers": 3},
    "csa": {"compress_ratios": [4, 4], "num_hidden_layers": 2, "num_hash_layers": 0, "index_n_heads": 8},
    "hca": {"compress_ratios": [8, 8], "num_hidden_layers": 2},
    "hash-routed": {"num_hash_layers": 4},
    "top-k-routed": {"num_hash_layers": 0, "num_experts_per_tok": 3},
    "mixed": {},
    "two-epsilons": {"hc_eps": 1e-3, "rms_norm_eps": 1e-2, "hc_sinkhorn_iters": 3},
    "published-ratios": {"compress_ratios": [0, 4, 128, 4], "sliding_window": 128, "index_topk": 9},
}
SHORT = (1, 3, 4, 5, 7, 8, 23, 24, 25)  # and the smallest topk * ratio, 24, with its neighbours
LONG = (127, 129, 300)


@cache
def models(case: str, seed: int) -> tuple[Transformer, Oracle]:
    config = small_config(**CASES[case])
    stored = random_tensors(config, seed)
    return plain(config, stored), Oracle(config, stored)


def plain(config: ModelConfig, stored: Mapping[str, Tensor]) -> Transformer:
    return Transformer(config, build(config, Tensors(stored, config)), numerics.plain(config))


def tokens(config: ModelConfig, length: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def both(ours: Transformer, oracle: Oracle, ids: Tensor) -> tuple[Taps, OracleRun]:
    taps = trace(ours, [ids])[0].taps
    return taps, oracle.run(ids, taps)


def distance(mine: Tensor, theirs: Tensor, size: Tensor) -> tuple[float, float]:
    """L2 norms of the difference and of ``size``; inf where -inf or NaN are not in the same places."""
    assert mine.shape == theirs.shape, f"ours {tuple(mine.shape)}, oracle {tuple(theirs.shape)}"
    finite = theirs.isfinite()
    if not torch.equal(mine[~finite], theirs[~finite]):
        return torch.inf, 1.0
    off = mine.double()[finite] - theirs.double()[finite]
    return float(off.norm()), float(size.double()[finite].norm())


def errors(runs: list[tuple[Taps, OracleRun]]) -> dict[str, float]:
    """Relative L2 distance of every tensor that the oracle shows, over all runs; of logits, the worst run's.

    Over all runs, because a tensor of two small numbers may be the rest of a cancellation.
    """
    norms: dict[str, list[tuple[float, float]]] = {}
    for taps, run in runs:
        for (layer, name), theirs in run.taps.items():
            size = summands(layer, run.taps) if name == "index_scores" else theirs
            norms.setdefault(f"{layer}.{name}", []).append(distance(taps[layer, name], theirs, size))
    found = {
        key: math.hypot(*(d for d, _ in n)) / max(math.hypot(*(s for _, s in n)), 1e-30)
        for key, n in norms.items()
    }
    return found | {f"{MODEL}.logits": max(d / s for d, s in norms[f"{MODEL}.logits"])}


def summands(layer: int | str, taps: Taps) -> Tensor:
    """Index scores with every product taken positive: FP32 errs by what was added, not by what remains."""
    q, k, w = (taps[layer, f"index_{name}"].double().abs() for name in "qkw")
    return torch.einsum("thd,cd,th->tc", q, k, w)


def margins(scores: Tensor, theirs: Tensor, ours: Tensor) -> list[float]:
    """For every row whose choice differs, how far from the cut the farthest such candidate scores, relatively.

    The cut is the last chosen score; inf where no cut explains the difference.
    """
    found = []
    for row, mine, own in zip(scores.double(), ours.tolist(), theirs.tolist(), strict=True):
        mine, own = ([i for i in ids if i >= 0] for ids in (mine, own))
        differ = sorted({*mine} ^ {*own})
        if len(mine) != len(own) or len({*mine}) != len(mine):
            found.append(math.inf)
        elif differ:
            cut = row.sort(descending=True).values[len(mine) - 1]
            found.append(float(((row[differ] - cut).abs() / cut.abs().clamp_min(1e-30)).max()))
    return found


def check(*runs: tuple[Taps, OracleRun]) -> None:
    too_far = {name: f"{error:.1e}" for name, error in errors(list(runs)).items() if not error <= LIMIT}
    assert not too_far, f"relative L2 over {LIMIT}: {too_far}"
    for taps, run in runs:
        for name, choices in (("expert_ids", run.router), ("topk", run.indexer)):
            for layer, (scores, own) in choices.items():
                margin = margins(scores, own, taps[layer, name])
                assert all(m < TIE for m in margin), f"{layer}.{name} differ at relative margins {margin}"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_and_every_choice_of_a_short_prompt_is_the_oracles(case, seed):
    ours, oracle = models(case, seed)
    check(*(both(ours, oracle, tokens(ours.config, length, seed=length)) for length in SHORT))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_and_every_choice_of_a_long_prompt_is_the_oracles(case):
    ours, oracle = models(case, 0)
    check(*(both(ours, oracle, tokens(ours.config, length, seed=length)) for length in LONG))


def test_every_tensor_the_model_has_is_compared():
    ours, oracle = models("mixed", 0)
    taps, run = both(ours, oracle, tokens(ours.config, 60))
    compared = {name for _, name in run.taps}
    never = {name for _, name in taps} - compared
    assert never == {
        *("attn_pre", "moe_pre"),  # the oracle shows only what they make: attn_in, moe_in
        *("attn_in_q", "qr_q", "moe_in_q"),  # the same tensors as attn_in, qr and moe_in in `plain`
        *("kv_store", "kv_bytes", "comp_store", "comp_bytes", "index_k_store"),  # ours alone
        "topk",  # a choice: compared as one
    }
    assert all(taps[layer, name] is not None for layer, name in run.taps)


def test_what_no_key_changes_is_the_oracles_default():
    default = DeepseekV4Config()
    known = {key: getattr(default, key) for key in FIXED if hasattr(default, key)}
    assert known == {key: FIXED[key] for key in known}
    assert set(FIXED) - set(known) == {"topk_method", "n_group"}


def test_the_trained_model_is_the_oracles_too():
    config, stored = load_config(NANO), load_file(NANO / "model.safetensors")
    text = (NANO / "heldout.txt").read_bytes()[:171]
    taps, run = both(plain(config, stored), Oracle(config, stored), torch.tensor([256, *text]))
    check((taps, run))
    visible = (taps[2, "topk"] >= 0).sum(-1)
    assert int(visible.max()) == config.index_topk < taps[2, "index_scores"].shape[1]  # the cut is exercised


def test_replayed_choices_are_what_the_oracle_computes_with():
    ours, oracle = models("mixed", 0)
    taps, run = both(ours, oracle, tokens(ours.config, 60))
    for name in ("expert_ids", "topk"):
        other = dict(taps)
        other[1, name] = taps[1, name].flip(0)  # layer 1: CSA and top-k routed
        moved = oracle.run(tokens(ours.config, 60), other).taps[MODEL, "logits"]
        assert (moved - run.taps[MODEL, "logits"]).norm() > 100 * LIMIT * moved.norm(), name


# A comparison that cannot fail proves nothing: each planted fault must push some tensor over the limit.


def transposed_comb(*args: Any, **kwargs: Any) -> Mix:
    mix = REFS.hc_mix(*args, **kwargs)
    return mix._replace(comb=mix.comb.transpose(1, 2).contiguous())


def halves_swapped(kv: Tensor, gate: Tensor, ratio: int, *, overlap: bool) -> tuple[Tensor, Tensor]:
    if overlap:
        kv, gate = kv.roll(kv.shape[1] // 2, 1), gate.roll(gate.shape[1] // 2, 1)
    return windows(kv, gate, ratio, overlap=overlap)


def paired_in_halves(x: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> Tensor:
    pairs = cos.shape[-1]
    order = torch.arange(2 * pairs).view(2, pairs).T.flatten()
    shuffled = torch.cat((x[..., : -2 * pairs], x[..., -2 * pairs :][..., order]), dim=-1)
    turned = REFS.rope(shuffled, cos, sin, **kwargs)
    return torch.cat((x[..., : -2 * pairs], turned[..., -2 * pairs :][..., order.argsort()]), dim=-1)


FAULTS = {
    "comb-transposed": {"hc_mix": transposed_comb},
    "one-sinkhorn-pass-less": {
        "hc_mix": lambda *args, **kw: REFS.hc_mix(*args, **(kw | {"iterations": kw["iterations"] - 1}))
    },
    "epsilons-swapped": {
        "hc_mix": lambda *args, **kw: REFS.hc_mix(
            *args, **(kw | {"norm_eps": kw["hc_eps"], "hc_eps": kw["norm_eps"]})
        )
    },
    "no-inverse-rope": {"rope": lambda *args, inverse=False, **kw: REFS.rope(*args, **kw)},
    "rope-in-halves": {"rope": paired_in_halves},
    "no-sink": {
        "sparse_attn": lambda q, pool, idx, sinks, **kw: REFS.sparse_attn(
            q, pool, idx, sinks.new_full(sinks.shape, -1e4), **kw
        )
    },
    "window-short-by-one": {
        "sparse_attn": lambda q, pool, idx, sinks, **kw: REFS.sparse_attn(q, pool, idx[:, 1:], sinks, **kw)
    },
    "series-swapped": {"compress_windows": halves_swapped},
    "no-clamp": {"grouped_ffn": lambda *args, limit, **kw: REFS.grouped_ffn(*args, limit=1e9, **kw)},
    "no-clamp-in-shared": {"dense_ffn": lambda *args, limit, **kw: REFS.dense_ffn(*args, limit=1e9, **kw)},
    "scaling-dropped": {
        "expert_weights": lambda *args, scaling: REFS.expert_weights(*args, scaling=1.0),
    },
    "no-relu": {
        "index_logits": lambda q, k, w, **kw: torch.einsum("thd,cd,th->tc", q, k, w),
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(fault):
    ours, oracle = models("two-epsilons", 0)
    faulty = replace_ops(ours, FAULTS[fault])
    with pytest.raises(AssertionError, match="relative L2"):
        check(both(faulty, oracle, tokens(ours.config, 60)))


def replace_ops(model: Transformer, ops: Mapping[str, Any]) -> Transformer:
    return Transformer(model.config, model.weights, model.numerics, ops=replace(REFS, **ops))
