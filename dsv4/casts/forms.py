"""Which calls are casts, whatever their spelling: the operand, the dtype that it becomes, and who pays."""

import ast
from collections.abc import Callable
from dataclasses import dataclass

from dsv4.casts import ops
from dsv4.casts.dtypes import named
from dsv4.casts.values import Dtype, Scalar, Tensor, Value

Evaluate = Callable[[ast.expr], Value]


@dataclass(frozen=True)
class Form:
    """A cast as it is written.

    Attributes
    ----------
    operand : what is cast.
    target : the dtypes that it may become.
    fused : why it is no pass of its own, or "".
    """

    operand: ast.expr
    target: Dtype
    fused: str = ""


def one(name: str) -> Dtype:
    """The value of one dtype."""
    return Dtype(frozenset({name}))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """A call's keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def cast_form(call: ast.Call, dotted: str, evaluate: Evaluate) -> Form | None:
    """The call as a cast, or None; ``dotted`` is its function's full name, '' for a method of an expression."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted.rpartition(".")[2]
    library = dotted.partition(".")[0] in ("torch", "triton")
    given = keyword(call, "dtype")
    if library or dotted.startswith("torch."):
        return _function(call, name, dotted, given, evaluate)
    if not isinstance(call.func, ast.Attribute):
        return None
    operand = call.func.value
    if name in ops.CAST_METHODS and not call.args:
        return Form(operand, one(ops.CAST_METHODS[name]))
    if name == "to":
        return _to(operand, call, evaluate)
    if name in ("type", "astype", "to_dtype") and (args := [*call.args, *([given] if given else [])]):
        target = _dtype(args[0], evaluate)
        return Form(operand, target) if target else None
    if name in ("type_as", "copy_") and call.args:
        value, other = (call.args[0], operand) if name == "copy_" else (operand, call.args[0])
        like = evaluate(other)
        return Form(value, Dtype(like.dtypes)) if isinstance(like, Tensor) else None
    if name == "new_tensor" and call.args and given:
        target = _dtype(given, evaluate)
        return Form(call.args[0], target) if target else None
    return _reduction(operand, name, given, evaluate)


def _function(
    call: ast.Call, name: str, dotted: str, given: ast.expr | None, evaluate: Evaluate
) -> Form | None:
    """A function of torch or Triton."""
    first = call.args[0] if call.args else keyword(call, "input") or keyword(call, "data")
    if dotted.startswith("triton."):
        if name == "cast" and first is not None:
            target = call.args[1] if len(call.args) > 1 else given
            found = _dtype(target, evaluate) if target else None
            return Form(first, found) if found else None
        wide = keyword(call, "out_dtype")
        found = _dtype(wide, evaluate) if wide and name in ("dot", "dot_scaled") else None
        return Form(call, found, "the accumulator's dtype") if found else None
    if first is None:
        return None
    if name in ops.CONVERTING and given and not isinstance(first, ast.Constant | ast.List | ast.Tuple):
        target = _dtype(given, evaluate)
        return Form(first, target) if target else None
    if "torch.Tensor." in dotted and name in ops.CAST_METHODS:
        return Form(first, one(ops.CAST_METHODS[name]))
    if dotted in ("torch.ops.aten.to", "torch.ops.aten._to_copy", "torch.ops.prims.convert_element_type"):
        target = given or (call.args[1] if len(call.args) > 1 else None)
        found = _dtype(target, evaluate) if target else None
        return Form(first, found) if found else None
    return _reduction(first, name, given, evaluate)


def _reduction(operand: ast.expr, name: str, given: ast.expr | None, evaluate: Evaluate) -> Form | None:
    if given is None or name not in ops.FUSED_DTYPE | ops.PASSED_DTYPE:
        return None
    target = _dtype(given, evaluate)
    fused = "cast as the reduction reads" if name in ops.FUSED_DTYPE else ""
    return Form(operand, target, fused) if target else None


def _to(operand: ast.expr, call: ast.Call, evaluate: Evaluate) -> Form | None:
    """``.to(dtype)``, ``.to(device, dtype)``, ``.to(dtype=...)``, ``.to(other)``; None where only a device is named."""
    other = keyword(call, "other")
    given = keyword(call, "dtype")
    for argument in [*([given] if given else []), *call.args[:2], *([other] if other else [])]:
        value = evaluate(argument)
        if isinstance(value, Dtype):
            return Form(operand, value)
        if isinstance(value, Tensor):
            return Form(operand, Dtype(value.dtypes))
    return None


def _dtype(node: ast.expr, evaluate: Evaluate) -> Dtype | None:
    value = evaluate(node)
    if isinstance(value, Dtype):
        return value
    if isinstance(value, Scalar) and isinstance(value.value, str) and (name := named(value.value)):
        return one(name)
    return None
