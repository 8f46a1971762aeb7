"""NVFP4 for nano's weights: the fake quantiser that training uses, and the stored form.

A weight [out, in] is stored as three tensors: ``<name>`` uint8 [out, in / 2] (two E2M1 codes a byte,
the even index in the low nibble), ``<name>_scale`` float8_e4m3fn [out, in / 16] and ``<name>_scale_2``
float32, amax / 2688: a scalar, or [experts] for a stack of experts (one for each expert; gate and up
are one tensor). The value is ``code * scale * scale_2``.
"""

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from kernels.formats import nvfp4

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
NVFP4_NAMES = re.compile(
    r"self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.weight$"
    r"|mlp\.experts\.(gate_up|down)_proj$"
    r"|mlp\.shared_experts\.(gate|up|down)_proj\.weight$"
)
FP32_NAMES = re.compile(r"_hc\.|hc_head\.|norm\.weight$|sinks$|position_bias$|e_score_correction_bias$")


def power_below(x: Tensor) -> Tensor:
    """Return the largest power of two that is at most ``x`` (x >= 0, FP32), 0 for 0, from its bits."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Round FP32 ``x`` >= 0 to E4M3, to nearest even, at most 448; arithmetic only, no FP8 cast.

    ptxas 12.8 and 12.9 miscompile an FP8 cast down and up in one kernel, so a compiled graph has none.
    """
    step = power_below(x).clamp(min=2.0**-6) / 8
    return (torch.round(x / step) * step).clamp(max=E4M3_MAX)


def round_e2m1(x: Tensor) -> Tensor:
    """Round FP32 ``x`` to E2M1, to nearest, ties to the even code, saturating at 6."""
    step = power_below(x.abs()).clamp(1.0, 4.0) / 2
    return (torch.round(x / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 block scales [..., out, in / 16] in FP32 and the tensor scale [..., 1, 1]."""
    blocks = weight.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    gsa = amax.amax((-2, -1), keepdim=True) / (E2M1_MAX * E4M3_MAX)
    scale = round_e4m3(amax / E2M1_MAX / gsa.clamp(min=torch.finfo(torch.float32).tiny))
    return scale, gsa


def fake_quantise(weight: Tensor) -> Tensor:
    """Round FP32 [..., out, in] to what NVFP4 would store and return the values, in FP32.

    The codes and scales are those of :func:`pack`; the values may differ in the last bit of FP32,
    since here scale and tensor scale are multiplied first.
    """
    scale, gsa = scales(weight)
    step = (scale * gsa).unsqueeze(-1)
    blocks = weight.unflatten(-1, (-1, BLOCK))
    codes = torch.where(step > 0, round_e2m1(blocks / torch.where(step > 0, step, 1.0)), 0.0)
    return (codes * step).flatten(-2)


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes uint8 [..., out, in / 2], scale float8_e4m3fn, scale_2 float32) of an FP32 weight."""
    gsa = weight.abs().amax((-2, -1), keepdim=True) / (E2M1_MAX * E4M3_MAX)
    codes, scale, _ = nvfp4.quantise(weight, gsa)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed, scale.view(torch.float8_e4m3fn), gsa[..., 0, 0].contiguous()


def unpack(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """Return the FP32 values [..., out, in] of a packed weight."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return nvfp4.dequantise(codes, scale.view(torch.uint8), scale_2[..., None, None])


def stored(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors of a full-precision state_dict, on the CPU."""
    out = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        if NVFP4_NAMES.search(name):
            out[name], out[f"{name}_scale"], out[f"{name}_scale_2"] = pack(tensor.float())
        elif FP32_NAMES.search(name) or not tensor.is_floating_point():
            out[name] = tensor
        else:
            out[name] = tensor.to(torch.bfloat16)
    return out


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict for transformers' class, floating tensors in FP32, from the stored tensors."""
    out = {}
    for name, tensor in tensors.items():
        if re.sub(r"_scale(_2)?$", "", name) in tensors.keys() - {name}:
            continue
        if f"{name}_scale" in tensors:
            out[name] = unpack(tensor, tensors[f"{name}_scale"], tensors[f"{name}_scale_2"])
        else:
            out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out


def save(state: dict[str, Tensor], folder: Path) -> None:
    """Write ``folder/model.safetensors`` from a full-precision state_dict."""
    save_file(stored(state), folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> dict[str, Tensor]:
    """Read ``folder/model.safetensors`` as a state_dict for transformers' class."""
    return dequantised(load_file(folder / "model.safetensors"))
