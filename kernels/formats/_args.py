"""What every format asks of its arguments, and the arithmetic whose bits must not depend on the device."""

import math

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


def scale_groups(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """Multiply each run of ``group`` values by its scale.

    Parameters
    ----------
    values : (..., D) float32
        Decoded codes.
    scale : (..., D / group) floating
    group : int

    Returns
    -------
    (..., D) float32

    Raises
    ------
    ValueError
        ``group`` does not divide D, or the scales are not one per group.
    """
    groups = split_groups(values, group)
    if scale.shape != groups.shape[:-1]:
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} do not match codes of shape {tuple(values.shape)}"
            f" with group {group}: expected {tuple(groups.shape[:-1])}"
        )
    return (groups * to_float32(scale)[..., None]).flatten(-2)


def may_hold_nan(x: Tensor) -> bool:
    """False only if no value is NaN.

    One sum tells on a CPU; a device is not asked, for a captured step may not wait.
    """
    return not x.is_cpu or not math.isfinite(x.sum().item())


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
