"""Clamped SwiGLU and NVFP4 or FP8 quantiser in one launch, Triton; see the ref beside this.

The bits are those of the kernels swiglu and nvfp4_quantise, or fp8_quantise, in turn, with ``between`` as the dtype
between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check_option
from kernels.build_spec import Build, Sizes
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.rmsnorm.kernel import row_constants, stored
from kernels.rmsnorm.row_kernel import group_max, load_row, paired, row_top
from kernels.rmsnorm_quantise_nvfp4.kernel import OUT_OF, TRITON, allocate_rows, pointers_of, store_rows
from kernels.rmsnorm_quantise_nvfp4.ref import Form, Rows
from kernels.swiglu.kernel import check_halves, swiglu_of


@triton.jit
def _swiglu_quantise_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    x_stride,
    half,
    limit,
    F: tl.constexpr,
    BETWEEN: tl.constexpr,
    PDL: tl.constexpr,
    GROUPS: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows int32 on a long prompt
    at = x_ptr + row * x_stride
    y = stored(swiglu_of(load_row(at, F, GROUPS), load_row(at + half, F, GROUPS), limit), BETWEEN)
    amax = group_max(y, GROUPS)
    store_rows(y, amax, row_top(amax), code_ptr, scale_ptr, gsa_ptr, row, F, GROUPS)


def swiglu_quantise(
    gate_up: Tensor,
    *,
    limit: float,
    form: Form = "nvfp4",
    between: torch.dtype = torch.float32,
    out: Rows | None = None,
) -> Rows:
    """Gate a row's second half by its first, and store it as a GEMM reads it.

    Parameters
    ----------
    gate_up : (T, 2 F) BF16 or FP32
        Gate first. Rows may be strided. 16 (NVFP4) or 128 (FP8) divides F, which is at most 32768.
    limit : float
        ``swiglu_limit``.
    form : "nvfp4" or "fp8"
        Of the rows.
    between : torch.dtype
        What the product passes through: FP32 is none, BF16 is what two launches would pass through memory.
    out : Nvfp4Rows or Fp8Rows, contiguous, optional

    Returns
    -------
    Nvfp4Rows or Fp8Rows of (T, F)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    check_option("swiglu_quantise_nvfp4", TRITON, between=between)
    T, F = check_halves("swiglu_quantise_nvfp4", gate_up)
    rows_out = allocate_rows("swiglu_quantise_nvfp4", form, T, F, gate_up.device, out)
    if T and F:
        constants, options = row_constants(F)
        from_x = paired(gate_up)
        _swiglu_quantise_kernel[(T,)](
            from_x,
            *pointers_of(rows_out),
            from_x.stride(0),
            from_x.shape[1] // 2,
            limit,
            F=F,
            BETWEEN=TRITON[between],
            **overlap(gate_up.device),
            **constants,
            **options,
        )
    return rows_out


def builds(sizes: Sizes) -> list[Build]:
    """Between an expert's products."""
    constants, options = row_constants(sizes.moe_intermediate_size)
    integers = ("x_stride", "half")
    return [
        Build(
            name=f"swiglu_quantise_nvfp4/{prefix}{sizes.name}",
            kernel=_swiglu_quantise_kernel,
            signature={"x_ptr": "*i32", **rows, **dict.fromkeys(integers, "i32"), "limit": "fp32"},
            constants={"F": sizes.moe_intermediate_size, "BETWEEN": tl.float32, "PDL": True}
            | {**absent, **constants},
            aligned=("x_ptr", *rows, *integers),
            options={**options, **OVERLAPPED},
        )
        for prefix, (rows, absent) in (("", OUT_OF["nvfp4"]), ("fp8/", OUT_OF["fp8"]))
    ]
