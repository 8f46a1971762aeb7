"""Where rows of a cache lie: page of the row's run of ``page_size``, times ``page_size``, plus its place there."""

import torch
from torch import Tensor


def row_slots(rows: Tensor, tables: Tensor, sequence: Tensor, page_size: int) -> Tensor:
    """Slots of one row of each of several sequences.

    Parameters
    ----------
    rows : (T,) integer
        Row of the sequence; negative: none.
    tables : (B, M) integer
        Page of each run of rows.
    sequence : (T,) integer
        Which table.
    page_size : int

    Returns
    -------
    (T,) int64
        -1 where there is no row.
    """
    held = rows.long().clamp_min(0)
    page = tables.long()[sequence.long(), held // page_size]
    return torch.where(rows >= 0, page * page_size + held % page_size, -1)


def key_slots(
    positions: Tensor,
    sequence: Tensor,
    windows: Tensor,
    entries: Tensor | None = None,
    chosen: Tensor | None = None,
    *,
    window: int,
    page_size: int,
    ratio: int = 0,
    count: int = 0,
) -> Tensor:
    """Slots of the keys of tokens: of their last ``window`` rows, then of compressed entries.

    Parameters
    ----------
    positions : (T,) int64
    sequence : (T,) integer
        Which row of the tables.
    windows, entries : (B, M), (B, L) integer
        Page tables of rows and of entries.
    chosen : (T, k) integer, or None
        Entries of each token, -1: none. Else the first ``count``, as far as their ``ratio`` tokens have been seen.
    window, page_size, ratio, count : int

    Returns
    -------
    (T, window + k or count) int32
        -1 where there is no key.
    """
    rows = positions[:, None] - window + 1 + torch.arange(window, device=positions.device)
    parts = [(rows, windows)]
    if entries is not None:
        if chosen is None:
            every = torch.arange(count, device=positions.device)
            chosen = torch.where(every < ((positions + 1) // ratio)[:, None], every, -1)
        parts.append((chosen, entries))
    slots = [
        row_slots(some.flatten(), table, sequence.repeat_interleave(some.shape[1]), page_size).view(
            some.shape
        )
        for some, table in parts
    ]
    return torch.cat(slots, dim=-1).int()
