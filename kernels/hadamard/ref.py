"""Hadamard rotation of the indexer's queries and keys before FP4."""

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """``x @ H * D^-0.5`` with Sylvester's H: orthogonal and its own inverse.

    Parameters
    ----------
    x : (..., D) floating, D a power of two

    Returns
    -------
    (..., D) FP32

    Raises
    ------
    ValueError
        D is no power of two.
    """
    size = x.shape[-1]
    if size & (size - 1) or size == 0:
        raise ValueError(f"hadamard: last axis is {size}, must be a power of two; got shape {tuple(x.shape)}")
    y = x.double().reshape(-1, size)
    step = 1
    while step < size:
        y = y.view(-1, size // (2 * step), 2, step)
        y = torch.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), dim=2)
        step *= 2
    return (y.reshape(x.shape) * size**-0.5).float()
