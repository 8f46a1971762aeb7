"""Distributions over tokens: log-probabilities and their KL divergence, row by row, in FP64. Needs numpy only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def log_softmax(logits: Array) -> Array:
    """FP64 log-probabilities along the last axis."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl_nats(p: Array, q: Array) -> Array:
    """KL(p || q) in nats of log-probabilities ``[..., V] -> [...]``; NaN where a row holds one."""
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)  # rounding may give -1e-17
