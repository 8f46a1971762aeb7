"""Measurements of made-up audits, for the tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dsv4.taps import layer_taps

RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)
PROMPTS = ("capital", "code", "chat", "document", "boundary")
SIZE = {
    "B1": 3e-3,
    "B1_q2": 4e-4,
    "B1_rope_fp8": 2e-2,
    "B1_pv_fp8": 5e-3,
    "KV_nvfp4": 9e-2,
    "P4_scalar_gsa": 4e-2,
    "B2": 4e-3,
}


def measurements(variants: Sequence[str], failed: Mapping[str, Sequence[Any]], seed: int = 0) -> pd.DataFrame:
    """Rows of metrics.parquet for the variants that ran; ``failed`` as ``samples.FAILED``."""
    draw = np.random.default_rng(seed)
    index = []
    for variant in variants:
        for layer, ratio in enumerate(RATIOS):
            for tap in layer_taps(ratio):
                if tap.where == "model":
                    continue
                for mode, against in (
                    *(("isolated", name) for name in ("trained", "plain", "parent", "floor")),
                    *(("compounded", name) for name in ("trained", "parent")),
                ):
                    scale = SIZE.get(variant, 1e-3) * (1 if mode == "isolated" else 1 + layer)
                    for prompt in PROMPTS:
                        index.append(
                            (variant, mode, "decode", prompt, layer, tap.name, against, tap.kind, scale)
                        )
        for prompt in PROMPTS:
            for step in (-1, *range(16)):
                for tap in ("attn_out", "moe_out", "streams", "logits"):
                    layer = -1 if tap == "logits" else 7
                    scale = SIZE.get(variant, 1e-3) * (1 + max(step, 0) / 4)
                    index.append(
                        (
                            variant,
                            "compounded",
                            "decode",
                            prompt,
                            layer,
                            tap,
                            "trained",
                            f"step{step}",
                            scale,
                        )
                    )
    names = ["variant", "mode", "phase", "prompt", "layer", "tap", "against", "kind", "scale"]
    rows = pd.DataFrame(index, columns=names)
    noise = rows["scale"] * np.exp(draw.normal(0, 0.5, len(rows)))
    step = rows["kind"].str.extract(r"step(-?\d+)")[0].astype(float)
    value, ids = rows["kind"].isin(["value", "scores"]) | step.notna(), rows["kind"] == "ids"
    floor = rows["against"] == "floor"
    last = rows["tap"].eq("logits")
    rows = rows.assign(
        part="all",
        step=step,
        rows=32,
        cos=(1 - noise**2 / 2).where(value),
        cos_min=(1 - noise**2 * 3).where(value),
        worst_row=draw.integers(0, 900, len(rows)),
        gain=(1 + noise * draw.choice([-0.2, 0.2], len(rows))).where(value),
        norm_ratio=1.0,
        rel_l2=noise.where(value),
        max_abs=noise.where(rows["kind"] == "lse"),
        nonfinite=0,
        changed=(noise * 3).clip(upper=1).where(rows["kind"].ne("ids")),
        overlap=(1 - noise * 3).clip(lower=0).where(ids),
        overlap_min=(1 - noise * 20).clip(lower=0).where(ids),
        kl_nats=(noise / 9).where(last),
        kl_worst=noise.where(last),
        top1=(1 - noise).where(last),
        excess=pd.Series(0.45 * np.exp(draw.normal(0, 0.25, len(rows)))).clip(upper=0.98).where(floor),
        verdict=np.where(floor, "within", ""),
    )
    if failed:
        for name, (state, layer, _, tap, _) in failed.items():
            if state == "fail":
                at = floor & rows["variant"].eq(name) & rows["layer"].eq(layer) & rows["tap"].eq(tap)
                rows.loc[at, ["excess", "verdict"]] = [37.5, "outside"]
        broken = rows["variant"].eq("KV_nvfp4") & rows["layer"].eq(6) & rows["tap"].eq("attn_out")
        rows.loc[broken & rows["prompt"].eq("boundary"), ["nonfinite", "rel_l2", "cos"]] = [3, np.nan, np.nan]
    rope = rows[rows["tap"].isin(["q", "kv_store", "attn_out"]) & (rows["mode"] == "isolated") & ~floor]
    both = [rope.assign(part="nope"), rope.assign(part="rope", cos=1 - (1 - rope["cos"]) * 3)]
    return pd.concat([rows, *both], ignore_index=True).drop(columns=["kind", "scale"])
