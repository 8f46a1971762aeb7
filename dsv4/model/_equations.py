"""Test support: a run of ``plain`` on 40 tokens, and comparison with arrays in FP64."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.model import numerics
from dsv4.model._trace import trace
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_weights
from dsv4.model.transformer import Transformer

TOKENS = torch.arange(40) * 7 % 64


def run(config: Any, weights: Any = None, **ops: Any) -> dict[Any, Tensor]:
    """Taps of ``plain`` on 40 tokens."""
    model = Transformer(
        config, weights or random_weights(config, 0), numerics.plain(config), ops=replace(REFS, **ops)
    )
    return trace(model, [TOKENS])[0].taps


def array(x: Tensor) -> np.ndarray:
    return x.double().numpy()


def close(got: Tensor, wanted: Any, tol: float = 3e-7) -> None:
    np.testing.assert_allclose(array(got), np.asarray(wanted, dtype=np.float64), rtol=tol, atol=tol)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
