"""Causal top-k over compressed entries: see :func:`index_topk`."""

import torch
from torch import Tensor


def index_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Entries that each row attends to: the k best visible ones, ties to the smaller index.

    Parameters
    ----------
    scores : (T, C) FP32
    visible : (T,) int64
        Row t may see entries ``s < visible[t]``, that is ``(position + 1) // ratio``.
    k : int
        ``index_topk``.

    Returns
    -------
    (T, k) int64
        Indices in ascending order, then -1 where fewer than k are visible.
    """
    rows, count = scores.shape
    entries = torch.arange(count, device=scores.device)
    hidden = entries >= visible[:, None]
    ranked = torch.argsort(scores.masked_fill(hidden, -torch.inf), dim=-1, descending=True, stable=True)[
        :, :k
    ]
    ranked = ranked.masked_fill(hidden.gather(1, ranked), count)
    chosen = torch.full((rows, k), count, dtype=torch.int64, device=scores.device)
    chosen[:, : ranked.shape[1]] = ranked.sort(dim=-1).values
    return chosen.masked_fill(chosen == count, -1)
