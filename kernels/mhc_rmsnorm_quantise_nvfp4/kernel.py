"""mHC's weighted sum, RMSNorm and NVFP4 or FP8 quantiser in one launch, Triton; see the ref beside this.

The bits are those of :func:`kernels.hc.kernel.collapse`, :func:`kernels.rmsnorm.kernel.rmsnorm` and the quantiser
(:func:`kernels.nvfp4_quantise.kernel.quantise`, :func:`kernels.fp8_quantise.kernel.quantise`) in turn, with
``between`` as the dtype between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.hc.streams_kernel import NUM_STREAMS
from kernels.overlap import follow
from kernels.rmsnorm.kernel import FLOATS, stored
from kernels.rmsnorm.row_kernel import load_row_weight, paired, raw_row, widened
from kernels.rmsnorm_quantise_nvfp4.kernel import allocate_normed, build_normed, of_normed, store_normed
from kernels.rmsnorm_quantise_nvfp4.ref import Form, NormedRows

RESIDENT = 528  # programs of four warps that the H200 holds, four an SM


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
    stream_stride,
    num_rows,
    D,
    eps,
    WEIGHTED: tl.constexpr,
    BETWEEN: tl.constexpr,
    COPY: tl.constexpr,
    GROUPS: tl.constexpr,
    LOOP: tl.constexpr,  # D where programs loop over rows, else 0
    PDL: tl.constexpr,
):
    follow(PDL)
    if LOOP > 0:  # the weights stay in registers; a size that is known needs no masks
        weight = load_row_weight(weight_ptr, LOOP, GROUPS, WEIGHTED)
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            wide = tl.cast(row, tl.int64)  # row * stride outgrows int32 on a long prompt
            at, pre_at = streams_ptr + wide * streams_stride, pre_ptr + wide * NUM_STREAMS
            x = stored(_weighted_sum(at, pre_at, stream_stride, LOOP, GROUPS), BETWEEN)
            store_normed(
                x, weight, copy_ptr, code_ptr, scale_ptr, gsa_ptr, wide, LOOP, eps, BETWEEN, COPY, GROUPS
            )
    else:
        row = tl.program_id(0).to(tl.int64)
        weight = load_row_weight(weight_ptr, D, GROUPS, WEIGHTED)
        at, pre_at = streams_ptr + row * streams_stride, pre_ptr + row * NUM_STREAMS
        x = stored(_weighted_sum(at, pre_at, stream_stride, D, GROUPS), BETWEEN)
        store_normed(x, weight, copy_ptr, code_ptr, scale_ptr, gsa_ptr, row, D, eps, BETWEEN, COPY, GROUPS)


@triton.jit
def _weighted_sum(at, pre_ptr, stream_stride, D, GROUPS: tl.constexpr):
    """``sum_j pre_j X_j`` as :func:`kernels.hc.streams_kernel.weighted_sum` has it: FP32 [GROUPS, 2, 8]."""
    x0 = raw_row(at, D, GROUPS)  # all loads are on their way before the first is used
    x1 = raw_row(at + stream_stride, D, GROUPS)
    x2 = raw_row(at + 2 * stream_stride, D, GROUPS)
    x3 = raw_row(at + 3 * stream_stride, D, GROUPS)
    total = widened(x0, GROUPS) * tl.load(pre_ptr)
    total = tl.fma(widened(x1, GROUPS), tl.load(pre_ptr + 1), total)
    total = tl.fma(widened(x2, GROUPS), tl.load(pre_ptr + 2), total)
    return tl.fma(widened(x3, GROUPS), tl.load(pre_ptr + 3), total)


def mhc_rmsnorm_quantise(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    form: Form = "nvfp4",
    between: torch.dtype = torch.float32,
    copy: torch.dtype | None = None,
    out: NormedRows | None = None,
) -> NormedRows:
    """Sum the streams under ``pre``, normalise, and store the rows as a GEMM reads them.

    Parameters
    ----------
    streams : (T, 4, D) BF16 or FP32
        The streams of a token are contiguous; tokens may be strided. 16 (NVFP4) or 128 (FP8) divides D,
        which is at most 32768.
    pre : (T, 4) FP32, contiguous
    weight : (D,) BF16 or FP32, or None
    eps : float
        Positive.
    form : "nvfp4" or "fp8"
        Of the rows.
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
    check_option(op, FLOATS, between=between)
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
    done = allocate_normed(op, form, T, D, streams.device, copy, out)
    if T == 0 or D == 0:
        return done
    pointers, constants = of_normed(weight, D, between, done)
    loop = _loops(T, D, done.copy is not None)
    from_streams = paired(streams)
    _mhc_rmsnorm_quantise_kernel[(RESIDENT if loop else T,)](
        from_streams,
        pre,
        *pointers,
        from_streams.stride(0),
        from_streams.shape[2],
        T,
        eps=eps,
        LOOP=D if loop else 0,
        **constants,
    )
    return done


def _loops(T: int, D: int, copy: bool) -> bool:
    """Whether programs loop over rows: 38.7 us against 40.7 (4096 rows of 4096, H200, 2026-11-30).

    Not for longer rows, nor with a copy: the weights then leave fewer programs an SM.
    """
    return T > RESIDENT and D <= 4096 and not copy


def builds(sizes: Sizes) -> list[Build]:
    """Both sites of a layer, as decode (with the BF16 copy) and prefill launch them."""
    launches: tuple[tuple[str, Form, int, bool], ...] = (
        ("decode", "nvfp4", 1, True),
        ("prefill", "nvfp4", 4096, False),
        ("fp8_decode", "fp8", 1, True),
    )
    return [
        build_normed(
            f"mhc_rmsnorm_quantise_nvfp4/{phase}/{sizes.name}",
            _mhc_rmsnorm_quantise_kernel,
            {"streams_ptr": "*i32", "pre_ptr": "*fp32"},
            ("streams_stride", "stream_stride", "D"),
            sizes.hidden_size,
            form=form,
            copy=copy,
            counts=("num_rows",),
            LOOP=sizes.hidden_size if _loops(T, sizes.hidden_size, copy) else 0,
        )
        for phase, form, T, copy in launches
    ]
