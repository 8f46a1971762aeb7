"""What a kernel accepts, checked before a launch: tensors by :func:`check`, other options by :func:`check_option`."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)  # what values are stored as
Wanted = tuple[Tensor | None, str, torch.dtype | Sequence[torch.dtype]]


def check(
    op: str,
    /,
    *,
    dense: Sequence[str] = (),
    aligned: Mapping[str, int] | None = None,
    device: torch.device | None = None,
    **tensors: Wanted,
) -> dict[str, int]:
    """Bind dimension letters over all tensors of a call, or refuse the tensor that does not fit.

    Parameters
    ----------
    op : str
        Name in the message.
    dense : names of tensors whose every axis must be contiguous; others need a contiguous last axis only.
    aligned : name -> bytes that the tensor's start, and the distance of its rows along the first axis, are a
        multiple of.
    device : of the call's tensors that an earlier check has seen; None: this check sees all of them.
    tensors : name -> (tensor or None, axes such as ``"T D"`` or ``"T 64"``, dtype or dtypes)
        A None tensor is absent. A letter has one size in the whole call; ``D/16``, ``2*F`` and ``Z-64``
        are read as arithmetic on a letter that another tensor has bound.

    Returns
    -------
    dict of str to int
        Size of every letter.

    Raises
    ------
    TypeError
        A dtype that is not allowed.
    ValueError
        A shape, stride, address or device that is not; the message has the tensor's name, shape, dtype and strides.
    """
    present = {
        name: (tensor, axes, kinds) for name, (tensor, axes, kinds) in tensors.items() if tensor is not None
    }
    sizes: dict[str, int] = {}
    for tensor, axes, _ in present.values():
        for axis, size in zip(axes.split(), tensor.shape, strict=False):
            if axis.isidentifier():
                sizes.setdefault(axis, size)
    places = {name: tensor.device for name, (tensor, _, _) in present.items()}
    if len({*places.values(), *([device] if device else [])}) > 1:
        said = [f"{name} on {place}" for name, place in places.items()]
        said += [f"others on {device}"] if device else []
        raise ValueError(f"{op}: tensors on different devices: {', '.join(said)}")
    for name, (tensor, axes, kinds) in present.items():
        found = f"{op}: {name} is {_describe(tensor)}"
        allowed = (kinds,) if isinstance(kinds, torch.dtype) else tuple(kinds)
        if tensor.dtype not in allowed:
            raise TypeError(f"{found}; expected {' or '.join(map(str, allowed))}")
        want = tuple(_size(axis, sizes) for axis in axes.split())
        if tuple(tensor.shape) != want:
            raise ValueError(f"{found}; expected [{axes}] = {want}")
        strict = tensor.is_contiguous() if name in dense else tensor.ndim == 0 or _last_is_dense(tensor)
        if not strict:
            raise ValueError(
                f"{found}; expected {'all axes' if name in dense else 'the last axis'} contiguous"
            )
        if (unit := (aligned or {}).get(name)) and not _is_aligned(tensor, unit):
            raise ValueError(
                f"{found} at address {tensor.data_ptr():#x}; expected it to start, and its rows to follow each"
                f" other, at multiples of {unit} bytes"
            )
    return sizes


def check_option(op: str, allowed: Collection[object], /, **options: object) -> None:
    """Refuse an option whose value is none of those allowed: a dtype, or a word.

    Raises
    ------
    TypeError
        A dtype that is not allowed.
    ValueError
        Another value that is not.
    """
    for name, value in options.items():
        if value not in allowed:
            kind = TypeError if isinstance(value, torch.dtype) else ValueError
            raise kind(f"{op}: {name} = {value!r}; expected {' or '.join(map(str, allowed))}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def _last_is_dense(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def _is_aligned(tensor: Tensor, unit: int) -> bool:
    apart = tensor.stride(0) * tensor.element_size() if len(tensor) > 1 else 0
    return tensor.data_ptr() % unit == 0 and apart % unit == 0


def _size(axis: str, sizes: dict[str, int]) -> int:
    """``128``, ``D``, ``D/16`` (exact), ``2*F`` or ``Z-64``; no axis has the size -1."""
    if axis.isdigit():
        return int(axis)
    if "/" in axis:
        letter, divisor = axis.split("/")
        return sizes[letter] // int(divisor) if sizes.get(letter, -1) % int(divisor) == 0 else -1
    if "-" in axis:
        letter, less = axis.split("-")
        return max(sizes.get(letter, -1) - int(less), -1)
    if "*" in axis:
        factor, letter = axis.split("*")
        return int(factor) * sizes.get(letter, -1)
    return sizes.get(axis, -1)  # a tensor of too few axes bound no such letter
