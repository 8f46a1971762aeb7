"""Clamped SwiGLU, Triton; the contract is :func:`kernels.swiglu.ref.swiglu` with gate and up side by side."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT
from kernels.rmsnorm.kernel import FLOATS


@triton.jit
def exponential(x):
    """e^x of FP32 up to 88, within 3 ulp: the product with log2(e) in two terms, as 2^x shifts its error up."""
    product = x * 1.4426950216293335
    rest = tl.fma(x, 1.4426950216293335, -product) + x * 1.925963033500011e-08
    power = tl.exp2(product)
    return tl.fma(power, rest * 0.6931471824645996, power)


@triton.jit
def swiglu_of(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in FP32; a NaN stays.

    A gate under -88 gives under 1e-34 x up, where the ref gives less still.
    """
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    fall = exponential(tl.minimum(-gate, 88.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.div_rn(gate, 1.0 + fall) * up


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, x_stride, F, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * x_stride + col, col < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + F + col, col < F, other=0.0).to(tl.float32)
    y = swiglu_of(gate, up, limit)
    tl.store(y_ptr + row * F + col, y.to(y_ptr.dtype.element_ty), col < F)


def swiglu(
    gate_up: Tensor, *, limit: float, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Gate a row's second half by its first; see :func:`kernels.swiglu.ref.swiglu`.

    Parameters
    ----------
    gate_up : (T, 2 F) BF16 or FP32
        Gate first. Rows may be strided.
    limit : float
        ``swiglu_limit``.
    dtype : torch.dtype
        BF16 or FP32: how the result is stored, if ``out`` is not given.
    out : (T, F) contiguous, optional

    Returns
    -------
    (T, F) of ``dtype``
        Within 8 ulp of the value before it is stored, for gates from -80 on.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; 2 F is odd.
    """
    check_option("swiglu", FLOATS, dtype=dtype)
    T, F = check_halves("swiglu", gate_up)
    check("swiglu", dense=["out"], device=gate_up.device, out=(out, f"{T} {F}", FLOATS))
    y = torch.empty(T, F, dtype=dtype, device=gate_up.device) if out is None else out
    if T and F:
        block = min(1024, triton.next_power_of_2(F))
        grid = (T, triton.cdiv(F, block))
        _swiglu_kernel[grid](gate_up, y, gate_up.stride(0), F, limit, BLOCK=block, num_warps=4, **EXACT)
    return y


def check_halves(op: str, gate_up: Tensor) -> tuple[int, int]:
    """T and F of rows of two halves."""
    T, width = check(op, gate_up=(gate_up, "T Z", FLOATS)).values()
    if width % 2:
        raise ValueError(f"{op}: gate_up of shape {tuple(gate_up.shape)} has no two halves")
    return T, width // 2


def builds(sizes: Sizes) -> list[Build]:
    """Between an expert's products, on the unfused path."""
    return [
        Build(
            name=f"swiglu/expert/{sizes.name}",
            kernel=_swiglu_kernel,
            signature={"x_ptr": "*bf16", "y_ptr": "*bf16", "x_stride": "i32", "F": "i32", "limit": "fp32"},
            constants={"BLOCK": 1024},
            aligned=("x_ptr", "y_ptr", "x_stride", "F"),
            options={"num_warps": 4, **EXACT},
        )
    ]
