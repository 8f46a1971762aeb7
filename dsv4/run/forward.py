"""A compounded run: prefill of a prompt, then teacher-forced decode steps, seen by a probe."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.model.cache import SequenceCache
from dsv4.model.transformer import Probe, Transformer, greedy

Seen = Callable[[Tensor], Probe]


def run_compounded(model: Transformer, tokens: Tensor, prompt: int, seen: Seen) -> SequenceCache:
    """Run ``tokens`` freely: the first ``prompt`` of them at once, the rest one by one.

    Parameters
    ----------
    model : Transformer
    tokens : (T,) int64
    prompt : int
    seen : callable
        Positions of the rows at hand -> probe for them.

    Returns
    -------
    SequenceCache
    """
    cache = model.new_cache()
    model.forward([cache], [tokens[:prompt]], seen(torch.arange(prompt)))
    for position in range(prompt, len(tokens)):
        model.forward([cache], [tokens[position : position + 1]], seen(torch.tensor([position])))
    return cache


def run_greedy(model: Transformer, prompt: Tensor, steps: int, seen: Seen) -> Tensor:
    """Run a prompt and continue it greedily by ``steps`` tokens, each fed back.

    Returns
    -------
    (prompt + steps,) int64
    """
    cache = model.new_cache()
    logits = model.forward([cache], [prompt], seen(torch.arange(len(prompt))))
    tokens = [prompt]
    for step in range(steps):
        token = greedy(logits[-1:])
        tokens.append(token)
        logits = model.forward([cache], [token], seen(torch.tensor([len(prompt) + step])))
    return torch.cat(tokens)
