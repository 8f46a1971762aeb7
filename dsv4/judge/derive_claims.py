"""Measure the plan's claims about single ops, on inputs of no checkpoint, and write ``claims_ops.json``.

``python -m dsv4.judge.derive_claims``: mHC's weighted sum, RMSNorm and NVFP4 quantise, fused
(nothing stored between) and unfused (BF16 between), at T = 1, 8 and 128 rows of the plan's own
width; a 4-bit round trip of KV; the plan's scalar gsa; prompts prefilled in one batch against each alone.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from dsv4.judge.evidence import OPS_FILE
from dsv4.model import numerics
from dsv4.model.prefill import prefill
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan
from kernels.formats import bf16, fp8_block, nvfp4

SEED = 9
HIDDEN, STREAMS, NOPE = 7168, 4, 448
TOKENS = (1, 8, 128)
PROMPTS, CHUNK = (129, 3, 128, 5, 1, 40), 128  # tokens of each, and rows of a pass: one begins inside another


def _cos(x: Tensor, y: Tensor) -> float:
    x, y = x.double().flatten(), y.double().flatten()
    return float((x @ y) / (x.norm() * y.norm()))


def _rel(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def _norm(x: Tensor) -> Tensor:
    return (x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).float()


def mhc(tokens: int, generator: torch.Generator) -> dict[str, float]:
    """Fused against unfused, and against the exact norm, of ``tokens`` rows."""
    streams = torch.randn(tokens, STREAMS, HIDDEN, generator=generator)
    pre = torch.sigmoid(torch.randn(tokens, STREAMS, generator=generator))
    x = (streams.double() * pre.double()[..., None]).sum(1).float()
    exact, stored = _norm(x), bf16.round(_norm(bf16.round(x)))
    fused, unfused = nvfp4.round(exact), nvfp4.round(stored)
    gsa = nvfp4.row_gsa(exact), nvfp4.row_gsa(stored)
    return {
        f"mhc_fused_vs_unfused.T{tokens}": _cos(fused, unfused),
        f"mhc_fused_vs_exact.T{tokens}": _cos(fused, exact),
        f"gsa_difference.T{tokens}": float((gsa[0] - gsa[1]).abs().mean()),
    }


def round_trips(generator: torch.Generator) -> dict[str, float]:
    """One store of KV's nope part in 4 and in 8 bits."""
    kv = torch.randn(512, NOPE, generator=generator)
    return {
        "kv_fp4.one_minus_cos": 1 - _cos(nvfp4.round(kv), kv),
        "kv_fp4.rel_l2": _rel(nvfp4.round(kv), kv),
        "kv_fp8.one_minus_cos": 1 - _cos(fp8_block.round(kv, 64), kv),
        "kv_fp8.rel_l2": _rel(fp8_block.round(kv, 64), kv),
    }


def scalar_gsa(generator: torch.Generator) -> dict[str, float]:
    """128 normed rows under the launch's largest gsa: in the epilogue alone, and in the quantiser too."""
    rows = _norm(torch.randn(128, HIDDEN, generator=generator))
    gsa = nvfp4.row_gsa(rows)
    own, both = nvfp4.round(rows), nvfp4.round(rows, gsa.amax().expand(128, 1))
    undone = own * (gsa.amax() / gsa)
    return {
        "scalar_gsa.gain_mean": float((gsa.amax() / gsa).mean()),
        "scalar_gsa.gain_worst": float((gsa.amax() / gsa).max()),
        "scalar_gsa.rel_l2": _rel(undone, own),
        "launch_gsa.changed": float((own != both).float().mean()),
        "launch_gsa.rel_l2": _rel(both, own),
    }


def batched_prefill(generator: torch.Generator) -> dict[str, float]:
    """Logits that differ between a batch of prompts and each alone, after them and after a step on their caches."""
    sizes = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "sliding_window": 128, "index_topk": 40}
    config = small_config(**sizes)
    weights = random_weights(config, SEED)
    prompts = [torch.randint(config.vocab_size, (size,), generator=generator) for size in PROMPTS]
    found: dict[str, float] = {
        "batched_prefill.prompts": len(prompts),
        "batched_prefill.longest": max(PROMPTS),
        "batched_prefill.logits": 2 * len(prompts) * config.vocab_size,
    }
    for name, of in (("trained", numerics.trained(config)), ("B0_unfused", numerics.of_plan(Plan(), config))):
        model = Transformer(config, weights, of, page_size=8)
        alone = torch.cat([_read(model, [prompt]) for prompt in prompts])
        found[f"batched_prefill.{name}"] = int((_read(model, prompts) != alone).sum())
    return found


def _read(model: Transformer, prompts: list[Tensor]) -> Tensor:
    """Logits (B, 2 V) after each prompt and after one token more."""
    caches = [model.new_cache() for _ in prompts]
    last = prefill(model, caches, prompts, CHUNK)
    return torch.cat((last, model.forward(caches, [torch.tensor([7])] * len(prompts))), dim=1)


def derive(seed: int = SEED) -> dict[str, float]:
    """Every number, to four digits."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, float] = {}
    for tokens in TOKENS:
        values |= mhc(tokens, generator)
    values |= round_trips(generator) | scalar_gsa(generator) | batched_prefill(generator)
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def main() -> None:
    """Write the file beside this script."""
    content = {"device": "cpu", "seed": SEED, "script": "dsv4/judge/derive_claims.py", "values": derive()}
    Path(OPS_FILE).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
