"""Gather of KV rows: see :func:`gather_dequantise`."""

import torch
from torch import Tensor

from kernels.rounding import Round, exact


def gather_dequantise(pool: Tensor, idx: Tensor, *, store: Round = exact) -> Tensor:
    """Copy the pool rows that each row's list names.

    Parameters
    ----------
    pool : (N, K) FP32
        Rows as read from storage.
    idx : (T, S) int64
        Rows of the pool, -1: no key.
    store : Round
        The buffer's format.

    Returns
    -------
    (T, S, K) FP32
        Zeros where idx is -1.

    Raises
    ------
    ValueError
        An index is under -1 or past the pool.
    """
    low, high = (int(idx.min()), int(idx.max())) if idx.numel() else (-1, -1)
    if low < -1 or high >= len(pool):
        raise ValueError(f"gather_dequantise: idx spans {low} to {high}, the pool has {len(pool)} rows")
    if not len(pool):
        return pool.new_zeros(*idx.shape, pool.shape[1])
    return torch.where((idx >= 0)[..., None], store(pool)[idx.clamp_min(0)], 0.0)
