"""Batched prefill is absent, or gives what each prompt alone gives; the guard says so, and what is stored how."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsv4.config import load
from dsv4.engine.job import Ask
from dsv4.engine.spec import EngineError
from dsv4.engine.test_answer import MISSING, answered, asked
from dsv4.engine.variant import ask_engine
from dsv4.judge.guard import COMPARED, guard
from dsv4.judge.measure import Notes

pytestmark = pytest.mark.xdist_group("engine")

LADDER = load(Path(__file__).parents[2] / "config.yaml").ladder
LOGITS_ONLY = [*MISSING[:-1], "compounded/[0-3]/*", "compounded/*/hidden"]


def ones(prompt, put):
    put("model", {"logits": np.ones((len(prompt["rows"]), 64), np.float32)})


def of_batch(size):
    return lambda prompts: [
        np.full((sum(row < prompt["prompt_tokens"] for row in prompt["rows"]), 64), size, np.float32)
        for prompt in prompts
    ]


@pytest.mark.parametrize(("size", "rel_l2"), [(1.0, 0.0), (1.001, 0.001), (1.25, 0.25)])
def test_a_batch_must_give_what_each_prompt_alone_gives(tiny, size, rel_l2):
    options = {"missing": LOGITS_ONLY, "run": ones, "run_batch": of_batch(size), "batched_prefill": "prefill"}
    found, _ = answered(tiny, **options)
    batched = found["guard"]["batched_prefill"]
    assert (batched["entry_point"], batched["bit_equal"]) == ("prefill", size == 1.0)
    assert batched["rel_l2"] == pytest.approx(rel_l2, rel=1e-3)
    said = [
        reason for reason in found["reasons"] if reason.startswith("batched prefill (prefill) of one and two")
    ]
    assert len(said) == (rel_l2 > 2**-8)


def test_a_batched_prefill_that_is_declared_must_be_shown(tiny):
    setup, start = asked(tiny, missing=LOGITS_ONLY, run=ones, batched_prefill="prefill")
    engine, rung = setup.config.engines["echo"], setup.config.ladder["Echo"]
    with pytest.raises(
        EngineError, match="declares batched_prefill = 'prefill', but batched/one/model/logits is missing"
    ):
        ask_engine(setup, engine, rung, Ask(), start)
    setup, start = asked(tiny, run_batch=of_batch(1.0), batched_prefill="prefill")
    with pytest.raises(EngineError, match="is judged by compounded/one/model/logits, which it does not give"):
        ask_engine(setup, engine, rung, Ask(), start)


def test_the_guard_counts_the_stored_formats_as_found(tmp_path):
    formats = {f"model.layers.0.mlp.experts.{name}": "mxfp4" for name in ("gate_up_proj", "down_proj")}
    formats |= {"model.layers.0.mlp.shared_experts.up_proj.weight": "bf16", "model.norm.weight": "fp32"}
    formats |= {"model.layers.0.self_attn.q_a_proj.weight": "fp8", "model.layers.0.self_attn.sinks": "fp32"}
    (tmp_path / "checkpoint.json").write_text(json.dumps({"formats": formats}))
    found = guard(tmp_path, Notes(labels={"backend": "engine"}), LADDER["B3"])
    assert found == {"moe": {"mxfp4": 2, "bf16": 1}, "linears": {"fp8": 1}, "batched_prefill": None}


@pytest.mark.parametrize(
    ("backend", "rung", "compared"),
    [
        ("ref", LADDER["B3"], "bit for bit by its tests"),
        ("kernel", LADDER["B3"], COMPARED["kernel"]),
        ("ref", LADDER["P4_scalar_gsa"], "no: norm_quant = fused_scalar_gsa ties a row to its launch, .*"),
        ("kernel", LADDER["P4_launch_gsa"], "no: norm_quant = fused_launch_gsa ties a row to its launch, .*"),
        ("ref", replace(LADDER["B3"], commit="HEAD"), "not looked at: the code is a commit's"),
        ("kernel", replace(LADDER["B3"], commit="HEAD"), "not looked at: the code is a commit's"),
    ],
)
def test_the_guard_says_of_the_own_model_what_its_tests_hold(tmp_path, backend, rung, compared):
    (tmp_path / "checkpoint.json").write_text('{"formats": {}}')
    found = guard(tmp_path, Notes(labels={"backend": backend}), rung)["batched_prefill"]
    assert re.fullmatch(compared, found["compared"])
    module, name = found["entry_point"].rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))
