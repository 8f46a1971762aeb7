"""A variant's dump from kernels: values as refs dump them, and what the numbers ran on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4 import config as configuration
from dsv4 import device
from dsv4.backend.conftest import PAGE, SIZES
from dsv4.backend.test_bound import assert_close, assert_drawn, drawn, normed_stores, requantised
from dsv4.dump import DumpReader
from dsv4.floor.accumulation import accumulation_of
from dsv4.judge.kernel_launches import wrong
from dsv4.judge.launches import Sizes
from dsv4.model.checkpoint import Checkpoint
from dsv4.model.random_model import random_weights, small_config
from dsv4.plan import flatten
from dsv4.prompts import Prompt
from dsv4.run.isolated import Reference
from dsv4.run.reference import write_trained
from dsv4.run.setup import Setup
from dsv4.run.variant import write_variant
from kernels.conftest import INTERPRETED

ROOT = Path(__file__).parents[2]
TOKENS = {"one": [3, 17, 29, 5, 8], "two": [11, 2, 30]}


def audit(folder: Path, backend: str) -> Setup:
    """Two short prompts on one CSA layer of random weights."""
    config = configuration.load(ROOT / "config.yaml")
    config = replace(config, checkpoint=ROOT / config.checkpoint, decode_steps=1, prefill_rows=2)
    config = replace(config, page_size=PAGE, backend=backend)
    sizes = small_config(**SIZES | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
    return Setup(
        config=config,
        results=folder,
        checkpoint=Checkpoint(config.checkpoint, sizes, random_weights(sizes, 2), {}),
        tokens=TOKENS,
        prompts={name: Prompt(id=name, kind="plain", text="") for name in TOKENS},
    )


def test_a_dump_of_kernels_is_one_of_refs_that_says_what_it_ran_on(tmp_path, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(device, "card", lambda: None)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, refs = audit(tmp_path, "kernel"), audit(tmp_path, "ref")
    write_trained(refs)
    rung = ours.config.ladder["B3"]
    alone = replace(rung, parent=None)
    write_variant(ours, alone)
    write_variant(refs, replace(alone, id="refs"))
    accumulation = accumulation_of("kernel", ours.backend.capability)
    for prompt in TOKENS:
        with (
            DumpReader(tmp_path / "variants" / "B3" / f"{prompt}.h5") as kernels,
            DumpReader(tmp_path / "variants" / "refs" / f"{prompt}.h5") as emulated,
        ):
            assert kernels.attrs["label"] == f"kernels on {device.resolve('kernel').name}"
            assert emulated.attrs["label"] == "emulated on cpu"
            names = Sizes.__annotations__
            sizes = Sizes(**{name: getattr(ours.checkpoint.config, name) for name in names})
            assert list(wrong(flatten(rung.plan), sizes, kernels.attrs["launches"])) == []
            assert kernels.attrs["exercised"].keys() == emulated.attrs["exercised"].keys()
            found: dict = {}
            for phase in ("prefill", "decode"):
                for layer in kernels.layers("isolated", phase):
                    assert kernels.taps("isolated", phase, layer) == emulated.taps("isolated", phase, layer)
                    for name in kernels.taps("isolated", phase, layer):
                        one, other = (
                            dump.get("isolated", phase, layer, name) for dump in (kernels, emulated)
                        )
                        assert one.dtype == other.dtype, name
                        assert one.shape == other.shape, name
                        found.setdefault((layer, name), []).append((one, other))
            taps = {
                key: [torch.from_numpy(np.concatenate(side)) for side in zip(*parts, strict=True)]
                for key, parts in found.items()
            }
            with DumpReader(tmp_path / "reference" / f"{prompt}.h5") as dump:
                reference = Reference(dump, ours.checkpoint.config)
                draws = drawn(
                    ours.checkpoint.config, ours.checkpoint.weights, reference, rung.plan, accumulation
                )
            inside = requantised(ours.checkpoint.weights)
            for (layer, name), (one, other) in taps.items():
                if (layer, name) in draws:
                    assert_drawn(name, one, other, draws[layer, name], inside.get(name))
                else:
                    normed = name in normed_stores(rung.plan)
                    assert_close(name, one, other, normed=normed, handful=0.05)  # of a few hundred elements


def test_auto_is_kernels_where_there_is_a_gpu_and_its_results_lie_apart(monkeypatch):
    card = device.Card(name="NVIDIA H200", capability=(9, 0))
    monkeypatch.setattr(device, "card", lambda: card)
    assert device.resolve("auto").kind == device.resolve("kernel").kind == "kernel"
    assert device.resolve("auto").suffix == "-nvidia_h200"
    assert device.resolve("ref").suffix == ""
    monkeypatch.setattr(device, "card", lambda: None)
    assert device.resolve("auto") == device.resolve("ref")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(device.NoDeviceError, match="no CUDA device"):
        device.resolve("kernel")
