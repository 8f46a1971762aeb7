"""Every rung on kernels beside the refs, stage by stage on the same inputs; batches, chunks, faults, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.backend.conftest import PAGE, ROOT, SIZES, TOKENS, InMemory
from dsv4.backend.model import KernelTransformer
from dsv4.backend.paths import NoKernelError
from dsv4.backend.test_bound import (
    LADDER,
    STORED,
    assert_close,
    assert_drawn,
    drawn,
    isolated,
    normed_stores,
    requantised,
)
from dsv4.backend.values import Fused, on_cpu
from dsv4.floor.accumulation import accumulation_of
from dsv4.judge.claims_by_field import claimed
from dsv4.judge.kernel_launches import words, wrong
from dsv4.judge.launches import Sizes
from dsv4.model import numerics
from dsv4.model.checkpoint import load
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.plan import difference, flatten, unflatten
from dsv4.run.rows import Rows
from dsv4.taps import BY_NAME

BOTTOM = next(iter(LADDER))
TOP = LADDER["B4_head"]
RUNGS = [rung for rung in LADDER if rung.parent]


def kernels(small, plan, device):
    config, weights, _ = small
    return KernelTransformer(config, weights, plan, page_size=PAGE, device=device)


def compare(small, plan, device, stages=None):
    config, weights, _ = small
    refs = Transformer(config, weights, numerics.of_plan(plan, config), page_size=PAGE)
    ours = isolated(*small, kernels(small, plan, device), stages)
    card = torch.cuda.get_device_capability() if device == "cuda" else None
    draws, normed = drawn(*small, plan, accumulation_of("kernel", card)), normed_stores(plan)
    inside = requantised(weights)
    for key, value in isolated(*small, refs, stages).items():
        if key in ours and key in draws:
            assert_drawn(key[1], ours[key], value, draws[key], inside.get(key[1]))
        elif key in ours:
            assert_close(key[1], ours[key], value, normed=key[1] in normed)
    return ours


def one_layer(plan, device):
    """A CSA layer alone."""
    config = small_config(**SIZES | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
    return KernelTransformer(config, random_weights(config, 1), plan, page_size=PAGE, device=device)


def assert_launches(model):
    """All rows of a batch in one launch a layer, as often as the judge expects of the plan."""
    sizes = Sizes(**{name: getattr(model.config, name) for name in Sizes.__annotations__})
    assert [
        words(*found) for found in wrong(flatten(model.plan), sizes, model.launches, model.requantised)
    ] == []


def forward(model, chunks, probe=None, caches=None):
    """Logits of each sequence after its chunks, one call a chunk; and the caches."""
    caches = caches or [model.new_cache() for _ in chunks[0]]
    for step in chunks:
        logits = model.forward(caches, list(step), probe or (lambda layer, name, value: value))
    return logits, caches


def test_every_stage_of_the_lowest_rung_equals_the_refs(small, accelerator):
    taps = compare(small, LADDER[BOTTOM.id].plan, accelerator)
    assert {name for _, name in taps} == set(BY_NAME)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.id)
def test_the_stages_that_a_rung_changes_equal_the_refs(small, accelerator, rung):
    stages = claimed(difference(LADDER[rung.parent].plan, rung.plan))
    counting = {"attend": "compress", "index_score": "index_k"}  # refs count entries as they close windows
    taps = compare(
        small, rung.plan, accelerator, stages | {counting[stage] for stage in stages & counting.keys()}
    )
    assert stages <= {BY_NAME[name].stage for _, name in taps}


@pytest.mark.gpu
@pytest.mark.parametrize("rung", [rung for rung in LADDER if rung.spine], ids=lambda rung: rung.id)
def test_nano_equals_the_refs_on_a_gpu(nano, rung):
    compare(nano, rung.plan, "cuda")


@pytest.fixture(scope="module")
def nano():
    """The trained checkpoint with a text that passes its window, its top-k and an HCA window; 40 judged rows."""
    checkpoint = load(ROOT / "data" / "nano")
    text = (ROOT / "data" / "nano" / "heldout.txt").read_bytes()[:300]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = Rows(prompt=290, prefill=np.arange(0, 290, 9), decode=np.arange(290, 300))
    return (
        checkpoint.config,
        checkpoint.weights,
        InMemory(checkpoint.config, checkpoint.weights, tokens, rows),
    )


def test_what_is_fused_has_the_bits_of_the_unfused_kernels(small, accelerator):
    """A probe that hands on equal values in other tensors takes every fused result away."""
    model, fusions = kernels(small, TOP.plan, accelerator), []
    take = Fused.take

    def counting(self, name, value):
        found = take(self, name, value)
        fusions.append((name, found is not None))
        return found

    def copied(layer, name, value):
        return value if name.endswith("_closed") or name in STORED else on_cpu(value).clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fused, "take", counting)
        whole, _ = forward(model, [[TOKENS[:5]]])
        used, fusions[:] = {name for name, found in fusions if found}, []
        apart, _ = forward(model, [[TOKENS[:5]]], copied)
    assert used >= {"attn_in", "moe_in", "qr", "q", "kv", "index_q", "index_k", "expert_ids"}
    assert not any(found for _, found in fusions)
    torch.testing.assert_close(whole, apart, rtol=0, atol=0)


def test_a_sequence_sees_neither_its_batch_nor_its_chunks(small, accelerator):
    """Up to 16 rows a row's sums are in one order, whatever stands beside it."""
    model = one_layer(TOP.plan, accelerator)
    long, short, more = TOKENS[:5], TOKENS[4:6], TOKENS[9:10]
    both, caches = forward(model, [[long, short], [more, more]])
    assert_launches(model)
    for row, chunks in ((0, [[long], [more]]), (1, [[short], [more]]), (0, [[long[:2]], [long[2:]], [more]])):
        alone, _ = forward(model, chunks)
        torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=0)
    first, second = caches[0].layers[0].window.table
    assert first < 0 <= second  # six rows: the last three are on the second page of four


@pytest.mark.parametrize("rung", ["B0_unfused", "KV_nvfp4", "B2_fp4"])
def test_the_plans_kernels_are_seen_to_run(accelerator, rung):
    model = one_layer(LADDER[rung].plan, accelerator)
    forward(model, [[TOKENS[:4]], [TOKENS[4:5]]])
    assert_launches(model)


def test_a_changed_value_reaches_every_reader(small, accelerator):
    """The fault's value is quantised, not the rows that were made beside the right one."""
    model = kernels(small, TOP.plan, accelerator)
    seen = {}

    def faulty(layer, name, value):
        seen[layer, name] = value
        return value * 1.5 if (layer, name) == (0, "attn_in") else value

    forward(model, [[TOKENS[:2]]], faulty)
    want, got = on_cpu(seen[0, "attn_in"]) * 1.5, on_cpu(seen[0, "attn_in_q"])
    assert float((got - want).norm()) < 0.15 * float(want.norm())


def test_a_value_written_to_in_place_is_another_value():
    fused, value = Fused(), torch.ones(3)
    fused.keep("x", value, "made beside it")
    value.mul_(2)
    assert fused.take("x", value) is None
    fused.keep("x", value, "made beside it")
    assert fused.take("x", value.clone()) is None
    fused.keep("x", value, "made beside it")
    assert fused.take("x", value) == "made beside it"
    assert fused.take("x", value) is None  # once


def test_swapped_refs_are_not_ignored(small, accelerator):
    model = kernels(small, TOP.plan, accelerator)
    stages = model.stages[0]
    stages.ops = replace(stages.ops, index_logits=lambda *_: None)
    with pytest.raises(RuntimeError, match="which kernels do not run"):
        forward(model, [[TOKENS[:1]]])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mhc_quant": "fused"}, "norm_quant = unfused, mhc_quant = fused"),
        ({"q_format": "fp8"}, "kv_read = gather_bf16, q_format = fp8"),
        ({"kv_read": "in_place", "rope_format": "fp8"}, "q_format = bf16, rope_format = fp8"),
        ({"kv_read": "in_place", "kv_record": "aligned"}, "kv_record = aligned"),
        ({"kv_format": "nvfp4", "kv_norm": "fused"}, "kv_format = nvfp4, kv_norm = fused"),
        ({"kv_format": "nvfp4", "kv_read": "in_place"}, "kv_read = in_place, kv_format = nvfp4"),
    ],
)
def test_a_plan_without_kernels_is_refused_by_field_and_value(small, accelerator, values, named):
    with pytest.raises(NoKernelError, match=named):
        kernels(small, unflatten(values), accelerator)


def test_sizes_and_stored_formats_without_kernels_are_refused_by_name(small, accelerator):
    config, weights, _ = small
    with pytest.raises(NoKernelError, match="head_dim = 128"):
        KernelTransformer(small_config(), weights, TOP.plan, device=accelerator)
    stored = random_weights(config, 0, formats={"q_b_proj": "bf16"})
    with pytest.raises(NoKernelError, match="layer 0, q_b stored as bf16: expected nvfp4 or fp8 or mxfp4"):
        KernelTransformer(config, stored, TOP.plan, device=accelerator)


def test_weights_are_the_checkpoints_own_bytes(small, accelerator):
    _, weights, _ = small
    layer = kernels(small, TOP.plan, accelerator).stages[1]
    assert torch.equal(layer.native.q_b.codes.cpu(), weights.layers[1].q_b.stored[0])
    assert torch.equal(layer.native.o_a.codes.cpu().flatten(0, 1), weights.layers[1].o_a.stored[0])
    assert layer.native.index_q_b.matrix.dtype == torch.float32  # as this checkpoint stores it
    assert layer.native.compressor.kv.matrix.dtype == torch.float32
