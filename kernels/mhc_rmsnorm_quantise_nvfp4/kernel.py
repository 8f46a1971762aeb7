"""mHC's weighted sum, RMSNorm and NVFP4 quantiser in one launch, Triton; see the ref beside this.

The bits are those of :func:`kernels.hc.kernel.collapse`, :func:`kernels.rmsnorm.kernel.rmsnorm` and
:func:`kernels.nvfp4_quantise.kernel.quantise` in turn, with ``between`` as the dtype between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.hc.streams_kernel import weighted_sum
from kernels.nvfp4_quantise.kernel import OUT_SIGNATURE, launch, store_nvfp4
from kernels.rmsnorm.kernel import FLOATS, load_weight, normalised, stored
from kernels.rmsnorm_quantise_nvfp4.kernel import TRITON, allocate_normed
from kernels.rmsnorm_quantise_nvfp4.ref import NormedRows


@triton.jit
def _mhc_rmsnorm_quantise_kernel(
    streams_ptr,
    pre_ptr,
    weight_ptr,
    copy_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    streams_stride,
    num_rows,
    D,
    eps,
    WEIGHTED: tl.constexpr,
    BETWEEN: tl.constexpr,
    COPY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    col = tl.arange(0, BLOCK_D)
    weight = load_weight(weight_ptr, col, D, WEIGHTED)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        x = stored(weighted_sum(streams_ptr, pre_ptr, row, col, num_rows, streams_stride, D), BETWEEN)
        y = stored(normalised(x, weight, D, eps, ROWS, BLOCK_D), BETWEEN)
        if COPY:
            mask = (row < num_rows)[:, None] & (col < D)[None, :]
            at = copy_ptr + row.to(tl.int64)[:, None] * D + col[None, :]
            tl.store(at, y.to(copy_ptr.dtype.element_ty), mask)
        store_nvfp4(y, code_ptr, scale_ptr, gsa_ptr, row, num_rows, D, ROWS, BLOCK_D)


def mhc_rmsnorm_quantise(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    between: torch.dtype = torch.float32,
    copy: torch.dtype | None = None,
    out: NormedRows | None = None,
) -> NormedRows:
    """Sum the streams under ``pre``, normalise, and store the rows as NVFP4.

    Parameters
    ----------
    streams : (T, 4, D) BF16 or FP32
        The streams of a token are contiguous; tokens may be strided. 16 divides D, which is at most 32768.
    pre : (T, 4) FP32, contiguous
    weight : (D,) BF16 or FP32, or None
    eps : float
        Positive.
    between : torch.dtype
        What the sum and the norm pass through: FP32 is none, BF16 is what three launches would.
    copy : torch.dtype or None
        Store the norm too, as BF16 or FP32.
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
    op = "mhc_rmsnorm_quantise_nvfp4"
    sizes = check(
        op,
        dense=["pre"],
        streams=(streams, "T 4 D", FLOATS),
        pre=(pre, "T 4", torch.float32),
        weight=(weight, "D", FLOATS),
    )
    T, D = sizes["T"], sizes["D"]
    if streams.stride(1) != D and streams.numel():
        raise ValueError(f"{op}: streams of a token are not contiguous: strides {streams.stride()}")
    done = allocate_normed(op, T, D, streams.device, copy, out)
    if T == 0 or D == 0:
        return done
    grid, constants, options = launch(T, triton.next_power_of_2(D))
    _mhc_rmsnorm_quantise_kernel[grid](
        streams,
        pre,
        pre if weight is None else weight,
        done.rows.gsa if done.copy is None else done.copy,
        *done.rows,
        streams.stride(0),
        T,
        D,
        eps,
        WEIGHTED=weight is not None,
        BETWEEN=TRITON[between],
        COPY=done.copy is not None,
        **constants,
        **options,
    )
    return done


def builds(sizes: Sizes) -> list[Build]:
    """Both sites of a layer, with the BF16 copy, as decode and prefill launch them."""
    found = []
    for phase, T in (("decode", 1), ("prefill", 4096)):
        _, rows, options = launch(T, triton.next_power_of_2(sizes.hidden_size))
        pointers = {"streams_ptr": "*bf16", "pre_ptr": "*fp32", "weight_ptr": "*bf16", "copy_ptr": "*bf16"}
        constants = {"WEIGHTED": True, "BETWEEN": tl.float32, "COPY": True, **rows}
        found.append(
            Build(
                name=f"mhc_rmsnorm_quantise_nvfp4/{phase}/{sizes.name}",
                kernel=_mhc_rmsnorm_quantise_kernel,
                signature={
                    **pointers,
                    **OUT_SIGNATURE,
                    **dict.fromkeys(("streams_stride", "num_rows", "D"), "i32"),
                    "eps": "fp32",
                },
                constants=constants,
                aligned=(*pointers, *OUT_SIGNATURE, "streams_stride", "D"),
                options=options,
            )
        )
    return found
