"""RMSNorm and NVFP4 or FP8 quantiser in one launch, Triton; see :mod:`kernels.rmsnorm_quantise_nvfp4.ref`.

The bits are those of the kernels :func:`kernels.rmsnorm.kernel.rmsnorm` and
:func:`kernels.nvfp4_quantise.kernel.quantise`, or :func:`kernels.fp8_quantise.kernel.quantise`, one after the other,
with ``between`` as the dtype between them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.fp8_quantise import kernel as fp8
from kernels.fp8_quantise.kernel import store_fp8
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.nvfp4_quantise.kernel import OUT_SIGNATURE, allocate, in_words, store_nvfp4
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.rmsnorm.kernel import FLOATS, check_width, row_constants
from kernels.rmsnorm.row_kernel import columns, load_row, load_row_weight, norm_row, paired
from kernels.rmsnorm_quantise_nvfp4.ref import QUANTISERS, Form, NormedRows, Rows

TRITON = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# pointers of a launch's rows, and which of them are not there
OUT_OF: dict[Form, tuple[dict[str, str], dict[str, None]]] = {
    "nvfp4": (OUT_SIGNATURE, {}),
    "fp8": (fp8.OUT_SIGNATURE, {"gsa_ptr": None}),
}


@triton.jit
def _rmsnorm_quantise_kernel(
    x_ptr,
    weight_ptr,
    copy_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    x_stride,
    eps,
    D: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BETWEEN: tl.constexpr,
    COPY: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows int32 on a long prompt
    x = load_row(x_ptr + row * x_stride, D, GROUPS)
    weight = load_row_weight(weight_ptr, D, GROUPS, WEIGHTED)
    store_normed(x, weight, copy_ptr, code_ptr, scale_ptr, gsa_ptr, row, D, eps, BETWEEN, COPY, GROUPS)


@triton.jit
def store_normed(
    x,
    weight,
    copy_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    row,
    D,
    eps,
    BETWEEN: tl.constexpr,
    COPY: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Norm of the row ``row`` (int64), FP32 [GROUPS, 2, 8] as the weights, stored as rows and as its copy."""
    y, amax, top = norm_row(x, weight, D, eps, BETWEEN, GROUPS)
    if COPY:
        col = columns(GROUPS)
        tl.store(copy_ptr + row * D + col, y.to(copy_ptr.dtype.element_ty), col < D)
    store_rows(y, amax, top, code_ptr, scale_ptr, gsa_ptr, row, D, GROUPS)


@triton.jit
def store_rows(y, amax, top, code_ptr, scale_ptr, gsa_ptr, row, D, GROUPS: tl.constexpr):
    """Row ``row`` as NVFP4, or as FP8 where there is no gsa; arguments as :func:`store_nvfp4`."""
    if gsa_ptr is None:
        store_fp8(y, amax, code_ptr, scale_ptr, row, D, GROUPS)
    else:
        store_nvfp4(y, amax, top, code_ptr, scale_ptr, gsa_ptr, row, D, GROUPS)


def rmsnorm_quantise(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    form: Form = "nvfp4",
    between: torch.dtype = torch.float32,
    copy: torch.dtype | None = None,
    out: NormedRows | None = None,
) -> NormedRows:
    """Normalise rows and store them as a GEMM reads them.

    Parameters
    ----------
    x : (T, D) BF16 or FP32
        Rows may be strided. 16 (NVFP4) or 128 (FP8) divides D, which is at most 32768.
    weight : (D,) BF16 or FP32, or None
    eps : float
        Positive.
    form : "nvfp4" or "fp8"
        Of the rows.
    between : torch.dtype
        What the norm passes through: FP32 is none, BF16 is what two launches would pass through memory.
    copy : torch.dtype or None
        Store the norm too, as BF16 or FP32, for readers of wider values (compressor, indexer, router).
    out : NormedRows, contiguous, optional
        Its copy's dtype is used instead of ``copy``.

    Returns
    -------
    NormedRows of (T, D)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    op = "rmsnorm_quantise_nvfp4"
    check_option(op, TRITON, between=between)
    sizes = check(op, x=(x, "T D", FLOATS), weight=(weight, "D", FLOATS))
    T, D = sizes["T"], sizes["D"]
    done = allocate_normed(op, form, T, D, x.device, copy, out)
    if T == 0 or D == 0:
        return done
    pointers, constants = of_normed(weight, D, between, done)
    from_x = paired(x)
    _rmsnorm_quantise_kernel[(T,)](from_x, *pointers, from_x.stride(0), eps, **constants)
    return done


def of_normed(
    weight: Tensor | None, D: int, between: torch.dtype, done: NormedRows
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Of a launch that ends in :func:`store_normed`: weight, copy, codes, scales and gsa; constants and options."""
    scales = done.rows.scales  # stands for what is not there
    copy = scales if done.copy is None else done.copy
    pointers = (scales if weight is None else paired(weight), copy, *pointers_of(done.rows))
    constants, options = row_constants(D)
    constants |= {
        "D": D,
        "WEIGHTED": weight is not None,
        "BETWEEN": TRITON[between],
        "COPY": done.copy is not None,
    }
    return pointers, {**constants, **options, **overlap(scales.device)}


def pointers_of(rows: Rows) -> tuple[Tensor | None, ...]:
    """Codes, scales and gsa as :func:`store_rows` takes them; FP8 has no gsa."""
    return (*fp8.in_bytes(rows), None) if isinstance(rows, Fp8Rows) else in_words(rows)


def allocate_rows(op: str, form: Form, T: int, D: int, device: torch.device, out: Rows | None) -> Rows:
    """``out``, checked, or memory for T rows of D values of a form.

    Raises
    ------
    TypeError, ValueError
        A tensor of ``out`` does not fit, or is of the other form; D is too large or has a group of less.
    """
    check_option(op, tuple(QUANTISERS), form=form)
    if out is not None and isinstance(out, Fp8Rows) != (form == "fp8"):
        raise TypeError(f"{op}: out is {type(out).__name__}, form is {form}")
    if form == "nvfp4":
        return allocate(op, T, D, device, out)  # type: ignore[arg-type]
    return fp8.allocate(op, T, check_width(op, D), device, out)  # type: ignore[arg-type]


def allocate_normed(
    op: str,
    form: Form,
    T: int,
    D: int,
    device: torch.device,
    copy: torch.dtype | None,
    out: NormedRows | None,
) -> NormedRows:
    """``out``, checked, or memory for T rows of D values, and for their copy if there is one.

    Raises
    ------
    TypeError, ValueError
        A tensor of ``out`` does not fit, or D.
    """
    check_option(op, (*FLOATS, None), copy=copy)
    rows = allocate_rows(op, form, T, D, device, None if out is None else out.rows)
    if out is None:
        return NormedRows(rows, None if copy is None else torch.empty(T, D, dtype=copy, device=device))
    check(op, dense=["copy"], device=device, copy=(out.copy, f"{T} {D}", FLOATS))
    return out


def builds(sizes: Sizes) -> list[Build]:
    """The block's input norm, with its BF16 copy, and q_a's norm."""
    sites = (("hidden", sizes.hidden_size, True), ("q_a", sizes.q_lora_rank, False))
    forms: tuple[tuple[str, Form], ...] = (("", "nvfp4"), ("fp8_", "fp8"))
    return [
        build_normed(
            f"rmsnorm_quantise_nvfp4/{prefix}{name}/{sizes.name}",
            _rmsnorm_quantise_kernel,
            {"x_ptr": "*i32"},
            ("x_stride",),
            D,
            form=form,
            copy=copy,
        )
        for prefix, form in forms
        for name, D, copy in sites
    ]


def build_normed(
    name: str,
    kernel: Any,
    inputs: dict[str, str],
    strides: tuple[str, ...],
    D: int,
    *,
    form: Form = "nvfp4",
    copy: bool,
    counts: tuple[str, ...] = (),
    **more: Any,
) -> Build:
    """A specialisation of a kernel that ends in :func:`store_normed`.

    ``strides``: its integers that are multiples of 16, ``counts``: the others; ``more``: its own constants.
    """
    constants, options = row_constants(D)
    rows, absent = OUT_OF[form]
    pointers = {**inputs, "weight_ptr": "*i32", "copy_ptr": "*bf16" if copy else "*fp32", **rows}
    integers = dict.fromkeys((*strides, *counts), "i32")
    return Build(
        name=name,
        kernel=kernel,
        signature={**pointers, **integers, "eps": "fp32"},
        constants={
            **({} if "D" in strides else {"D": D}),
            "WEIGHTED": True,
            "BETWEEN": tl.float32,
            "COPY": copy,
            "PDL": True,
            **absent,
            **constants,
            **more,
        },
        aligned=(*pointers, *strides),
        options={**options, **OVERLAPPED},
    )
