"""Test support: a made-up run's texts, as the text stages write them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa

from dsv4.config import Config
from dsv4.files import write_json, write_parquet
from dsv4.generate.repetition import distinct
from dsv4.plan import flatten
from dsv4.stored import publish

STOP, OTHER_STOP, BUDGET = 7, 8, 576
# prompt -> kind, tokens without the stop id, whether the reference stops
PROMPTS = {
    "capital": ("chat", 33, True),
    "code": ("plain", BUDGET, False),
    "chat": ("second_turn", 60, True),
    "opposites": ("chat", 540, True),
}
CLASSES = ("letter", "space", "punctuation")


def continuation(name: str) -> np.ndarray:
    """The reference's tokens of a prompt; 10..49, so that none is a stop id."""
    _, length, stops = PROMPTS[name]
    tokens = 10 + np.random.default_rng([ord(c) for c in name]).integers(0, 40, length)
    return np.append(tokens, STOP).astype(np.int32) if stops else tokens.astype(np.int32)


def generation(tokens: Sequence[int] | np.ndarray, reason: str = "stop_id", **more: object) -> dict[str, Any]:
    """A text of the account."""
    tokens, stopped = [int(token) for token in tokens], reason == "stop_id"
    written = tokens[:-1] if stopped else tokens
    found: dict[str, Any] = {"tokens": tokens, "text": "...", "reason": reason, "own_stop": stopped}
    found |= {"stop": tokens[-1] if stopped else None, "stop_name": "<end>" if stopped else None}
    found |= {"ran_past": None, "length": len(written), "loop": None}
    return found | {"distinct": {str(n): distinct(written, n) for n in (1, 2, 4)}} | more


def of_reference(name: str) -> dict[str, Any]:
    """The reference's own text."""
    return generation(continuation(name), "stop_id" if PROMPTS[name][2] else "budget")


class Texts:
    """Text files of a made-up run."""

    def __init__(self, results: Path, config: Config) -> None:
        self.results, self.config, self.folder = results, config, results / "text"
        write_json(results / "checkpoint.json", {"sha256": "c" * 8})
        self.reference()

    def reference(self, **attrs: object) -> Path:
        """Write ``trained.h5``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "trained.h5"
        temporary = path.with_name(".trained.h5.tmp")
        with h5py.File(temporary, "w") as file:
            file.attrs.update({"schema": 1, "kind": "text", "checkpoint": "c" * 8} | attrs)
            for name, (kind, _, stops) in PROMPTS.items():
                tokens = continuation(name)
                group = file.create_group(name)
                group.attrs.update({"kind": kind, "reason": "stop_id" if stops else "budget"})
                group["tokens"] = tokens
                group["logits"] = np.zeros((len(tokens), 4), np.float32)
        publish(temporary, path)
        return path

    def table(self, kl: float = 1e-3, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
        """Rows of a rung that agrees with the reference everywhere."""
        rng, frames = np.random.default_rng(seed), []
        for name, (kind, *_) in PROMPTS.items():
            tokens = continuation(name)
            size = len(tokens)
            frame = pd.DataFrame({"prompt": name, "kind": kind, "step": np.arange(size, dtype=np.int32)})
            frame["token"] = frame["top"] = tokens
            frame["token_class"] = np.where(tokens < 10, "control", np.array(CLASSES)[tokens % 3])
            frame["kl_nats"] = kl + noise * rng.standard_normal(size)
            frame["top1"] = True
            frame["nll"] = frame["nll_trained"] = 0.5
            frame["margin"] = frame["margin_trained"] = 6.0
            frame["residual_absmax"] = np.float32(80.0) + frame["step"].astype(np.float32) % 7
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def rung(
        self,
        name: str,
        table: pd.DataFrame | None = None,
        own: Mapping[str, Any] | None = None,
        divergence: Mapping[str, Any] | None = None,
        free: bool = True,
        **head: object,
    ) -> Self:
        """Write a rung's two files; ``own`` and ``divergence`` by prompt, the reference's text where they give none."""
        variant = self.config.ladder[name]
        prompts = {
            prompt: {
                "kind": kind,
                "prompt_tokens": 12,
                "budget": BUDGET,
                "reference": of_reference(prompt),
                "own": (own or {}).get(prompt, of_reference(prompt)) if free else None,
                "divergence": (divergence or {}).get(prompt),
            }
            for prompt, (kind, *_) in PROMPTS.items()
        }
        account: dict[str, Any] = {"schema": 1, "variant": name, "parent": variant.parent}
        account |= {"label": "made up", "device": "cpu", "backend": "ref"}
        account |= {"forced_through": "prefill", "free": "decode" if free else None}
        account |= {"seconds": {"forced": 1.0, "free": 2.0 if free else None}, "tokens_per_second": 9.0}
        account |= {"commit": "abc", "dirty": False, "plan": flatten(variant.plan), "prompts": prompts}
        account["residual_absmax"] = [80.0, 86.0]
        write_json(self.folder / f"{name}.json", account | head)
        frame = self.table() if table is None else table
        write_parquet(self.folder / f"{name}.parquet", pa.Table.from_pandas(frame, preserve_index=False))
        return self


def diverged(step: int, margin: float = 0.01, near: bool = True) -> dict[str, Any]:
    """A divergence of the account."""
    return {
        "step": step,
        "token": 1,
        "reference_token": 2,
        "margin": margin,
        "reference_margin": margin,
        "near_tie": near,
    }
