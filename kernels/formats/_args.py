"""What every format asks of its arguments, and the arithmetic whose bits must not depend on the device."""

import torch
from torch import Tensor


def to_float32(x: Tensor) -> Tensor:
    """Convert to contiguous float32: exact from narrower types, one rounding (nearest even) from float64.

    Raises
    ------
    TypeError
        ``x`` is not of a floating dtype.
    """
    if not x.is_floating_point():
        raise TypeError(f"expected a floating tensor, got {x.dtype} of shape {tuple(x.shape)}")
    return x.to(torch.float32).contiguous()


def check_uint8(codes: Tensor) -> Tensor:
    """Return ``codes`` contiguous.

    Raises
    ------
    TypeError
        ``codes`` is not uint8.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"expected uint8 codes, got {codes.dtype} of shape {tuple(codes.shape)}")
    return codes.contiguous()


def split_groups(x: Tensor, group: int) -> Tensor:
    """View (..., D) as (..., D / group, group).

    Raises
    ------
    ValueError
        ``x`` has no axis, ``group`` is not positive or does not divide D.
    """
    if x.ndim == 0 or group < 1 or x.shape[-1] % group:
        raise ValueError(f"group {group} does not divide the last axis of shape {tuple(x.shape)}")
    return x.unflatten(-1, (x.shape[-1] // group, group))


def check_scales(codes: Tensor, scale: Tensor, group: int) -> None:
    """Refuse scales that are not one per group of ``codes``.

    Raises
    ------
    ValueError
        ``scale`` is not of shape (..., D / group) for ``codes`` of shape (..., D).
    """
    want = (*codes.shape[:-1], codes.shape[-1] // group)
    if tuple(scale.shape) != want:
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} do not match codes of shape {tuple(codes.shape)}"
            f" with group {group}: expected {want}"
        )


def abs_max(x: Tensor) -> Tensor:
    """Largest magnitude over the last axis, NaN where any value there is NaN or infinite."""
    amax = x.abs().amax(-1)
    return amax.masked_fill(~amax.isfinite(), float("nan"))


def divide(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor`` rounded once, on every device.

    CUDA turns a division by a Python number into a product with its reciprocal
    (pytorch, aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which is one ulp off for some ``x``.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)
