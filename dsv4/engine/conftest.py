"""A tiny audit on a checkpoint of every layer kind, whose ladder has engines."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4 import config as configuration
from dsv4.engine.spec import parse_engine
from dsv4.judge.gate import gate
from dsv4.judge.measure import measure, write
from dsv4.ladder import Ladder
from dsv4.model.checkpoint import load
from dsv4.model.random_model import SMALL, random_tensors, small_config
from dsv4.prompts import Prompt
from dsv4.run.conftest import _one_thread
from dsv4.run.floor import write_floors
from dsv4.run.reference import write_plain, write_trained
from dsv4.run.setup import Setup
from dsv4.run.variant import write_variant

__all__ = ["_one_thread"]

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(__file__).parent / "examples"
SIZES = {"compress_ratios": [0, 0, 4, 8]}  # hash-routed and score-routed window layers, CSA, HCA
STORES = [
    "attn_in_q",
    "qr_q",
    "moe_in_q",
    "kv_store",
    "kv_bytes",
]  # an engine without narrow formats has none
HF = [sys.executable, "-m", "dsv4.engine.examples.transformers_engine"]
HF_MISSING = [*STORES, "comp_store", "comp_bytes", "index_k_store", "attn_pre", "moe_pre", "lse"]
CPP_MISSING = [*STORES, "compounded/*/*", "*/2/*", "*/3/*", "*/model/*"]


@pytest.fixture(scope="session")
def window_layer(tmp_path_factory):
    """The C++ example, compiled."""
    binary = tmp_path_factory.mktemp("build") / "window_layer"
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["c++", *flags, "-o", binary, EXAMPLES / "window_layer.cpp"], check=True)
    return binary


def audit(folder, engines, rungs):
    """Setup whose ladder stands on ``Exact``, with references, and Exact's dump and floor."""
    checkpoint = folder / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(SMALL | SIZES))
    stored = {name: value.contiguous() for name, value in random_tensors(small_config(**SIZES), 0).items()}
    save_file(stored, checkpoint / "model.safetensors")
    base = configuration.load(ROOT / "config.yaml")
    generator = torch.Generator().manual_seed(1)
    tokens = {
        name: torch.randint(64, (size,), generator=generator).tolist() for name, size in LENGTHS.items()
    }
    setup = Setup(
        config=replace(
            base, checkpoint=checkpoint, decode_steps=3, prefill_rows=6, page_size=8, backend="ref"
        ),
        results=folder / "results",
        checkpoint=load(checkpoint),
        tokens=tokens,
        prompts={name: Prompt(id=name, kind="plain", text="") for name in tokens},
    )
    setup = with_rungs(setup, engines, rungs)
    write_trained(setup)
    write_plain(setup)
    exact = setup.config.ladder["Exact"]
    write_variant(setup, exact)
    write_floors(setup, exact)
    (setup.results / "gates").mkdir()
    (setup.results / "gates" / "Exact.json").write_text(json.dumps({"id": "Exact", "status": "pass"}))
    return setup


LENGTHS = {"one": 31, "two": 22}


def with_rungs(setup, engines, rungs):
    """The same audit with these engines and rungs above ``Exact``."""
    engines = {name: parse_engine(name, content) for name, content in engines.items()}
    bottom = {"Exact": {"set": {"rounding": "none"}, "spine": True, "why": "no rounding"}}
    above = {name: {"parent": "Exact", "why": "an engine"} | rung for name, rung in rungs.items()}
    return replace(
        setup, config=replace(setup.config, ladder=Ladder(bottom | above, engines), engines=engines)
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Audit without engines; see :func:`with_rungs`."""
    return audit(tmp_path_factory.mktemp("tiny"), {}, {})


def verdict(setup, name, confirm=None):
    """Floor, measurements and verdict of a rung whose dump is there."""
    write_floors(setup, setup.config.ladder[name])
    table, notes = measure(setup.results, setup.config.ladder, name, setup.tokens)
    (setup.results / "metrics").mkdir(exist_ok=True)
    write(setup.results / "metrics" / f"{name}.parquet", table, notes)
    return gate(setup.results, setup.config, name, confirm)
