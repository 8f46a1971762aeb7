"""Tokens a second: what is timed gives the tokens that generation gives, and the table says what was measured."""

import pytest
import torch

from dsv4.generate import speed
from dsv4.model import numerics
from dsv4.model.prefill import prefill
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan

PROMPTS = [torch.arange(3, 8), torch.arange(9, 11)]


@pytest.fixture(scope="module")
def model():
    config = small_config(seed=2)
    return Transformer(config, random_weights(config, seed=2), numerics.of_plan(Plan(), config))


def test_a_row_counts_each_way_as_often_and_leaves_the_first_run_out():
    calls = []

    def way(name, seconds):
        def run():
            calls.append(name)
            return seconds if calls.count(name) > 1 else 1e9

        return run

    row = speed.row("decode", 2, 100, {"eager": way("a", 2.0), "graph": way("b", 0.5)}, rounds=4)
    assert calls.count("a") == calls.count("b") == 5
    assert [row["ways"][name]["median"] for name in ("eager", "graph")] == [50.0, 200.0]


def test_prefill_reads_every_prompt_either_way(model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        speed, "prefill", lambda *given: seen.append([len(one) for one in given[2]]) or prefill(*given)
    )
    assert all(run() > 0 for run in speed.prefill_ways(model, PROMPTS).values())
    assert seen == [[5, 2], [5], [2]]


def test_decode_takes_its_steps_on_all_sequences(model, monkeypatch):
    sizes, forward = [], model.forward
    monkeypatch.setattr(
        model, "forward", lambda *given: sizes.append([len(c) for c in given[1]]) or forward(*given)
    )
    (name, run), *others = speed.decode_ways(model, None, PROMPTS, steps=3, rounds=1).items()
    assert (name, others) == ("eager", [])  # a graph needs a GPU
    assert run() > 0
    assert run() > 0
    assert sizes == [[5, 2], *[[1, 1]] * 6]  # the second run goes on behind the first


def test_the_table_names_device_versions_and_commit():
    rate = {"median": 1234.5, "q1": 1200.0, "q3": 1300.0, "min": 1.0, "n": 5}
    found = {
        "rung": "B3",
        "device": "NVIDIA H200",
        "backend": "kernel",
        "date": "2026-12-01",
        "commit": "0123456789",
        "versions": {"torch": "2.11.0"},
        "prompts": [34, 159],
        "rounds": 5,
        "command": "python -m dsv4.generate.speed --tokens 64",
    }
    ways = {"eager": rate, "CUDA graph": rate | {"median": 4938.0}}
    row = {"what": "decode", "batch": 64, "tokens": 8192, "ways": ways}
    assert "NVIDIA H200 (kernel), 2026-12-01, commit 0123456, torch 2.11.0" in speed.heading(found)
    assert "`python -m dsv4.generate.speed --tokens 64`" in speed.heading(found)
    lines = speed.table_lines(row).splitlines()
    assert len(lines) == 2
    assert "| 64 | 8192 | CUDA graph | 4938" in lines[1]
    assert "4.00x" in lines[1]
