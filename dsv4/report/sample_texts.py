"""Texts of made-up audits, for the tests: forced and free texts, their judgement, and B5's verdict.

Tokens are the bytes of a text and a stop id, as data/nano's are. B0_unfused writes another word on
a near tie, B1 another line of code that then repeats early, B4_swiglu ends an answer as a document ends.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dsv4.generate.accounting import account
from dsv4.generate.stops import Kind, Stops
from dsv4.ladder import Variant
from dsv4.report.sample_metrics import SIZE

BUDGET = 576
NAMES = {257: "<|eos|>", 260: "<|end_of_turn|>"}
KIND: dict[str, Kind] = {"capital": "chat", "code": "plain", "chat": "second_turn", "opposites": "chat"}
STOPS = {
    kind: Stops(own, tuple(NAMES)) for kind, own in (("plain", 257), ("chat", 260), ("second_turn", 260))
}
PAIRS = (
    *("hot – cold", "big – small", "tall – short", "open – closed", "early – late", "full – empty"),
    *("light – dark", "wet – dry", "young – old", "near – far", "rich – poor", "strong – weak"),
    *("loud – quiet", "high – low", "thick – thin", "sweet – sour", "soft – hard", "first – last"),
    *("clean – dirty", "happy – sad", "front – back", "left – right", "begin – end", "true – false"),
    *("fast – slow", "heavy – light", "deep – shallow", "wide – narrow"),
)
OPPOSITES = "Here are opposites, one pair a line:\n\n" + "\n".join(f"- {pair}" for pair in PAIRS) + "\n"
BODY = (
    "        length += stop - start\n    return length\n\n\n"
    'def as_row(name, length):\n\t"""One row of <table id="t">, escaped."""\n'
    '\treturn "<td>%s</td><td>%d</td></script>" % (name, length)\n\n\n'
    "def gaps(intervals):\n    found = []\n    for start, stop in merge_intervals(intervals):\n"
)
LINE = "        found.append((start, stop))\n"
OTHER = "        if start > stop:\n            continue\n"
EARLY = "        found.append(start)\n"
REFERENCE = {
    "capital": "The capital of France is Paris.",
    "code": (BODY + OTHER + "        # each gap once 🙂\n" + LINE * 20),
    "chat": "The day after Friday is Saturday.",
    "opposites": OPPOSITES,
}
NEAR_TIE = OPPOSITES.replace("loud – quiet", "loud – silent")
REPEATS = BODY + EARLY * 20
SECONDS = {"forced": 1.4, "free": 22.8}
LETTERS = (
    ("newline", "\n"),
    ("space", " \t"),
    ("digit", "0123456789"),
    ("punctuation", ".,:;()[]{}<>=+-*/%\"'#_"),
)


def written(prompt: str, above: Sequence[str]) -> tuple[str, int | None]:
    """A rung's own text and the stop id after it; ``above``: the rungs it stands on and itself."""
    if prompt == "opposites":
        return NEAR_TIE, 260
    if prompt == "code":
        return (REPEATS if "B1" in above else REFERENCE[prompt]), None
    return REFERENCE[prompt], 257 if prompt == "capital" and "B4_swiglu" in above else 260


def told(prompt: str, text: str, stop: int | None) -> dict[str, Any]:
    """One text with its account, cut at the budget."""
    tokens = [*text.encode()][:BUDGET]
    text = bytes(tokens).decode(errors="replace")
    reason = "budget" if stop is None else "stop_id"
    kind = KIND[prompt]
    found = account([*tokens, *([] if stop is None else [stop])], reason, kind, STOPS[kind])
    return {
        "tokens": [*tokens, *([] if stop is None else [stop])],
        "text": text,
        "reason": reason,
        "stop": stop,
        "stop_name": None if stop is None else NAMES[stop],
        "own_stop": found.own_stop,
        "ran_past": found.ran_past,
        "length": found.length,
        "loop": asdict(found.loop) if found.loop else None,
        "distinct": {str(n): share for n, share in found.distinct.items()},
    }


def divergence(own: dict[str, Any], reference: dict[str, Any], prompt: str) -> dict[str, Any] | None:
    """First step at which two texts differ."""
    pairs = zip(own["tokens"], reference["tokens"], strict=False)
    for step, (token, other) in enumerate(pairs):
        if token != other:
            near = prompt == "opposites"
            margins = {"margin": 0.004, "reference_margin": 0.006} if near else {"margin": 0.8}
            there = {"step": step, "token": token, "reference_token": other, "near_tie": near}
            return {"reference_margin": 1.9} | margins | there
    return None


def document(variant: Variant, above: Sequence[str]) -> dict[str, Any]:
    """``text/<variant>.json``: leaves are forced only."""
    prompts = {}
    for prompt, kind in KIND.items():
        reference = told(prompt, REFERENCE[prompt], None if prompt == "code" else 260)
        own = told(prompt, *written(prompt, above)) if variant.spine else None
        prompts[prompt] = {"kind": kind, "prompt_tokens": 60, "budget": BUDGET, "reference": reference}
        prompts[prompt] |= {"own": own, "divergence": divergence(own, reference, prompt) if own else None}
    return {
        "schema": 1,
        "variant": variant.id,
        "parent": variant.parent,
        "label": "emulated on cpu",
        "device": "cpu",
        "backend": "ref",
        "forced_through": "prefill",
        "free": "decode" if variant.spine else None,
        "same_bits_as": "B0" if variant.id == "B1a" else None,
        "logit_rms": 0.004,
        "residual_absmax": [38.0, 44.0],
        "seconds": SECONDS if variant.spine else SECONDS | {"free": None},
        "tokens_per_second": 52.0 if variant.spine else None,
        "commit": "0b6ca0d4c1",
        "dirty": False,
        "plan": {},
        "prompts": prompts,
    }


def token_class(token: int) -> str:
    """Class of a token by its own text."""
    if token > 255:
        return "control"
    named = next((name for name, letters in LETTERS if chr(token) in letters), None)
    return named or ("letter" if chr(token).isascii() else "other")


def forced(variant: str, text: dict[str, Any]) -> pd.DataFrame:
    """``text/<variant>.parquet``: every position of the reference's texts."""
    draw, rows = np.random.default_rng(len(variant)), []
    for prompt, found in text["prompts"].items():
        for step, token in enumerate(found["reference"]["tokens"]):
            rows.append((prompt, found["kind"], step, token, token_class(token)))
    frame = pd.DataFrame(rows, columns=["prompt", "kind", "step", "token", "token_class"])
    size, count = SIZE.get(variant, 1e-3), len(frame)
    kl = size**2 * np.exp(draw.normal(0, 1.5, count)) * (1 + frame["step"] / 300)
    agreed = draw.random(count) > size
    return frame.astype({"step": "int32", "token": "int32"}).assign(
        kl_nats=kl,
        top1=agreed,
        top=np.where(agreed, frame["token"], 32).astype("int32"),
        nll=0.3 + kl,
        nll_trained=0.3,
        margin=draw.gamma(2, 2, count),
        margin_trained=draw.gamma(2, 2, count),
        residual_absmax=(40 + frame["step"] % 5).astype("float32"),
    )


def _share(rows: pd.DataFrame) -> dict[str, Any]:
    return {"kl_nats": rows["kl_nats"].mean(), "top1": rows["top1"].mean(), "n": len(rows), "not_finite": 0}


def judged(text: dict[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    """What a verdict says of a text, ``e2e.text``."""
    name, free = text["variant"], text["free"] is not None
    stops: dict[str, Counter[str]] = {}
    prompts = {}
    for prompt, found in text["prompts"].items():
        own, reference = found["own"], found["reference"]
        if own is None:
            continue
        stops.setdefault(found["kind"], Counter())[str(own["stop"] or own["reason"])] += 1
        prompts[prompt] = {
            **{key: own[key] for key in ("stop", "stop_name", "reason", "length", "ran_past")},
            "kind": found["kind"],
            "reference_length": reference["length"],
            "reference_reason": reference["reason"],
            "stopped_as_reference": (own["stop"], own["reason"]) == (reference["stop"], reference["reason"]),
            "onset": own["loop"] and own["loop"]["onset"],
            "reference_onset": reference["loop"] and reference["loop"]["onset"],
            "divergence_step": found["divergence"] and found["divergence"]["step"],
            "near_tie": found["divergence"] and found["divergence"]["near_tie"],
            "distinct_4": own["distinct"]["4"],
        }
    moved = name in ("B1", "KV_nvfp4")
    change = {"kl_change": 7.2e-6 if moved else 3e-8, "se": 6.1e-7, "blocks": 38, "moved": moved}
    return {
        "kl_nats": rows["kl_nats"].mean(),
        "kl_worst": rows["kl_nats"].max(),
        "top1": rows["top1"].mean(),
        "positions": len(rows),
        "not_finite": 0,
        "by_class": {str(key): _share(part) for key, part in rows.groupby("token_class")},
        "by_kind": {str(key): _share(part) for key, part in rows.groupby("kind")},
        "own": change if text["parent"] else None,
        "prompts": prompts if free else None,
        "stops": {kind: dict(count) for kind, count in stops.items()},
        "broken": False,
        "faults": [],
        "reasons": [f"text moved: its KL rises by 7.2e-06 nats against {text['parent']}'s"] if moved else [],
        "attribution": attribution(text) if moved else None,
    }


def attribution(text: dict[str, Any]) -> dict[str, Any]:
    """``text/attribution/<variant>.json``: one op of one layer carries the change."""
    op = "kv_store" if text["variant"] == "KV_nvfp4" else "attend"
    ops = [(op, 0.86), ("index_topk", 0.07), ("route", 0.02), ("moe", -0.001)]
    layers = [(op, 5, 0.61), (op, 4, 0.18), (op, 2, 0.04)]
    return {
        "schema": 1,
        "variant": text["variant"],
        "against": "trained",
        "prompts": list(text["prompts"]),
        "positions": 1218,
        "kl_nats": 9e-6,
        "backend": "ref",
        "ops": [{"op": name, "kl_without": 9e-6 * (1 - share), "returned": share} for name, share in ops],
        "layers": [
            {"op": name, "layer": layer, "kl_without": 9e-6 * (1 - share), "returned": share}
            for name, layer, share in layers
        ],
        "words": f"layer 5, {op}: 61% of the KL",
    }


RESIDUAL: dict[str, Any] = {
    "schema": 1,
    "verdict": "not_exercised",
    "words": "not exercised: max abs X is 41.8, and a BF16 ULP reaches 2 from 256 on: an FP32 residual can say nothing"
    " here; B1 repeats from token 267 of code on, the reference from 342 (Part A not applied)",
    "asked_by": [
        {"variant": name, "prompt": "code", "onset": 267, "reference_onset": 342} for name in ("B1", "B2")
    ],
    "parent": {"variant": "B4_head", "kl_nats": 9.1e-6, "onsets": {"code": 267}, "change": None},
    "rungs": {
        name: {
            "kl_nats": kl,
            "onsets": {"code": 267},
            "change": {"kl_change": kl - 9.1e-6, "se": 4e-7, "moved": False},
        }
        for name, kl in (("B5_all", 8.8e-6), ("B5_single", 9.0e-6))
    },
    "stopped": {},
    "cost": [
        {
            "layers": layers,
            "bytes_per_token": size,
            "buffers": 2,
            "persistent_bytes": 0,
            "bandwidth_bytes_per_step": 4 * size * layers,
            "by_rung": {"B5_all": 4 * size * layers, "B5_single": 4 * size},
        }
        for layers, size in ((43, 32768), (61, 57344))
    ],
    "by_layer": [
        {"layer": n, "absmax": 3.1 * 1.45**n, "ulp": 2.0 ** int(np.log2(3.1 * 1.45**n) - 7)} for n in range(8)
    ],
    "by_step": [{"step": n, "absmax": 38.0 + n % 7, "ulp": 0.25} for n in range(0, 64, 4)],
    "mixing": {
        "row_sum": [0.99991, 1.00012],
        "column_sum": [0.99999, 1.0],
        "spectral_norm_max": 1.0001,
        "non_expansive": True,
    },
}


def write(
    results: Path, rungs: Sequence[tuple[Variant, Sequence[str]]], verdicts: Sequence[dict[str, Any]]
) -> None:
    """Write all files of these rungs' texts and put their judgement into the verdicts.

    Parameters
    ----------
    rungs : each with the ids of the rungs it stands on, itself last.
    """
    folder, by_id = results / "text", {verdict["id"]: verdict for verdict in verdicts}
    (folder / "attribution").mkdir(parents=True)
    for variant, above in rungs:
        text = document(variant, above)
        rows = forced(variant.id, text)
        (folder / f"{variant.id}.json").write_text(json.dumps(text))
        rows.to_parquet(folder / f"{variant.id}.parquet")
        found = by_id[variant.id]["e2e"]["text"] = judged(text, rows)
        if found["attribution"]:
            (folder / "attribution" / f"{variant.id}.json").write_text(json.dumps(found["attribution"]))
    (results / "residual.json").write_text(json.dumps(RESIDUAL))
