"""Clamped SwiGLU and NVFP4 quantiser in one launch, Triton; see the ref beside this.

The bits are those of the kernels swiglu and nvfp4_quantise in turn, with ``between`` as the dtype between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check_option
from kernels.build_spec import Build, Sizes
from kernels.nvfp4_quantise.kernel import OUT_SIGNATURE, allocate, in_words, store_nvfp4
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.rmsnorm.kernel import row_constants, stored
from kernels.rmsnorm.row_kernel import group_max, load_row, paired, row_top
from kernels.rmsnorm_quantise_nvfp4.kernel import TRITON
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
    store_nvfp4(y, amax, row_top(amax), code_ptr, scale_ptr, gsa_ptr, row, F, GROUPS)


def swiglu_quantise(
    gate_up: Tensor,
    *,
    limit: float,
    between: torch.dtype = torch.float32,
    out: Nvfp4Rows | None = None,
) -> Nvfp4Rows:
    """Gate a row's second half by its first, and store it as NVFP4.

    Parameters
    ----------
    gate_up : (T, 2 F) BF16 or FP32
        Gate first. Rows may be strided. 16 divides F, which is at most 32768.
    limit : float
        ``swiglu_limit``.
    between : torch.dtype
        What the product passes through: FP32 is none, BF16 is what two launches would pass through memory.
    out : Nvfp4Rows, contiguous, optional

    Returns
    -------
    Nvfp4Rows of (T, F)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    check_option("swiglu_quantise_nvfp4", TRITON, between=between)
    T, F = check_halves("swiglu_quantise_nvfp4", gate_up)
    rows_out = allocate("swiglu_quantise_nvfp4", T, F, gate_up.device, out)
    if T and F:
        constants, options = row_constants(F)
        from_x = paired(gate_up)
        _swiglu_quantise_kernel[(T,)](
            from_x,
            *in_words(rows_out),
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
            name=f"swiglu_quantise_nvfp4/{sizes.name}",
            kernel=_swiglu_quantise_kernel,
            signature={"x_ptr": "*i32", **OUT_SIGNATURE, **dict.fromkeys(integers, "i32"), "limit": "fp32"},
            constants={"F": sizes.moe_intermediate_size, "BETWEEN": tl.float32, "PDL": True, **constants},
            aligned=("x_ptr", *OUT_SIGNATURE, *integers),
            options={**options, **OVERLAPPED},
        )
    ]
