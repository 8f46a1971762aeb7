"""What a fused quantiser gives, in the plan's figures and in those that a cosine hides; see :func:`figures`."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import e2m1, nvfp4
from kernels.nvfp4_quantise.ref import Nvfp4Rows


class Figures(NamedTuple):
    """Of fused rows against the unfused kernels' and against the values that neither stored.

    Attributes
    ----------
    cos_unfused : cosine of all values with the unfused kernels'.
    cos_true, cos_torch : with the true values: ours, and torch's NVFP4 of those.
    row_cos_off : largest difference of a row's two from each other.
    gain_least, gain_most : of the rows: least-squares factor from the true values to ours.
    gain_off : largest difference of a row's gain from torch's.
    gsa_off : largest relative difference of a row's gsa from the true values'.
    codes, scales : shares of FP4 codes and of scale bytes that differ from the unfused kernels'.
    codes_torch, scales_torch : the same from torch's NVFP4 of the true values.
    """

    cos_unfused: float
    cos_true: float
    cos_torch: float
    row_cos_off: float
    gain_least: float
    gain_most: float
    gain_off: float
    gsa_off: float
    codes: float
    scales: float
    codes_torch: float
    scales_torch: float

    def meet_the_plan(self) -> bool:
        """Cosine 0.999 or more with the unfused kernels, and with the true values within 1e-4 of torch's; gsa 2e-6."""
        near = abs(self.cos_true - self.cos_torch) <= 1e-4
        return self.cos_unfused >= 0.999 and near and self.gsa_off <= 2e-6


def cosines_and_gains(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, FP64: cosine, and the least-squares factor that takes ``want`` to ``got``."""
    got, want = got.double(), want.double()
    dot = (got * want).sum(-1)
    return dot / (got.norm(dim=-1) * want.norm(dim=-1)), dot / want.square().sum(-1)


def changed(got: Nvfp4Rows, want: Nvfp4Rows) -> tuple[Tensor, Tensor]:
    """Which codes (T, D) and which scale bytes (T, D / 16) differ, on the CPU."""
    codes = e2m1.unpack(got.codes.cpu()) != e2m1.unpack(want.codes.cpu())
    return codes, got.scales.cpu() != want.scales.cpu()


def figures(got: Nvfp4Rows, unfused: Nvfp4Rows, true: Tensor) -> Figures:
    """Compare fused rows with the unfused kernels' and with the values that they stand for.

    Parameters
    ----------
    got, unfused : Nvfp4Rows of (T, D), on any device
    true : (T, D) floating, on the CPU
        What an exact norm gives.

    Returns
    -------
    Figures
    """
    made, before = got.values().cpu(), unfused.values().cpu()
    codes, scales, gsa = nvfp4.quantise(true)
    ideal = Nvfp4Rows(e2m1.pack(codes), scales, gsa.squeeze(-1))
    row_cos, gain = cosines_and_gains(made, true)
    torch_row_cos, torch_gain = cosines_and_gains(ideal.values(), true)

    def whole(x: Tensor, y: Tensor) -> float:
        return float(cosines_and_gains(x.flatten(), y.flatten())[0])

    return Figures(
        whole(made, before),
        whole(made, true),
        whole(ideal.values(), true),
        float((row_cos - torch_row_cos).abs().max()),
        float(gain.min()),
        float(gain.max()),
        float((gain - torch_gain).abs().max()),
        float(((got.gsa.cpu() - ideal.gsa).abs() / ideal.gsa).max()),
        *(float(differs.double().mean()) for rows in (unfused, ideal) for differs in changed(got, rows)),
    )


def on(x: Tensor, device: torch.device) -> Tensor:
    """``x`` as BF16 there: what a model's kernels read."""
    return x.bfloat16().to(device)
