"""What a kernel accepts: shapes, dtypes and strides are checked before a launch; see :func:`check`."""

from collections.abc import Sequence

import torch
from torch import Tensor

Wanted = tuple[Tensor | None, str, torch.dtype | Sequence[torch.dtype]]


def check(op: str, /, *, dense: Sequence[str] = (), **tensors: Wanted) -> dict[str, int]:
    """Bind dimension letters over all tensors of a call, or refuse the tensor that does not fit.

    Parameters
    ----------
    op : str
        Name in the message.
    dense : names of tensors whose every axis must be contiguous; others need a contiguous last axis only.
    tensors : name -> (tensor or None, axes such as ``"T D"`` or ``"T 64"``, dtype or dtypes)
        A None tensor is absent. A letter has one size in the whole call; ``D/16`` and ``2*F`` are read as
        arithmetic on a letter that another tensor has bound.

    Returns
    -------
    dict of str to int
        Size of every letter.

    Raises
    ------
    TypeError
        A dtype that is not allowed.
    ValueError
        A shape, stride or device that is not; the message has the tensor's name, shape, dtype and strides.
    """
    present = {name: wanted for name, wanted in tensors.items() if wanted[0] is not None}
    sizes: dict[str, int] = {}
    for _, (tensor, axes, _) in present.items():
        for axis, size in zip(axes.split(), tensor.shape, strict=False):  # type: ignore[union-attr]
            if axis.isidentifier():
                sizes.setdefault(axis, size)
    devices = {tensor.device for tensor, _, _ in present.values() if tensor is not None}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {wanted[0].device}" for name, wanted in present.items())  # type: ignore[union-attr]
        raise ValueError(f"{op}: tensors on different devices: {places}")
    for name, (tensor, axes, dtypes) in present.items():
        assert tensor is not None
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        found = f"{op}: {name} is {_describe(tensor)}"
        if tensor.dtype not in allowed:
            raise TypeError(f"{found}; expected {' or '.join(str(dtype) for dtype in allowed)}")
        want = tuple(_size(axis, sizes) for axis in axes.split())
        if tuple(tensor.shape) != want:
            raise ValueError(f"{found}; expected [{axes}] = {want}")
        strict = tensor.is_contiguous() if name in dense else tensor.ndim == 0 or _last_is_dense(tensor)
        if not strict:
            raise ValueError(
                f"{found}; expected {'all axes' if name in dense else 'the last axis'} contiguous"
            )
    return sizes


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def _last_is_dense(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def _size(axis: str, sizes: dict[str, int]) -> int:
    """``128``, ``D``, ``D/16`` (exact) or ``2*F``."""
    if axis.isdigit():
        return int(axis)
    if "/" in axis:
        letter, divisor = axis.split("/")
        return sizes[letter] // int(divisor) if sizes.get(letter, -1) % int(divisor) == 0 else -1
    if "*" in axis:
        factor, letter = axis.split("*")
        return int(factor) * sizes.get(letter, -1)
    return sizes.get(axis, -1)  # a tensor of too few axes bound no such letter
