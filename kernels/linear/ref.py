"""Linear layers: stored weights, quantised activations, the product; see :func:`linear`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kernels.formats import bf16, fp8_block, nvfp4
from kernels.matmul.ref import Slices, matmul, product, slices
from kernels.rounding import Round, exact

WeightFormat = Literal["nvfp4", "mxfp4", "fp8", "bf16", "fp32"]
ActivationFormat = Literal["nvfp4", "fp8", "bf16", "fp32"]
Gsa = Literal["row", "launch", "undone_by_launch"]

# What a GEMM's input is stored in, by the format of its weight. MXFP4 weights meet E4M3 activations of one scale
# per 128 (vLLM, deepseek_v4/quant_config, and published copies of DeepSeek's inference code; read 2026-11), so that
# the released FP4 experts read what the FP8 linears read.
READS: dict[WeightFormat, ActivationFormat] = {
    "nvfp4": "nvfp4",
    "mxfp4": "fp8",
    "fp8": "fp8",
    "bf16": "bf16",
    "fp32": "fp32",
}
GROUPS: dict[ActivationFormat, int] = {
    "nvfp4": nvfp4.GROUP,
    "fp8": fp8_block.GROUP,
    "bf16": 1,
    "fp32": 1,
}  # values a scale


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A stored matrix, ready to multiply from the right.

    Attributes
    ----------
    values : (..., K, N) FP64
        What the codes and their block scales stand for, transposed.
    scale : () or (...,) FP64
        Per-tensor (per-expert) scale that the GEMM applies in its epilogue; 1 but for NVFP4.
    format : how the checkpoint stores it; activations follow it (:data:`READS`).
    stored : its bytes as they lie in the checkpoint, (..., N, K) first; what kernels read. NVFP4: packed codes,
        scale codes (both uint8) and per-tensor scales; FP8: codes (E4M3) and FP32 scales of squares; MXFP4: packed
        codes and UE8M0 scale bytes (both uint8); BF16 and FP32: the matrix.
    """

    values: Tensor
    scale: Tensor
    format: WeightFormat
    stored: tuple[Tensor, ...] = ()

    @property
    def reads(self) -> ActivationFormat:
        """Format of the activations that it is multiplied with."""
        return READS[self.format]

    @cached_property
    def slices(self) -> Slices:
        """The values cut for exact products, once."""
        return slices(self.values, dim=-2)

    def __getitem__(self, expert: int) -> "Weight":
        """One expert of a stack."""
        return self._experts[expert]

    @cached_property
    def _experts(self) -> list["Weight"]:
        pairs = zip(self.values, self.scale, strict=True)
        return [Weight(values=values, scale=scale, format=self.format) for values, scale in pairs]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What a GEMM reads: values and the row scale that its epilogue undoes.

    Attributes
    ----------
    values : (..., K) FP32
        Codes times block scales, without ``row_scale``.
    row_scale : (..., 1) FP32 or None
        NVFP4's gsa.
    narrow : bool
        Values have at most 9 significant bits (see :func:`kernels.matmul.ref.matmul`).
    """

    values: Tensor
    row_scale: Tensor | None = None
    narrow: bool = False

    def dequantised(self) -> Tensor:
        """(..., K) FP32, what the codes stand for."""
        return self.values if self.row_scale is None else self.values * self.row_scale

    @staticmethod
    def cat(parts: "Sequence[Activation]") -> "Activation":
        """Rows of several activations of one format, one after the other."""
        scales = [part.row_scale for part in parts if part.row_scale is not None]
        return Activation(
            values=torch.cat([part.values for part in parts]),
            row_scale=torch.cat(scales) if scales else None,
            narrow=all(part.narrow for part in parts),
        )

    def __getitem__(self, rows: Tensor | slice) -> "Activation":
        """Chosen rows."""
        scale = None if self.row_scale is None else self.row_scale[rows]
        return Activation(values=self.values[rows], row_scale=scale, narrow=self.narrow)


def quantise_activation(
    x: Tensor, weight_format: WeightFormat, *, gsa: Gsa = "row", enabled: bool = True
) -> Activation:
    """Store a GEMM's input in the format that its weight asks for.

    Parameters
    ----------
    x : (T, K) FP32
    weight_format : of the weight that will be multiplied.
    gsa : "row", "launch" or "undone_by_launch"
        NVFP4: one gsa a row; the maximum over all rows of the launch, which ties a row to its
        batch; or codes by the row's gsa that the GEMM undoes with that maximum (the plan's
        scalar gsa), which scales each row by maximum / its own.
    enabled : bool
        False: the equations; ``x`` passes as it is.

    Returns
    -------
    Activation
    """
    reads = READS[weight_format]
    if not enabled or reads == "fp32":
        return Activation(values=x)
    if reads == "bf16":
        return Activation(values=bf16.round(x), narrow=True)
    if reads == "fp8":
        return Activation(values=fp8_block.round(x, GROUPS[reads]), narrow=True)
    row_gsa = nvfp4.row_gsa(x)
    largest = row_gsa.amax().expand_as(row_gsa) if row_gsa.numel() else row_gsa
    codes, scales, used = nvfp4.quantise(x, largest if gsa == "launch" else row_gsa)
    undone = used if gsa == "row" else largest
    return Activation(values=nvfp4.scaled_values(codes, scales), row_scale=undone, narrow=True)


def linear(x: Activation, weight: Weight, *, out: Round = exact) -> Tensor:
    """``x @ W`` in FP64, both scales undone in the epilogue, rounded once to FP32, then ``out``.

    Parameters
    ----------
    x : Activation, (T, K)
    weight : Weight, (K, N)
    out : Round
        The GEMM's store.

    Returns
    -------
    (T, N) FP32
    """
    wide = _product(x.values, x, weight) * weight.scale
    if x.row_scale is not None:
        wide = wide * x.row_scale.double()
    return out(wide.float())


def grouped_linear(x: Activation, weight: Weight, *, out: Round = exact) -> Tensor:
    """Block-diagonal product: group g of the row meets matrix g (o_a of the output projection).

    Parameters
    ----------
    x : Activation, (T, G * K)
    weight : Weight, (G, K, N)
        Its scale may be one for all, or one a group.
    out : Round
        The GEMM's store.

    Returns
    -------
    (T, G * N) FP32
    """
    groups = weight.values.shape[0]
    by_group = x.values.unflatten(-1, (groups, -1)).transpose(0, 1)  # [G, T, K]
    wide = _product(by_group, x, weight) * weight.scale.view(-1, 1, 1)
    wide = wide.transpose(0, 1).flatten(1)
    if x.row_scale is not None:
        wide = wide * x.row_scale.double()
    return out(wide.float())


def _product(values: Tensor, x: Activation, weight: Weight) -> Tensor:
    """``values @ W`` in FP64, exact (see :mod:`kernels.matmul.ref`) without cutting the weight anew."""
    if x.narrow and weight.format != "fp32":
        return matmul(values, weight.values, narrow=True)
    left = slices(values, dim=-1)
    return product(left, weight.slices) * left.unit * weight.slices.unit


def plain_weight(matrix: Tensor, weight_format: WeightFormat) -> Weight:
    """Wrap a dequantised matrix of the checkpoint: (..., N, K) floating -> Weight (..., K, N), scale 1."""
    scale = torch.ones(matrix.shape[:-2], dtype=torch.float64, device=matrix.device)
    values = matrix.double().transpose(-1, -2).contiguous()
    stored = (matrix,) if weight_format in ("bf16", "fp32") else ()
    return Weight(values=values, scale=scale, format=weight_format, stored=stored)
