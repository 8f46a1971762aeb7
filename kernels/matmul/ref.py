"""Matrix product in FP64, reproducible by construction; see :func:`matmul`."""

from typing import NamedTuple

import torch
from torch import Tensor

SLICE_BITS = 19  # 2 * 19 + log2(32768) = 53: a sum of K <= 32768 slice products is exact in FP64
MANTISSA, EXPONENT = 52, 0x7FF << 52  # of FP64: bits of the one, mask of the other
MAX_K = 1 << (53 - 2 * SLICE_BITS)


def matmul(a: Tensor, b: Tensor, *, narrow: bool = False) -> Tensor:
    """``a @ b`` in FP64, the same bits for a row whatever else is in the batch.

    FP64 sums depend on their order, and BLAS picks the order by shape and thread count. So
    each row of ``a`` and each column of ``b`` is cut into two slices of 19 bits below its own
    largest value (the splitting of Ozaki et al. 2012); products of slices are integers in a
    common unit and their sums are exact in any order. What is dropped is under 2^-36 of
    (row maximum x column maximum x K).

    Parameters
    ----------
    a : (..., M, K) FP32, or FP64 within FP32's range
    b : (..., K, N) FP32, or FP64 within FP32's range; batch axes as ``torch.matmul``
    narrow : bool
        Both operands hold values of at most 9 significant bits (BF16, FP8, FP4 with their
        block scales). One plain FP64 product then costs a third. It is exact, hence the same in
        any order, while K x largest / smallest non-zero product of an element is under 2^35;
        beyond, its last FP64 bits may depend on the order.

    Returns
    -------
    (..., M, N) FP64. Non-finite inputs give NaN or Inf in the rows and columns that hold them,
    and nowhere else.

    Raises
    ------
    ValueError
        K is over 32768.
    """
    if a.shape[-1] > MAX_K:
        raise ValueError(f"matmul: K = {a.shape[-1]} is over {MAX_K}, where slice sums stop being exact")
    if narrow:
        return a.double() @ b.double()
    left, right = slices(a, dim=-1), slices(b, dim=-2)
    return product(left, right) * left.unit * right.unit


def exact_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over an axis in FP64, the same bits in any order.

    Each value is cut 38 bits below the largest magnitude of its sum, so that the sum of the
    integers that remain is exact. What is dropped is under 2^-38 of (largest magnitude x length).

    Parameters
    ----------
    x : (...) FP32, or FP64 within FP32's range
    dim : int
        The axis that is summed, of length L.

    Returns
    -------
    (...) FP64 without ``dim``; NaN or Inf where a term is.

    Raises
    ------
    ValueError
        L is over 32768.
    """
    if x.shape[dim] > MAX_K:
        raise ValueError(f"exact_sum: length {x.shape[dim]} is over {MAX_K}, where sums stop being exact")
    x = x.double()
    if x.shape[dim] == 0:
        return x.sum(dim)
    return _to_multiple(x, _unit(x, dim, 2 * SLICE_BITS)).sum(dim)


class Slices(NamedTuple):
    """A tensor as ``(high + 2^-19 low) * unit``: integers up to 2^19 and powers of two, FP64.

    ``unit`` has length 1 along the axis that a product sums over.
    """

    high: Tensor
    low: Tensor
    unit: Tensor


def slices(x: Tensor, dim: int) -> Slices:
    """Cut ``x`` into two slices of 19 bits below its largest magnitude along ``dim``.

    Parameters
    ----------
    x : (..., M, K) FP32, or FP64 within FP32's range
    dim : int
        The axis that a product will sum over: -1 of a left operand, -2 of a right one.

    Returns
    -------
    Slices of (..., M, K) integers, unit (..., M, 1) or (..., 1, K), FP64

    Raises
    ------
    ValueError
        The axis is longer than 32768.
    """
    if x.shape[dim] > MAX_K:
        raise ValueError(f"slices: length {x.shape[dim]} is over {MAX_K}, where slice sums stop being exact")
    if x.shape[dim] == 0:
        x = x.double()
        return Slices(x, x, torch.ones_like(x.sum(dim, keepdim=True)))
    unit = _unit(x, dim, SLICE_BITS)
    scaled = x * unit.reciprocal()  # a power of two, so as exact as the quotient
    high = _to_multiple(scaled, 1.0)
    return Slices(high, _to_multiple(scaled.sub_(high).mul_(2.0**SLICE_BITS), 1.0), unit)


def product(a: Slices, b: Slices) -> Tensor:
    """``a @ b`` of the integers alone, exact in any order; the caller applies the units.

    Parameters
    ----------
    a : Slices, (..., M, K) along -1
    b : Slices, (..., K, N) along -2
        Or along -1, if its units were folded into ``a`` before that was cut.

    Returns
    -------
    (..., M, N) FP64, never -0
    """
    crossed = (a.high @ b.low).add_(a.low @ b.high).mul_(2.0**-SLICE_BITS)
    total = (a.high @ b.high).add_(crossed)
    return total.add_(0.0)  # BLAS gives -0 or 0 by its shape; -0 + 0 is 0


def _unit(x: Tensor, dim: int, bits: int) -> Tensor:
    """The power of two ``bits`` below the first one over the largest magnitude along ``dim``; FP64's least for zeros.

    The magnitude's own exponent field, lowered: five passes of one bare operation each, unlike frexp and ldexp.
    """
    largest = (
        torch.maximum(x.amax(dim, keepdim=True), x.amin(dim, keepdim=True).neg_()).double().view(torch.int64)
    )
    return (
        largest.bitwise_and_(EXPONENT)
        .sub_((bits - 1) << MANTISSA)
        .clamp_(min=1 << MANTISSA)
        .view(torch.float64)
    )


def _to_multiple(x: Tensor, unit: Tensor | float) -> Tensor:
    """Nearest multiple of ``unit``: adding 1.5 * 2^52 units makes FP64's own rounding do it."""
    shift = unit * (1.5 * 2.0**52)
    return (x + shift).sub_(shift)
