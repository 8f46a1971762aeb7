"""Triton's interpreter with the number formats of the hardware: see :func:`install`.

The interpreter of Triton 3.6 truncates FP32 to BF16, loses the carry from FP32 to FP8, and multiplies BF16 bit
patterns as integers in a dot; its ``fma`` rounds the product, and its minimum and maximum keep NaN where the
hardware's give the other operand. Here its conversions are ml_dtypes casts, saturating as ``cvt.rn.satfinite`` does,
dots widen BF16 first, and those three do as the hardware does. What it still cannot do: arithmetic on BF16 values
other than casts and dots (widen to FP32 first), and inline assembly.
"""

import os
from functools import cache

import torch

WANTED = "TRITON_INTERPRET"


def install() -> bool:
    """Interpret kernels where no GPU can run them, with exact conversions; before any kernel is imported.

    Returns
    -------
    bool
        Whether kernels are interpreted in this process.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault(WANTED, "1")
    if os.environ.get(WANTED) != "1":
        return False
    _replace_conversions()
    return True


def _replace_conversions() -> None:
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float8e4nv: (ml_dtypes.float8_e4m3fn, 448.0),
        tl.float8e5: (ml_dtypes.float8_e5m2, 57344.0),
        tl.bfloat16: (ml_dtypes.bfloat16, None),
        tl.float16: (np.float16, None),
        tl.float32: (np.float32, None),
        tl.float64: (np.float64, None),
    }

    def convert(values, source, target, _rounding):  # noqa: ANN001, ANN202 - the interpreter's own signature
        stored, _ = dtypes[source.scalar]
        wanted, largest = dtypes[target.scalar]
        wide = (
            np.ascontiguousarray(values)
            .view(stored)
            .astype(np.float64 if stored == np.float64 else np.float32)
        )
        if largest is not None:
            wide = np.clip(wide, -largest, largest)  # NaN passes
        narrow = wide.astype(wanted)
        return narrow.view(f"u{narrow.dtype.itemsize}")

    wider = {np.dtype(np.float32): np.float64}

    def dot(self, a, b, d, _precision, _imprecise):  # noqa: ANN001, ANN202 - the interpreter's own signature
        left, right = (
            convert(x.data, x.dtype, tl.float32, None).view(np.float32)
            if x.dtype.scalar in (tl.bfloat16, tl.float8e4nv, tl.float8e5)
            else x.data
            for x in (a, b)
        )
        # BLAS sums in an order of the shape's and the processor's: in FP64, rounded once, a row does not see it
        product = np.matmul(left, right, dtype=wider.get(d.data.dtype, d.data.dtype)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def fma(self, x, y, z):  # noqa: ANN001, ANN202 - the interpreter's own signature
        if x.data.dtype != np.float32:
            raise TypeError(f"fma of {x.data.dtype} is not emulated; use FP32")
        wide = [operand.data.astype(np.float64) for operand in (x, y, z)]
        with np.errstate(all="ignore"):
            product = wide[0] * wide[1]  # exact: 48 bits
            total = product + wide[2]
            part = total - product
            error = (product - (total - part)) + (wide[2] - part)
            # to odd, so that the second rounding is the only one (Boldo and Melquiond 2008)
            even = (total.view(np.int64) & 1) == 0
            beside = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
            odd = np.where((error != 0) & np.isfinite(error) & even, beside, total)
            return interpreter.TensorHandle(odd.astype(np.float32), x.dtype.scalar)

    _patch_language_once_a_launch()
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = convert
    builder.create_dot = dot
    builder.create_fma = fma
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    _let_numbers_bound_loops(interpreter)
    _name_types_once(interpreter)
    _shape_types_once(interpreter.tl.core)


def _name_types_once(interpreter) -> None:  # noqa: ANN001 - Triton's module
    """Every value has a shape, and every shape a type with a name, made anew each time: a third of a kernel's time."""
    core = interpreter.tl.core
    type_of, known = core._type_for_tuple_values, {}

    def type_for(values, fields=None):  # noqa: ANN001, ANN202 - Triton's own signature
        sizes = tuple([one.value if type(one) is core.constexpr else one for one in values])
        if fields is not None or not all(type(size) is int for size in sizes):
            return type_of(values, fields)
        if sizes not in known:
            known[sizes] = type_of(values, fields)
        return known[sizes]

    array_type_of = interpreter._get_np_dtype
    scalars_array_type = cache(array_type_of)

    def array_type_for(dtype):  # noqa: ANN001, ANN202 - the interpreter's own signature
        scalar = dtype.scalar
        return array_type_of(dtype) if isinstance(scalar, core.pointer_type) else scalars_array_type(scalar)

    core._type_for_tuple_values = type_for
    interpreter._get_np_dtype = array_type_for


def _shape_types_once(core) -> None:  # noqa: ANN001 - Triton's module
    """Every block and its type check and wrap their shape anew, and compare it by its numbers: a third of the rest."""
    as_block, as_tensor = core.block_type.__init__, core.tensor.__init__
    same, same_type = core.tuple.__eq__, core.dtype.__eq__
    checked, wrapped, equal = {}, {}, core.constexpr(True)

    def block(self, element_ty, shape) -> None:  # noqa: ANN001 - Triton's own signature
        sizes = tuple([one.value if type(one) is core.constexpr else one for one in shape])
        if sizes not in checked or not all(type(size) is int for size in sizes):
            as_block(self, element_ty, shape)
            checked[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, written = checked[sizes]
        self.name = f"<{written}, {element_ty}>"

    def tensor(self, handle, type) -> None:  # noqa: ANN001 - Triton's own signature
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in wrapped:
            as_tensor(self, handle, type)
            wrapped[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped[sizes]

    def alike(self, other):  # noqa: ANN001, ANN202 - Triton's own signature
        if self is other:
            return equal
        if type(other) is list and all(type(one) is int for one in other):
            return core.constexpr(self.values == other)
        return same(self, other)

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    core.tuple.__eq__ = alike
    core.dtype.__eq__ = lambda self, other: self is other or same_type(self, other)


def _let_numbers_bound_loops(interpreter) -> None:  # noqa: ANN001 - Triton's module
    """A number that a kernel computed is an array of one element, which numpy 2.4 no longer takes for an integer."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:  # noqa: ANN001 - the interpreter's own signature
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _patch_language_once_a_launch() -> None:
    """Each call of a device function patches all of ``triton.language`` anew: half of a kernel's time here."""
    import inspect

    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    @cache
    def languages(fn):  # noqa: ANN001, ANN202 - a function
        both = (interpreter.tl, interpreter.tl.core)
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in modules if module in both)

    def patch(fn):  # noqa: ANN001, ANN202 - the interpreter's own signature
        found = languages(fn)
        if found in patched:
            return interpreter._LangPatchScope()
        patched.add(found)
        return patch_language(fn)

    def call(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202 - the interpreter's own signature
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch
    interpreter.GridExecutor.__call__ = call
