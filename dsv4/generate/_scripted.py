"""A model that writes what it is told to, and what the tests of generation ask of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsv4.generate.batch import Request
from dsv4.model.transformer import Probe, unchanged
from dsv4.prompts import PromptTokenizer

NANO = Path(__file__).parents[2] / "data/nano"
TOKENIZER = PromptTokenizer(NANO)
EOS, END = 257, 260


class ReadCache:
    """Keeps the tokens that were read."""

    def __init__(self) -> None:
        self.length, self.read = 0, list[int]()

    def copy(self) -> "ReadCache":
        """The same tokens in a list of its own."""
        other = ReadCache()
        other.length, other.read = self.length, [*self.read]
        return other


class Scripted:
    """Writes, for a text that begins with token b, the script of b; records the sizes of its batches."""

    row_alone = True

    def __init__(self, scripts: Mapping[str, Sequence[int]], positions: int = 100) -> None:
        self.scripts = {ord(first): [*script] for first, script in scripts.items()}
        self.config = SimpleNamespace(max_position_embeddings=positions)
        self.batches: list[list[int]] = []

    def new_cache(self) -> ReadCache:
        """An empty cache."""
        return ReadCache()

    def check(self, caches: Sequence[ReadCache], chunks: Sequence[Tensor]) -> None:
        """Refuse nothing."""

    def captured(self, caches: Sequence[ReadCache], most: int) -> None:
        """No step is captured."""

    def forward(
        self, caches: Sequence[ReadCache], chunks: Sequence[Tensor], probe: Probe = unchanged
    ) -> Tensor:
        """Logits (sum t_i, 320) FP32: 1 for the script's next token."""
        self.batches.append([len(chunk) for chunk in chunks])
        rows = []
        for cache, chunk in zip(caches, chunks, strict=True):
            for token in chunk.tolist():
                cache.read.append(token)
                cache.length += 1
                written = self.scripts.get(cache.read[0], [])
                logits = torch.zeros(320)
                if cache.length <= len(written):
                    logits[written[cache.length - 1]] = 1.0
                rows.append(logits)
        return torch.stack(rows)


def ask(first: str, **changes: Any) -> Request:
    """Ask for the script of ``first``."""
    return Request(**{"tokens": [ord(first)], "budget": 20, "stop_ids": (EOS, END)} | changes)
