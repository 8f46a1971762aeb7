"""Texts of a small random model with nano's tokenizer, as the text stage writes them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dsv4 import config as configuration
from dsv4.model.checkpoint import Checkpoint
from dsv4.model.random_model import random_weights, small_config
from dsv4.prompts import Prompt, PromptTokenizer
from dsv4.run.setup import Setup
from dsv4.run.text import write_text
from dsv4.run.text_reference import write_text_reference
from dsv4.text_dump import FILE, Text, TextReader

ROOT = Path(__file__).parents[2]
NANO = ROOT / "data/nano"
TOKENIZER = PromptTokenizer(NANO)
EOS, END = 257, 260
BUDGET = 12
PROMPTS = {
    "plain": Prompt(id="plain", kind="plain", text="def f"),
    "chat": Prompt(id="chat", kind="chat", turns=(("user", "Hi"),)),
    "later": Prompt(id="later", kind="chat", turns=(("user", "a"), ("assistant", "b"), ("user", "c"))),
}


def setup_at(folder: Path, prompts: dict[str, Prompt] = PROMPTS) -> Setup:
    """A setup of two layers and three short prompts, without texts."""
    config = configuration.load(ROOT / "config.yaml")
    config = replace(config, checkpoint=NANO, page_size=8, backend="ref", text_tokens=BUDGET)
    sizes = small_config(vocab_size=320, num_hidden_layers=2, compress_ratios=[4, 8], num_hash_layers=0)
    return Setup(
        config=config,
        results=folder,
        checkpoint=Checkpoint(NANO, sizes, random_weights(sizes, 0), {}),
        tokens={},
        prompts=prompts,
        texts={name: TOKENIZER.encode(prompt) for name, prompt in prompts.items()},
    )


def written(folder: Path) -> Setup:
    """A setup whose reference has texts, and B0_unfused."""
    torch.set_grad_enabled(False)
    found = setup_at(folder)
    write_text_reference(found)
    write_text(found, found.config.ladder["B0_unfused"])
    return found


def text_of(setup: Setup, variant: str) -> tuple[dict[str, Any], pa.Table]:
    """A rung's JSON and table."""
    folder = setup.results / "text"
    return json.loads((folder / f"{variant}.json").read_text()), pq.read_table(folder / f"{variant}.parquet")


def texts(setup: Setup) -> tuple[Mapping[str, Text], dict[str, np.ndarray]]:
    """The reference's texts, and their logits."""
    with TextReader(setup.results / FILE) as reader:
        return reader.texts, {name: reader.logits(name, slice(None)) for name in reader.texts}
