"""Batched prefill: prompts of unequal length in as few passes of the model as a number of rows allows."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4.model.cache import SequenceCache
from dsv4.model.transformer import Probe, Transformer, unchanged

CHUNK = 512  # rows a pass; what a pass holds at a time grows with them, its logits of every row most of all

Cut = list[tuple[int, slice]]


def prefill(
    model: Transformer, caches: Sequence[SequenceCache], prompts: Sequence[Tensor], chunk: int = CHUNK
) -> Tensor:
    """Append every prompt to its cache, and return what follows each.

    Parameters
    ----------
    model, caches, prompts, chunk : see :func:`read`.

    Returns
    -------
    (B, V) FP32
        Logits of each prompt's last row.

    Raises
    ------
    ValueError
        See :func:`read`.
    """
    last: dict[int, Tensor] = {}
    for cut, logits in read(model, caches, prompts, chunk):
        row = 0
        for sequence, rows in cut:
            row += rows.stop - rows.start
            last[sequence] = logits[row - 1].clone()  # a view would keep every row's logits
    return torch.stack([last[sequence] for sequence in range(len(prompts))])


def read(
    model: Transformer,
    caches: Sequence[SequenceCache],
    prompts: Sequence[Tensor],
    chunk: int = CHUNK,
    probe: Probe = unchanged,
) -> Iterator[tuple[Cut, Tensor]]:
    """Append every prompt to its cache, pass by pass.

    Rows of several sequences share a pass, one after the other and never padded. A sequence's cache and logits
    do not depend on what it shares its passes with, nor on where it is cut: bitwise so on refs, under every plan
    that does not tie a row to its launch.

    Parameters
    ----------
    model : Transformer
    caches : one a sequence, empty or with the tokens before the prompt.
    prompts : token ids (T_i,) int64, one or more each.
    chunk : int
        Most rows of a pass, of all sequences together. A longer prompt takes several.
    probe : see :meth:`dsv4.model.transformer.Transformer.forward`; its rows are in the order of ``cut``.

    Yields
    ------
    cut : the (sequence, rows of its prompt) pairs of a pass
    logits : FP32 (rows, V), in the order of ``cut``

    Raises
    ------
    ValueError
        No sequences, one without a token, or ``chunk`` under 1; a sequence too long for the model, or a token id out
        of range. All of it is seen before the first pass.
    """
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prefill of {[len(prompt) for prompt in prompts]} tokens: expected 1 or more each")
    model.check(caches, prompts)
    for cut in passes([len(prompt) for prompt in prompts], chunk):
        taken = [caches[sequence] for sequence, _ in cut]
        yield cut, model.forward(taken, [prompts[sequence][rows] for sequence, rows in cut], probe)


def passes(lengths: Sequence[int], chunk: int) -> Iterator[Cut]:
    """Cut sequences into passes of ``chunk`` rows, the last pass shorter: (sequence, its rows) pairs a pass.

    In order, so that a sequence is begun once those before it are done: few are in a pass, and each is cut as
    seldom as it can be.

    Raises
    ------
    ValueError
        ``chunk`` under 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected the rows of a pass, 1 or more")
    cut: Cut = []
    room = chunk
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            rows = min(room, length - start)
            cut.append((sequence, slice(start, start + rows)))
            start, room = start + rows, room - rows
            if not room:
                yield cut
                cut, room = [], chunk
    if cut:
        yield cut
