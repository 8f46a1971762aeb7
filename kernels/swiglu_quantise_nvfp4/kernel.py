"""Clamped SwiGLU and NVFP4 quantiser in one launch, Triton; see the ref beside this.

The bits are those of the kernels swiglu and nvfp4_quantise in turn, with ``between`` as the dtype between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.build_spec import Build, Sizes
from kernels.nvfp4_quantise.kernel import OUT_SIGNATURE, allocate, launch, store_nvfp4
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.rmsnorm.kernel import stored
from kernels.rmsnorm_quantise_nvfp4.kernel import TRITON
from kernels.swiglu.kernel import check_halves, swiglu_of


@triton.jit
def _swiglu_quantise_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    x_stride,
    num_rows,
    F,
    limit,
    BETWEEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    col = tl.arange(0, BLOCK_D)[None, :]
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (col < F)
        at = x_ptr + row.to(tl.int64)[:, None] * x_stride + col
        gate = tl.load(at, mask, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask, other=0.0).to(tl.float32)
        y = stored(swiglu_of(gate, up, limit), BETWEEN)
        store_nvfp4(y, code_ptr, scale_ptr, gsa_ptr, row, num_rows, F, ROWS, BLOCK_D)


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
    T, F = check_halves("swiglu_quantise_nvfp4", gate_up)
    rows_out = allocate("swiglu_quantise_nvfp4", T, F, gate_up.device, out)
    if T and F:
        grid, constants, options = launch(T, triton.next_power_of_2(F))
        _swiglu_quantise_kernel[grid](
            gate_up,
            *rows_out,
            gate_up.stride(0),
            T,
            F,
            limit,
            BETWEEN=TRITON[between],
            **constants,
            **options,
        )
    return rows_out


def builds(sizes: Sizes) -> list[Build]:
    """Between an expert's products, as decode and prefill launch it."""
    found = []
    for phase, T in (("decode", 8), ("prefill", 4096)):
        _, constants, options = launch(T, triton.next_power_of_2(sizes.moe_intermediate_size))
        found.append(
            Build(
                name=f"swiglu_quantise_nvfp4/{phase}/{sizes.name}",
                kernel=_swiglu_quantise_kernel,
                signature={
                    "x_ptr": "*bf16",
                    **OUT_SIGNATURE,
                    **dict.fromkeys(("x_stride", "num_rows", "F"), "i32"),
                    "limit": "fp32",
                },
                constants={"BETWEEN": tl.float32, **constants},
                aligned=("x_ptr", *OUT_SIGNATURE, "x_stride", "F"),
                options=options,
            )
        )
    return found
