"""RMSNorm, Triton; the contract is :func:`kernels.rmsnorm.ref.rmsnorm`.

A row is summed as a binary tree of neighbours, so that its bits depend neither on the rows beside it nor on how a
kernel spreads a row over its threads: every fused kernel here gives the bits of this one. Squares are FP32: a row
whose squares sum to 2^128 or more comes out as zeros (the ref, in FP64, has none).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT

FLOATS = (torch.bfloat16, torch.float32)
MAX_D = 32768  # a row of a program's registers
SMS = 132  # of the H200; elsewhere only the speed depends on it


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sum of [ROWS, COLS] FP32 over the columns, a power of two, neighbours first: [ROWS]."""
    if COLS == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return tree_sum(tl.sum(tl.reshape(x, (ROWS, COLS // 2, 2)), 2), ROWS, COLS // 2)


@triton.jit
def inverse_rms(x, size, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """1 / sqrt(mean square + eps) of [ROWS, COLS] FP32, zeros beyond ``size`` columns: [ROWS]."""
    mean = tl.div_rn(tree_sum(x * x, ROWS, COLS), tl.full((ROWS,), 1.0, tl.float32) * size)
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def normalised(x, weight, size, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """RMSNorm of [ROWS, COLS] FP32 under weights [COLS], or ones: [ROWS, COLS]."""
    return x * inverse_rms(x, size, eps, ROWS, COLS)[:, None] * weight[None, :]


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
    num_rows,
    D,
    eps,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    col = tl.arange(0, BLOCK_D)
    weight = load_weight(weight_ptr, col, D, WEIGHTED)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (col < D)[None, :]
        wide = row.to(tl.int64)[:, None]  # row * stride outgrows int32 on a long prompt
        x = tl.load(x_ptr + wide * x_stride + col[None, :], mask, other=0.0).to(tl.float32)
        y = normalised(x, weight, D, eps, ROWS, BLOCK_D)
        tl.store(y_ptr + wide * D + col[None, :], y.to(y_ptr.dtype.element_ty), mask)


def rows_and_warps(block: int, num_rows: int) -> tuple[int, int]:
    """Rows a program holds at once, and its warps, for rows of ``block`` values.

    Eight warps hold 16 values a thread of the 4096; a short row shares its program with others. A launch that leaves
    SMs idle spreads each row over more threads. The bits are the same.
    """
    rows = max(1, min(8, 2048 // block)) if num_rows > SMS else 1
    warps = max(1, min(16, rows * block // (256 if num_rows <= SMS else 512)))
    return rows, warps


def num_programs(num_rows: int, rows: int, warps: int) -> int:
    """Programs of a launch: a row is a loop's step where rows outnumber what the SMs hold (32 warps each)."""
    return max(1, min(triton.cdiv(num_rows, rows), SMS * max(1, 32 // warps)))


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
        Within (log2(D) / 2 + 4) * 2^-24 of the value before it is stored.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; D is over 32768.
    """
    sizes = check(
        "rmsnorm", dense=["out"], x=(x, "T D", FLOATS), weight=(weight, "D", FLOATS), out=(out, "T D", FLOATS)
    )
    T, D = sizes["T"], check_width("rmsnorm", sizes["D"])
    y = torch.empty(T, D, dtype=dtype, device=x.device) if out is None else out
    if T == 0 or D == 0:
        return y
    block = triton.next_power_of_2(D)
    rows, warps = rows_and_warps(block, T)
    _rmsnorm_kernel[(num_programs(T, rows, warps),)](
        x,
        x if weight is None else weight,
        y,
        x.stride(0),
        T,
        D,
        eps,
        WEIGHTED=weight is not None,
        ROWS=rows,
        BLOCK_D=block,
        num_warps=warps,
        **EXACT,
    )
    return y


def check_width(op: str, D: int) -> int:
    """``D``, or a refusal of rows that a program cannot hold."""
    if D > MAX_D:
        raise ValueError(f"{op}: D = {D} is over the kernel's limit of {MAX_D}")
    return D


def builds(sizes: Sizes) -> list[Build]:
    """The norms of a layer, of BF16 and of FP32 values."""
    found = []
    for name, D in {"hidden": sizes.hidden_size, "q_a": sizes.q_lora_rank, "kv": sizes.head_dim}.items():
        for x in ("bf16", "fp32"):
            block = triton.next_power_of_2(D)
            rows, warps = rows_and_warps(block, 4096)
            found.append(
                Build(
                    name=f"rmsnorm/{name}_{x}/{sizes.name}",
                    kernel=_rmsnorm_kernel,
                    signature={
                        "x_ptr": f"*{x}",
                        "weight_ptr": "*bf16",
                        "y_ptr": "*bf16",
                        "x_stride": "i32",
                        "num_rows": "i32",
                        "D": "i32",
                        "eps": "fp32",
                    },
                    constants={"WEIGHTED": True, "ROWS": rows, "BLOCK_D": block},
                    aligned=("x_ptr", "weight_ptr", "y_ptr", "x_stride", "D"),
                    options={"num_warps": warps, **EXACT},
                )
            )
    return found
