"""RMSNorm and NVFP4 quantiser in one launch, Triton; see :mod:`kernels.rmsnorm_quantise_nvfp4.ref`.

The bits are those of the kernels :func:`kernels.rmsnorm.kernel.rmsnorm` and
:func:`kernels.nvfp4_quantise.kernel.quantise` one after the other, with ``between`` as the dtype between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.nvfp4_quantise.kernel import OUT_SIGNATURE, allocate, launch, store_nvfp4
from kernels.rmsnorm.kernel import FLOATS, load_weight, normalised, stored
from kernels.rmsnorm_quantise_nvfp4.ref import NormedRows

TRITON = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _rmsnorm_quantise_kernel(
    x_ptr,
    weight_ptr,
    copy_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    x_stride,
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
        wide = row.to(tl.int64)[:, None]  # row * stride outgrows int32 on a long prompt
        mask = (row < num_rows)[:, None] & (col < D)[None, :]
        x = tl.load(x_ptr + wide * x_stride + col[None, :], mask, other=0.0).to(tl.float32)
        y = stored(normalised(x, weight, D, eps, ROWS, BLOCK_D), BETWEEN)
        if COPY:
            tl.store(copy_ptr + wide * D + col[None, :], y.to(copy_ptr.dtype.element_ty), mask)
        store_nvfp4(y, code_ptr, scale_ptr, gsa_ptr, row, num_rows, D, ROWS, BLOCK_D)


def rmsnorm_quantise(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    between: torch.dtype = torch.float32,
    copy: torch.dtype | None = None,
    out: NormedRows | None = None,
) -> NormedRows:
    """Normalise rows and store them as NVFP4.

    Parameters
    ----------
    x : (T, D) BF16 or FP32
        Rows may be strided. 16 divides D, which is at most 32768.
    weight : (D,) BF16 or FP32, or None
    eps : float
        Positive.
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
    sizes = check(op, x=(x, "T D", FLOATS), weight=(weight, "D", FLOATS))
    T, D = sizes["T"], sizes["D"]
    done = allocate_normed(op, T, D, x.device, copy, out)
    if T == 0 or D == 0:
        return done
    grid, constants, options = launch(T, triton.next_power_of_2(D))
    _rmsnorm_quantise_kernel[grid](
        x,
        x if weight is None else weight,
        done.rows.gsa if done.copy is None else done.copy,
        *done.rows,
        x.stride(0),
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


def allocate_normed(
    op: str, T: int, D: int, device: torch.device, copy: torch.dtype | None, out: NormedRows | None
) -> NormedRows:
    """``out``, checked, or memory for the NVFP4 of T rows of D values, and for their copy if there is one.

    Raises
    ------
    TypeError, ValueError
        A tensor of ``out`` does not fit, or D.
    """
    rows = allocate(op, T, D, device, None if out is None else out.rows)
    if out is None:
        return NormedRows(rows, None if copy is None else torch.empty(T, D, dtype=copy, device=device))
    check(op, dense=["copy"], copy=(out.copy, f"{T} {D}", FLOATS))
    return out


def builds(sizes: Sizes) -> list[Build]:
    """The block's input norm, with its BF16 copy, and q_a's norm, as decode and prefill launch them."""
    found = []
    for name, D, copy in (("hidden", sizes.hidden_size, True), ("q_a", sizes.q_lora_rank, False)):
        for phase, T in (("decode", 1), ("prefill", 4096)):
            _, rows, options = launch(T, triton.next_power_of_2(D))
            pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "copy_ptr": "*bf16" if copy else "*fp32"}
            found.append(
                Build(
                    name=f"rmsnorm_quantise_nvfp4/{name}_{phase}/{sizes.name}",
                    kernel=_rmsnorm_quantise_kernel,
                    signature={
                        **pointers,
                        **OUT_SIGNATURE,
                        **dict.fromkeys(("x_stride", "num_rows", "D"), "i32"),
                        "eps": "fp32",
                    },
                    constants={"WEIGHTED": True, "BETWEEN": tl.float32, "COPY": copy, **rows},
                    aligned=(*pointers, *OUT_SIGNATURE, "x_stride", "D"),
                    options=options,
                )
            )
    return found
