"""Norm of each head of q, RoPE, and the form in which attention reads q: the refs that the kernel fuses."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import bf16, e4m3, fp8_block
from kernels.formats.kv_record import ROPE, rope_bytes
from kernels.rmsnorm.ref import rmsnorm
from kernels.rope.ref import rope
from kernels.rounding import Round, exact


class QuantisedQ(NamedTuple):
    """``record`` (T, H, nope + 128) uint8: nope E4M3 codes of q / scale, then 64 BF16 of rope / scale.

    ``scale`` (T, H) FP32, a power of two. ``residual`` (T, H, nope) uint8, E4M3 of nope / scale - codes, or None.
    """

    record: Tensor
    scale: Tensor
    residual: Tensor | None


def norm_rope(q: Tensor, cos: Tensor, sin: Tensor, *, eps: float, out: Round = exact) -> Tensor:
    """Norm and turn, as BF16 attention reads it.

    Parameters
    ----------
    q : (T, H, K) floating
    cos, sin : (T, 32) FP32
    eps : float
    out : Round
        Store of the result.

    Returns
    -------
    (T, H, K) FP32
    """
    return rope(rmsnorm(q, None, eps=eps), cos, sin, out=out)


def quantise(q: Tensor, *, residual: bool = False) -> QuantisedQ:
    """One or two FP8 terms of each head, of its BF16 values.

    Parameters
    ----------
    q : (T, H, nope + 64) floating
        Rounded to BF16 first, as every plan stores q.
    residual : bool
        Make the second term.

    Returns
    -------
    QuantisedQ of (T, H, nope + 64)
        The scale is that of :mod:`kernels.formats.fp8_block` over the nope of a head; it divides rope too, exactly
        while rope / scale is a normal BF16.
    """
    q = bf16.round(q)
    nope = q[..., :-ROPE]
    codes, scale = fp8_block.quantise(nope, nope.shape[-1])
    rest = e4m3.encode(nope / scale - e4m3.decode(codes)) if residual else None
    record = torch.cat([codes, rope_bytes(q[..., -ROPE:] / scale)], -1)
    return QuantisedQ(record, scale.squeeze(-1), rest)


def norm_rope_quantise(
    q: Tensor, cos: Tensor, sin: Tensor, *, eps: float, residual: bool = False
) -> QuantisedQ:
    """:func:`norm_rope`, then :func:`quantise`: (T, H, K), (T, 32), (T, 32) -> QuantisedQ of (T, H, K)."""
    return quantise(norm_rope(q, cos, sin, eps=eps), residual=residual)
