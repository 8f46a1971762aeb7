"""Test support: a small random model of every layer kind under the reference and under plans, and texts along it."""

from functools import cache

import torch
from torch import Tensor

from dsv4.attribute.rank import ForcedText
from dsv4.attribute.swap import with_wide_scores
from dsv4.model import numerics
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.model.weights import ModelWeights
from dsv4.plan import Plan, unflatten

PLANS = {
    "lowest": Plan(),
    "narrow": unflatten(
        {
            **{field: "fused" for field in ("norm_quant", "mhc_quant", "q_a_norm", "kv_norm")},
            **{f"casts.{site}": "native" for site in ("router", "swiglu", "attn_out", "head")},
            **{field: "fp8" for field in ("q_format", "rope_format", "pv_format", "index_score")},
            **{"kv_read": "in_place", "kv_record": "aligned"},
        }
    ),
    "other": unflatten({"kv_format": "nvfp4", "q_format": "fp8x2", "index_score": "fp4"}),
}
CONFIG = small_config()


@cache
def weights() -> ModelWeights:
    """Weights, read once."""
    return random_weights(CONFIG, 0)


def trained() -> Transformer:
    """Return the reference; its scores take nothing for narrow, so that it can be a variant too."""
    return Transformer(CONFIG, weights(), with_wide_scores(numerics.trained(CONFIG)), page_size=8)


def of_plan(name: str, *, wide: bool = True) -> Transformer:
    """Return the model under a plan."""
    num = numerics.of_plan(PLANS[name], CONFIG)
    return Transformer(CONFIG, weights(), with_wide_scores(num) if wide else num, page_size=8)


def tokens(length: int, seed: int = 1) -> Tensor:
    """Random token ids."""
    return torch.randint(CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def logits(model: Transformer, *cuts: int, seed: int = 1) -> Tensor:
    """Logits of a sequence that is read in calls of so many rows."""
    cache, parts = model.new_cache(), tokens(sum(cuts), seed).split(list(cuts))
    return torch.cat([model.forward([cache], [part]) for part in parts])


@cache
def text(length: int, positions: int) -> ForcedText:
    """A random text, with what the reference says at its last positions."""
    return ForcedText(tokens=tokens(length), truth=logits(trained(), length)[-positions:].numpy())
