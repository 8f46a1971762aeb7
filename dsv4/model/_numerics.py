"""Test support: a small model whose KV groups differ in size, and all that it writes under any numerics."""

from functools import cache
from typing import Any

import torch

from dsv4.model import numerics
from dsv4.model.checkpoint import Tensors, build
from dsv4.model.numerics import Numerics
from dsv4.model.random_model import random_tensors, small_config
from dsv4.model.transformer import Transformer
from dsv4.model.weights import ModelWeights
from dsv4.plan import Plan, change

CONFIG = small_config(head_dim=256)  # three scales a record: with one, an aligned record is the same numbers


def unequal_weights() -> ModelWeights:
    """Random weights whose KV groups of 64 differ in size, so that one scale for all of them costs something."""
    stored = random_tensors(CONFIG, 0)
    for name, weight in stored.items():
        if name.endswith(("self_attn.kv_norm.weight", "compressor.kv_norm.weight")):
            weight[:64] *= 64
    return build(CONFIG, Tensors(stored, CONFIG))


WEIGHTS = unequal_weights()
TOKENS = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0))
LAYERS = range(CONFIG.num_hidden_layers)


def model(num: Numerics) -> Transformer:
    return Transformer(CONFIG, WEIGHTS, num, page_size=8)


def plan(**changes: str) -> Numerics:
    return numerics.of_plan(
        change(Plan(), {name.replace("__", "."): to for name, to in changes.items()}), CONFIG
    )


@cache
def written(num: Numerics) -> dict[tuple[int | str, str], Any]:
    """Everything that a free run writes."""
    found: dict[tuple[int | str, str], Any] = {}

    def probe(layer: int | str, name: str, value: Any) -> Any:
        found[layer, name] = value
        return value

    transformer = model(num)
    transformer.forward([transformer.new_cache()], [TOKENS], probe)
    return found
