"""Every tensor and option of every kernel's function: what its docstring does not allow is refused before a launch."""

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels._calls import CALLS, U8
from kernels._check import not_launched
from kernels.compress import step_kernel
from kernels.grouped_ffn import fp8_kernel as fp8_experts
from kernels.linear import fp8_kernel
from kernels.linear import wide_kernel as wide
from kernels.sparse_attn import product

# what other functions here call on arguments that these have seen, or checks itself as a part of their calls
PARTS = {
    "aligned",
    "allocate",
    "allocate_normed",
    "check_halves",
    "in_bytes",
    "in_words",
    "partial_sums",
    "path_of",
}
PARTS |= {"allocate_rows", "check_weight", "of_normed", "pointers_of", "room", "seven_scales"}
WRITTEN = {"out", "into", "ids", "weights"}  # of the caller; what they may be is all in the docstring's shape
STEPS = ("dense_ffn",)  # three functions that are here themselves: each refuses what it is given
STRIDED = ("index_logits", "paged_index_logits")  # scores whose rows may be


def tensors(value: object, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Tensors of an argument and where they are in it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple) or dataclasses.is_dataclass(value):
        names = value._fields if isinstance(value, tuple) else [f.name for f in dataclasses.fields(value)]
        for name in names:
            yield from tensors(getattr(value, name), (*path, name))


def replaced(value: object, path: tuple, new: object) -> object:
    """An argument with another value at a place."""
    if not path:
        return new
    change = {path[0]: replaced(getattr(value, path[0]), path[1:], new)}
    return value._replace(**change) if isinstance(value, tuple) else dataclasses.replace(value, **change)


def each_tensor(written: bool = False) -> list:
    found = []
    for call, (function, given) in CALLS.items():
        for name, value in given.items():
            if written and not (name in WRITTEN and has_default(function, name)):
                continue
            found += [
                pytest.param(call, name, path, id=".".join((call, name, *path))) for path, _ in tensors(value)
            ]
    return found


def has_default(function, name: str) -> bool:
    parameter = inspect.signature(function).parameters[name]
    return parameter.default is None


def refuses(call: str, name: str, path: tuple, new: Tensor, kind: type | tuple, say: str = "") -> None:
    """The call with another tensor at a place is refused as an error of ours, and nothing is launched."""
    function, given = CALLS[call]
    with not_launched() as launched, pytest.raises(kind, match=r"^\w+: ") as error:
        function(**given | {name: replaced(given[name], path, new)})
    assert not launched or call in STEPS
    assert re.search(say, str(error.value))


def at(call: str, name: str, path: tuple) -> Tensor:
    return dict(tensors(CALLS[call][1][name]))[path]


@pytest.mark.parametrize("call", CALLS)
def test_the_call_itself_is_taken(call):
    function, given = CALLS[call]
    with not_launched() as launched:
        function(**given)
    assert launched


def test_every_function_with_tensors_is_here():
    files = [*Path(__file__).parent.glob("*/kernel.py"), Path(wide.__file__)]
    more = (fp8_kernel, fp8_experts, step_kernel, product)
    files += [Path(module.__file__) for module in more]
    modules = [importlib.import_module(f"kernels.{file.parent.name}.{file.stem}") for file in files]
    found = {
        name
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and name[0] != "_"
        and any("Tensor" in str(hint) or "Nvfp4" in str(hint) for hint in function.__annotations__.values())
    }
    known = {function.__name__ for function, _ in CALLS.values()}
    assert found - PARTS - known == set()
    for function, _ in CALLS.values():
        all_given = set().union(*(given for other, given in CALLS.values() if other is function))
        hints = typing.get_type_hints(function)
        missing = {name for name, hint in hints.items() if "Tensor" in str(hint)} - all_given - {"return"}
        assert missing == set(), function.__name__


@pytest.mark.parametrize(("call", "name", "path"), each_tensor())
def test_a_tensor_elsewhere_is_refused(call, name, path):
    refuses(call, name, path, at(call, name, path).to("meta"), ValueError, "different devices.* meta")


@pytest.mark.parametrize(("call", "name", "path"), each_tensor())
def test_another_dtype_is_refused(call, name, path):
    tensor = at(call, name, path)
    refuses(call, name, path, torch.empty(tensor.shape, dtype=torch.complex64), TypeError, "complex64")


@pytest.mark.parametrize(("call", "name", "path"), each_tensor())
def test_another_number_of_axes_is_refused(call, name, path):
    tensor = at(call, name, path)
    refuses(call, name, path, tensor[None], ValueError)
    refuses(call, name, path, tensor.new_zeros(()), ValueError)


@pytest.mark.parametrize(("call", "name", "path"), each_tensor())
def test_a_strided_last_axis_is_refused(call, name, path):
    tensor = at(call, name, path)
    if tensor.shape[-1] > 1:
        apart = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
        refuses(call, name, path, apart, ValueError, "contiguous|dense")


@pytest.mark.parametrize(("call", "name", "path"), each_tensor(written=True))
def test_what_is_written_has_the_shape_of_the_result_and_no_holes(call, name, path):
    tensor = at(call, name, path)
    for axis, size in enumerate(tensor.shape):
        for other in (size - 1, size + 1):
            shape = [*tensor.shape[:axis], other, *tensor.shape[axis + 1 :]]
            refuses(call, name, path, tensor.new_zeros(shape), ValueError)
    if tensor.ndim > 1 and not call.startswith(STRIDED):
        apart = tensor.new_zeros(*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1])
        refuses(call, name, path, apart[..., ::2, :], ValueError, "contiguous|dense")


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call in CALLS for name in CALLS[call][1] if name in ("pages", "data")],
)
def test_pages_at_odd_addresses_are_refused(call, name):
    pages = at(call, name, ())
    unit = 4 if call == "store_index_keys" else 16
    for offset in (1, unit // 2):
        memory = torch.zeros(pages.numel() + offset, dtype=U8)[offset:]
        refuses(call, name, (), memory.view(pages.shape), ValueError, f"multiples of {unit} bytes")
    last = pages.shape[1] if pages.ndim == 2 else pages.shape[1] * pages.shape[2]
    memory = torch.zeros(len(pages), last + unit // 2, dtype=U8)[:, :last]
    refuses(call, name, (), memory.unflatten(1, pages.shape[1:]), ValueError, f"multiples of {unit} bytes")


@pytest.mark.parametrize("call", CALLS)
def test_an_option_that_is_none_of_the_docstrings_is_refused(call):
    function, given = CALLS[call]
    for name, hint in typing.get_type_hints(function).items():
        kinds = {hint, *typing.get_args(hint)}
        if name == "return":
            continue
        wrong = [torch.float64, torch.float16, torch.int32] if torch.dtype in kinds else []
        if any(typing.get_origin(kind) is typing.Literal for kind in kinds):
            wrong = ["typo"]
        for value in wrong:
            with (
                not_launched() as launched,
                pytest.raises((TypeError, ValueError), match=f"^\\w+: .*{value}"),
            ):
                function(**given | {name: value})
            assert not launched or call in STEPS
