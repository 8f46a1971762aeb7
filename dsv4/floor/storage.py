"""What the second opinion stores: quantised GEMM inputs, KV rows, index keys, from ``formats`` alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.floor.equations import walsh
from dsv4.plan import Plan
from kernels.formats import aligned_record, bf16, e2m1, e4m3, fp8_block, fp8_scaled, mxfp4, nvfp4
from kernels.formats.kv_record import ROPE, RecordLayout, rope_bytes


@dataclass(frozen=True)
class Stored:
    """A quantised GEMM input: ``exact`` (T, K) FP64 is codes times scales without another rounding."""

    exact: Tensor

    def dequantised(self) -> Tensor:
        """(T, K) FP32."""
        return self.exact.float()


def quantiser(weight_format: str) -> str:
    """Which of four ways a GEMM's input is stored; MXFP4 weights meet the E4M3 activations of FP8 ones."""
    return "fp8" if weight_format == "mxfp4" else weight_format


def quantised_input(x: Tensor, weight_format: str, norm_quant: str = "fused") -> Stored:
    """Store (T, K) FP32 in the format of the weight that reads it.

    ``norm_quant`` is the plan's: with ``fused_launch_gsa`` one gsa, the largest, makes all rows;
    with ``fused_scalar_gsa`` each row is made with its own and read back with the largest.
    """
    way = quantiser(weight_format)
    if way == "bf16":
        return Stored(bf16.round(x).double())
    if way == "fp8":
        return Stored(fp8_block.round(x, fp8_block.GROUP).double())
    if way == "fp32":
        return Stored(x.double())
    gsa = nvfp4.row_gsa(x)
    top = torch.full_like(gsa, float(gsa.max())) if gsa.numel() else gsa
    codes, scales, _ = nvfp4.quantise(x, top if norm_quant == "fused_launch_gsa" else gsa)
    if norm_quant in ("fused_launch_gsa", "fused_scalar_gsa"):
        gsa = top
    blocks = e4m3.decode(scales).double().repeat_interleave(16, dim=-1)
    return Stored(e2m1.decode(codes).double() * blocks * gsa.double())


def store_kv(x: Tensor, plan: Plan, nope: int) -> tuple[Tensor, Tensor]:
    """KV rows (T, nope + 64) FP32 in the plan's record: values as read back, and the bytes."""
    if plan.rounding == "none":
        return x, x.contiguous().view(torch.uint8)
    if plan.kv_format == "nvfp4":
        codes, scales, gsa = nvfp4.quantise(x[:, :nope])
        values = torch.cat((nvfp4.dequantise(codes, scales, gsa), bf16.round(x[:, nope:])), dim=-1)
        scale_bytes = torch.cat((scales, gsa.contiguous().view(torch.uint8)), dim=-1)
        return values, torch.cat((e2m1.pack(codes), rope_bytes(x[:, nope:]), scale_bytes), dim=-1)
    if plan.kv_record == "aligned":
        data, scale = aligned_record.encode(x)
        return aligned_record.decode(data, scale), torch.cat(
            (data, scale.contiguous().view(torch.uint8)), dim=-1
        )
    values = torch.cat((fp8_block.round(x[:, :nope], 64), bf16.round(x[:, nope:])), dim=-1)
    assert x.shape[-1] == nope + ROPE
    return values, torch.cat(RecordLayout(nope).encode(x), dim=-1)


def store_index_key(x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Index keys (C, D) FP32: stored values in the unrotated basis FP32, and in the scores' basis FP64."""
    if plan.rounding == "none":
        return x, x.double()
    if plan.index_score == "fp4":
        rotated = mxfp4.round(walsh(x.double()).float()).double()
        return walsh(rotated).float(), rotated
    codes, scale = fp8_scaled.quantise(x)
    exact = e4m3.decode(codes).double() * scale.double()
    return exact.float(), exact
