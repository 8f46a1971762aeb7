"""RMSNorm, Triton; the contract is :func:`kernels.rmsnorm.ref.rmsnorm`.

A row is summed in one order (:mod:`kernels.rmsnorm.row_kernel`), so that its bits depend neither on the rows beside
it nor on how a kernel spreads a row over its threads: every fused kernel here gives the bits of this one. Squares are
FP32: a row whose squares sum to 2^128 or more comes out as zeros (the ref, in FP64, has none).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.rmsnorm.row_kernel import (
    columns,
    inverse_rms_of_row,
    inverse_root,
    load_row,
    load_row_weight,
    onto_halves,
    paired,
    squares,
)

MAX_D = 32768  # a row of a program's registers


@triton.jit
def inverse_rms(x, size, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """1 / sqrt(mean square + eps) of [ROWS, COLS] FP32, zeros beyond ``size`` columns, COLS at least 16: [ROWS]."""
    eights = squares(tl.reshape(x, (ROWS, COLS // 8, 8)), ROWS, COLS // 8)
    sixteens = tl.sum(tl.reshape(eights, (ROWS, COLS // 16, 2)), 2)
    return inverse_root(
        onto_halves(sixteens, ROWS, COLS // 16), tl.full((ROWS,), 1.0, tl.float32) * size, eps
    )


@triton.jit
def normalised(x, weight, size, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """RMSNorm of [ROWS, COLS] FP32 under weights [COLS], or ones: [ROWS, COLS]."""
    return x * weight[None, :] * inverse_rms(x, size, eps, ROWS, COLS)[:, None]


@triton.jit
def stored(x, DTYPE: tl.constexpr):
    """FP32 after a store in ``DTYPE``: what the next kernel would read."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def load_weight(weight_ptr, col, size, WEIGHTED: tl.constexpr):
    """FP32 weights of the columns ``col``; ones without a weight."""
    if WEIGHTED:
        return tl.load(weight_ptr + col, col < size, other=0.0).to(tl.float32)
    else:
        return tl.full(col.shape, 1.0, tl.float32)


@triton.jit
def _rmsnorm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    D,
    eps,
    WEIGHTED: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows int32 on a long prompt
    x = load_row(x_ptr + row * x_stride, D, GROUPS)
    weight = load_row_weight(weight_ptr, D, GROUPS, WEIGHTED)
    y = x * weight * inverse_rms_of_row(x, D, eps, GROUPS)[:, None, None]
    col = columns(GROUPS)
    tl.store(y_ptr + row * D + col, y.to(y_ptr.dtype.element_ty), col < D)


def row_constants(D: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Constants and launch options of a kernel with a row a program.

    A thread holds 32 values, 64 of rows over 4096. Measured on an H200 (2026-11-30), P4 of 4096 rows: 20.0 us of
    4096 values with 4 warps, 23.7 with 8; of 7168 values 34.1 us with 4 warps, 38.1 with 8 (P5: 69 and 91).
    """
    groups = max(1, triton.next_power_of_2(D) // 16)
    warps = groups // 64 if groups <= 256 else groups // 128
    return {"GROUPS": groups}, {"num_warps": max(1, warps), **EXACT}


def rmsnorm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise rows; see :func:`kernels.rmsnorm.ref.rmsnorm`.

    Parameters
    ----------
    x : (T, D) BF16 or FP32
        Rows may be strided. D is at most 32768.
    weight : (D,) BF16 or FP32, or None
    eps : float
        Positive.
    dtype : torch.dtype
        BF16 or FP32: how the result is stored, if ``out`` is not given.
    out : (T, D) contiguous, optional

    Returns
    -------
    (T, D) of ``dtype``
        Within (log2(D) / 2 + 9) * 2^-24 of the value before it is stored.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; D is over 32768.
    """
    check_option("rmsnorm", FLOATS, dtype=dtype)
    sizes = check(
        "rmsnorm", dense=["out"], x=(x, "T D", FLOATS), weight=(weight, "D", FLOATS), out=(out, "T D", FLOATS)
    )
    T, D = sizes["T"], check_width("rmsnorm", sizes["D"])
    y = torch.empty(T, D, dtype=dtype, device=x.device) if out is None else out
    if T == 0 or D == 0:
        return y
    constants, options = row_constants(D)
    from_x, from_weight = paired(x), x if weight is None else paired(weight)
    _rmsnorm_kernel[(T,)](
        from_x,
        from_weight,
        y,
        from_x.stride(0),
        D,
        eps,
        WEIGHTED=weight is not None,
        **constants,
        **options,
        **overlap(x.device),
    )
    return y


def check_width(op: str, D: int, most: int = MAX_D) -> int:
    """``D``, or a refusal of rows that a program cannot hold."""
    if most < D:
        raise ValueError(f"{op}: D = {D} is over the kernel's limit of {most}")
    return D


def builds(sizes: Sizes) -> list[Build]:
    """The norms of a layer, of BF16 (in pairs) and of FP32 values."""
    found = []
    for name, D in {"hidden": sizes.hidden_size, "q_a": sizes.q_lora_rank, "kv": sizes.head_dim}.items():
        for dtype, pointer in (("bf16", "*i32"), ("fp32", "*fp32")):
            constants, options = row_constants(D)
            found.append(
                Build(
                    name=f"rmsnorm/{name}_{dtype}/{sizes.name}",
                    kernel=_rmsnorm_kernel,
                    signature={
                        "x_ptr": pointer,
                        "weight_ptr": "*i32",
                        "y_ptr": "*bf16",
                        "x_stride": "i32",
                        "D": "i32",
                        "eps": "fp32",
                    },
                    constants={"WEIGHTED": True, "PDL": True, **constants},
                    aligned=("x_ptr", "weight_ptr", "y_ptr", "x_stride", "D"),
                    options={**options, **OVERLAPPED},
                )
            )
    return found
