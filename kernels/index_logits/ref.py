"""Weighted-ReLU MQA logits: see :func:`index_logits`."""

import torch
from torch import Tensor

from kernels.matmul.ref import exact_sum, matmul

ROWS = 128  # rows scored at once: bounds the [ROWS, H, C] buffer


def index_logits(
    q: Tensor, k: Tensor, weights: Tensor, *, key_scale: Tensor | None = None, narrow: bool = False
) -> Tensor:
    """``score[t, s] = key_scale[s] * sum_h w[t, h] relu(q[t, h] . k[s])``.

    Parameters
    ----------
    q : (T, H, D) FP32
        After RoPE (and Hadamard and rounding, by the plan).
    k : (C, D) FP32
        Compressed index keys as stored.
    weights : (T, H) FP32
        Already times ``D^-0.5 * H^-0.5``, and times q's scale where q is codes alone.
    key_scale : (C,) FP32 or None
        Scale of each key where ``k`` is codes alone; positive, so it passes the ReLU.
    narrow : bool
        See :func:`kernels.matmul.ref.matmul`.

    Returns
    -------
    (T, C) FP32; which entries a row may see is not applied here. No score depends on the order
    of heads, or on how many keys and rows there are (``narrow``: see there).
    """
    heads, keys = q.shape[1], k.double().T
    scale = 1.0 if key_scale is None else key_scale.double()
    parts = []
    for rows, head_weights in zip(q.split(ROWS), weights.split(ROWS), strict=True):
        dots = matmul(rows.flatten(0, 1), keys, narrow=narrow).unflatten(0, (-1, heads))  # [t, H, C]
        parts.append((exact_sum(dots.relu_() * head_weights.double()[..., None], dim=1) * scale).float())
    return torch.cat(parts) if parts else q.new_empty(0, k.shape[0])
