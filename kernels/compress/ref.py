"""The compressor's pooling: see :func:`pool`. FP32 inside is the architecture's, not a choice."""

import torch
from torch import Tensor


def windows(kv: Tensor, gate: Tensor, ratio: int, *, overlap: bool) -> tuple[Tensor, Tensor]:
    """Arrange projected tokens into the slots of their entries.

    Parameters
    ----------
    kv, gate : ((W + 1) * ratio, C) if overlap else (W * ratio, C), FP32
        C = 2D with overlap (series Ca then Cb), else D. With overlap the first ``ratio`` rows
        are the window before the first entry (gate -inf where there is none).
    ratio : int
        Tokens a window.
    overlap : bool
        CSA: entry w pools window w-1's Ca and window w's Cb.

    Returns
    -------
    kv, gate : (W, slots, D) FP32, slots = 2 * ratio or ratio
    """
    if not overlap:
        return kv.unflatten(0, (-1, ratio)), gate.unflatten(0, (-1, ratio))
    size = kv.shape[-1] // 2

    def pair(x: Tensor) -> Tensor:
        by_window = x.unflatten(0, (-1, ratio))  # [W + 1, ratio, 2D]
        return torch.cat((by_window[:-1, :, :size], by_window[1:, :, size:]), dim=1)

    return pair(kv), pair(gate)


def pool(kv: Tensor, gate: Tensor) -> Tensor:
    """Per channel, ``sum_slot softmax(gate)_slot * kv_slot``.

    Parameters
    ----------
    kv, gate : (W, slots, D) FP32
        The gate already holds its position bias; -inf closes a slot.

    Returns
    -------
    (W, D) FP32
    """
    return (torch.softmax(gate.double(), dim=1) * kv.double()).sum(1).float()


def step(
    kv: Tensor,
    gate: Tensor,
    ring_kv: Tensor,
    ring_gate: Tensor,
    position_bias: Tensor,
    position: int,
    *,
    overlap: bool,
) -> Tensor:
    """One token of one sequence: put it in the ring, in place, and pool the window that it is in.

    Parameters
    ----------
    kv, gate : (C,) FP32
    ring_kv, ring_gate : (size, C) FP32
        Token t lies at t mod size: the open window, and with overlap the one before it.
    position_bias : (ratio, C) FP32
    position : int
        Of the token. Slots behind it hold what was there before.
    overlap : bool

    Returns
    -------
    (D,) FP32
    """
    ratio, size = len(position_bias), len(ring_kv)
    ring_kv[position % size], ring_gate[position % size] = kv, gate
    rows = (position // ratio * ratio - size + ratio + torch.arange(size)) % size
    biased = ring_gate[rows].unflatten(0, (-1, ratio)).double() + position_bias.double()
    return pool(*windows(ring_kv[rows], biased.flatten(0, 1), ratio, overlap=overlap))[0]
