"""Matrix product in FP64, reproducible by construction; see :func:`matmul`."""

import torch
from torch import Tensor

SLICE_BITS = 19  # 2 * 19 + log2(32768) = 53: a sum of K <= 32768 slice products is exact in FP64
MAX_K = 1 << (53 - 2 * SLICE_BITS)


def matmul(a: Tensor, b: Tensor, *, narrow: bool = False) -> Tensor:
    """``a @ b`` in FP64, the same bits for a row whatever else is in the batch.

    FP64 sums depend on their order, and BLAS picks the order by shape and thread count. So
    each row of ``a`` and each column of ``b`` is cut into two slices of 19 bits below its own
    largest value (the splitting of Ozaki et al. 2012); products of slices are integers in a
    common unit and their sums are exact in any order. What is dropped is under 2^-37 of
    (row maximum x column maximum x K).

    Parameters
    ----------
    a : (..., M, K) FP32 or FP64
    b : (..., K, N) FP32 or FP64, batch axes as ``torch.matmul``
    narrow : bool
        Both operands hold values of at most 9 significant bits (BF16, FP8, FP4 with their
        block scales). One plain FP64 product is then exact unless its terms span over
        2^30, and it costs a third.

    Returns
    -------
    (..., M, N) FP64. Non-finite inputs give NaN or Inf in the rows and columns that hold them.

    Raises
    ------
    ValueError
        K is over 32768.
    """
    if a.shape[-1] > MAX_K:
        raise ValueError(f"matmul: K = {a.shape[-1]} is over {MAX_K}, where slice sums stop being exact")
    a, b = a.double(), b.double()
    if narrow:
        return a @ b
    a_high, a_low = _slices(a, dim=-1)
    b_high, b_low = _slices(b, dim=-2)
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def _slices(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Two slices of ``SLICE_BITS`` bits below the largest magnitude along ``dim``; they sum to ``x``, nearly."""
    if x.shape[dim] == 0:
        return x, x
    _, exponent = torch.frexp(x.abs().amax(dim, keepdim=True))
    # Adding 1.5 * 2^52 units leaves a multiple of the unit: round to nearest by FP64's own rounding.
    unit = torch.ldexp(torch.ones_like(x[..., :1] if dim == -1 else x[..., :1, :]), exponent - SLICE_BITS)
    high = _to_multiple(x, unit)
    low = _to_multiple(x - high, unit * 2.0**-SLICE_BITS)
    return high, low


def _to_multiple(x: Tensor, unit: Tensor) -> Tensor:
    shift = unit * (1.5 * 2.0**52)
    return (x + shift) - shift
