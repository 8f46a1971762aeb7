"""Products of a layer's quantised inputs with its matrices, each in the format that the checkpoint stores it in.

A matrix in NVFP4 reads NVFP4 rows; one in FP8 or MXFP4 reads FP8 rows (:data:`kernels.linear.ref.READS`).
"""

from typing import Any

import torch
from torch import Tensor

from kernels.fp8_quantise.kernel import quantise as quantise_fp8
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.grouped_ffn.fp8_kernel import fp8_grouped_ffn
from kernels.grouped_ffn.kernel import grouped_ffn
from kernels.linear import fp8_kernel
from kernels.linear import kernel as nvfp4_kernel
from kernels.linear.fp8_product_kernel import StoredWeight
from kernels.linear.kernel import Nvfp4Weight
from kernels.nvfp4_quantise.kernel import quantise as quantise_nvfp4
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.rmsnorm_quantise_nvfp4.ref import Form, Rows

Native = Nvfp4Weight | StoredWeight
TYPES: dict[Form, type] = {"nvfp4": Nvfp4Rows, "fp8": Fp8Rows}


def reads(weight: Native) -> Form:
    """Form of the rows that a matrix is multiplied with."""
    return "nvfp4" if isinstance(weight, Nvfp4Weight) else "fp8"


def quantised(x: Tensor, form: Form) -> Rows:
    """Rows (T, K) BF16 or FP32 in a form, by the quantiser alone."""
    return quantise_nvfp4(x) if form == "nvfp4" else quantise_fp8(x)


def linear(x: Any, weight: Any) -> Tensor:
    """(T, K) rows by a matrix (N, K): (T, N) BF16."""
    return nvfp4_kernel.nvfp4_linear(x, weight) if _is_nvfp4(weight) else fp8_kernel.fp8_linear(x, weight)


def grouped(x: Any, weight: Any) -> Tensor:
    """(T, G K) rows by a matrix a group (G, N, K): (T, G N) BF16."""
    run = nvfp4_kernel.grouped_linear if _is_nvfp4(weight) else fp8_kernel.fp8_grouped_linear
    return run(x, weight)


def stacked(x: Any, weight: Any, dtype: torch.dtype) -> Tensor:
    """(T, K) rows by each matrix of (G, N, K): (T, G N) of ``dtype``."""
    run = nvfp4_kernel.stacked_linear if _is_nvfp4(weight) else fp8_kernel.fp8_stacked_linear
    return run(x, weight, dtype=dtype)


def experts(
    x: Any, ids: Tensor, weights: Tensor, gate_up: Any, down: Any, *, limit: float, stored: torch.dtype
) -> Tensor:
    """Weighted sum (T, D) BF16 of the chosen experts; see :func:`kernels.grouped_ffn.kernel.grouped_ffn`."""
    run: Any = grouped_ffn if _is_nvfp4(gate_up) else fp8_grouped_ffn
    return run(x, ids, weights, gate_up, down, limit=limit, stored=stored)


def _is_nvfp4(weight: Any) -> bool:
    return isinstance(weight, Nvfp4Weight)
