"""A compounded run of several prompts: prefill one by one, then decode all of them as one batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.model.cache import SequenceCache
from dsv4.model.memory import Closed
from dsv4.model.transformer import Layer, Probe, Transformer, greedy
from dsv4.taps import BY_NAME

Seen = Callable[[Tensor], Probe]
CLOSED_BY = {"comp": "comp_closed", "comp_store": "comp_closed", "comp_bytes": "comp_closed"}


def run_free(
    model: Transformer,
    prompts: Sequence[Tensor],
    steps: int,
    seen: Sequence[Seen],
    forced: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[SequenceCache]]:
    """Run every prompt, then ``steps`` tokens more: the model's own greedy choice, or ``forced``.

    A sequence's values do not depend on the batch it decodes in, so that one batch serves all.

    Parameters
    ----------
    model : Transformer
    prompts : token ids (T_i,) int64
    steps : int
        Decode steps.
    seen : per prompt, positions of the rows at hand -> probe for them.
    forced : per prompt, the (steps,) tokens to feed.

    Returns
    -------
    tokens : (T_i + steps,) int64 a prompt
    caches : one a prompt
    """
    caches = [model.new_cache() for _ in prompts]
    last = [
        model.forward([cache], [tokens], probe(torch.arange(len(tokens))))[-1:]
        for cache, tokens, probe in zip(caches, prompts, seen, strict=True)
    ]
    fed: list[list[Tensor]] = [[] for _ in prompts]
    logits = torch.cat(last)
    for step in range(steps):
        tokens = list(greedy(logits).split(1)) if forced is None else [one[step : step + 1] for one in forced]
        for sequence, token in zip(fed, tokens, strict=True):
            sequence.append(token)
        positions = [torch.tensor([len(prompt) + step]) for prompt in prompts]
        probes = [probe(position) for probe, position in zip(seen, positions, strict=True)]
        logits = model.forward(caches, tokens, _fan(probes))
    return [torch.cat([prompt, *more]) for prompt, more in zip(prompts, fed, strict=True)], caches


def _fan(probes: Sequence[Probe]) -> Probe:
    """Probe of a batch with one row a sequence: each sequence's probe sees its own row and entries."""
    closed: dict[tuple[Layer, str], tuple[Closed, ...]] = {}

    def probe(layer: Layer, name: str, value: Any) -> Any:
        if name.endswith("_closed"):
            closed[layer, name] = value
            return tuple(one(layer, name, (run,))[0] for one, run in zip(probes, value, strict=True))
        if BY_NAME[name].axis == "entry":
            counts = [run.count for run in closed[layer, CLOSED_BY.get(name, "index_closed")]]
            parts = list(value.split(counts))
        else:
            parts = [value[row : row + 1] for row in range(len(probes))]
        return _joined(
            [one(layer, name, part) for one, part in zip(probes, parts, strict=True)], parts, value
        )

    return probe


def _joined(seen: list[Any], parts: list[Any], value: Any) -> Any:
    """``value`` itself when no probe changed its part, else the changed parts as one tensor."""
    if all(one is part for one, part in zip(seen, parts, strict=True)):
        return value
    return torch.cat(seen) if isinstance(value, Tensor) else type(value).cat(seen)
