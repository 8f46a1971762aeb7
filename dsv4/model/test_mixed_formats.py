"""Checkpoints whose matrices read one input but are stored in different formats, in every combination."""

from collections import Counter
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dsv4.floor.dither import Dither
from dsv4.floor.stages import FloorLayer
from dsv4.model import numerics
from dsv4.model.cache import Batch, next_batch
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.stages import LayerStages
from dsv4.model.transformer import Transformer
from dsv4.model.weights import LayerWeights
from dsv4.plan import Plan, change
from dsv4.run.floor import distance
from kernels.linear.ref import READS, Activation, Weight, WeightFormat, linear, quantise_activation

FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
PAIRS = list(product(FORMATS, FORMATS))
# Sizes that FP8's groups of 128 divide, one layer that is window-only: what is under test is in every layer.
CONFIG = small_config(
    hidden_size=128,
    q_lora_rank=128,
    o_lora_rank=64,
    moe_intermediate_size=128,
    num_hidden_layers=1,
    compress_ratios=[0],
    num_hash_layers=0,
)
TOKENS = torch.arange(24) * 7 % CONFIG.vocab_size
PLANS = [Plan(), change(Plan(), {"norm_quant": "fused"}), change(Plan(), {"norm_quant": "fused_scalar_gsa"})]


def weights_of(first: WeightFormat, second: WeightFormat):
    """q_a and the routed experts in one format; kv and the shared expert in the other."""
    formats = {"q_a_proj": first, "self_attn.kv_proj": second, "mlp.experts": first, "shared_experts": second}
    return random_weights(CONFIG, 0, formats=formats)


def written(weights, plan: Plan) -> dict[str, Any]:
    """Everything that layer 0 writes in a free run."""
    found: dict[str, Any] = {}

    def probe(layer: int | str, name: str, value: Any) -> Any:
        if layer == 0:
            found[name] = value
        return value

    model = Transformer(CONFIG, weights, numerics.of_plan(plan, CONFIG))
    model.forward([model.new_cache()], [TOKENS], probe)
    return found


def batch() -> Batch:
    model = Transformer(CONFIG, weights_of("bf16", "bf16"), numerics.plain(CONFIG))
    return next_batch([model.new_cache()], [TOKENS])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.norm_quant)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_matrix_reads_its_input_in_the_format_that_it_asks_for(first, second, plan):
    weights, num = weights_of(first, second), numerics.of_plan(plan, CONFIG)
    layer, found = weights.layers[0], written(weights, plan)
    assert (layer.q_a.format, layer.kv.format, layer.shared_down.format) == (first, second, second)

    def read(name: str, weight: Weight) -> Activation:
        return quantise_activation(found[name], weight.format, gsa=num.gsa)

    for name, weight in (("attn_in", layer.q_a), ("moe_in", layer.experts_gate_up)):
        assert same(
            found[f"{name}_q"].dequantised(), read(name, weight).dequantised()
        )  # the tap: its first reader
    kv = REFS.rmsnorm(
        linear(read("attn_in", layer.kv), layer.kv, out=num.gemm),
        layer.kv_norm,
        eps=CONFIG.rms_norm_eps,
        out=num.kv_norm,
    )
    stages = LayerStages(0, layer, CONFIG, num, REFS)
    assert same(found["kv"], REFS.rope(kv, *stages.cos_sin(torch.arange(len(TOKENS))), out=num.kv_rope))
    shared = layer.shared_gate, layer.shared_up, layer.shared_down
    x = read("moe_in", layer.shared_gate)
    assert same(found["shared"], REFS.dense_ffn(x, *shared, limit=CONFIG.swiglu_limit, at=num.ffn))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_an_input_is_quantised_once_for_each_format_that_reads_it(first, second):
    counts: Counter[str] = Counter()
    env = written(weights := weights_of(first, second), Plan())

    def counting(x: Tensor, weight_format: WeightFormat, **how: Any) -> Activation:
        counts.update(name for name in ("attn_in", "moe_in") if x is env[name])
        return quantise_activation(x, weight_format, **how)

    ops = type(REFS)(quantise_activation=counting)
    stages = LayerStages(0, weights.layers[0], CONFIG, numerics.of_plan(Plan(), CONFIG), ops)
    for stage in ("attn_quant", "q_a", "kv", "moe_quant", "experts", "shared"):
        stages.run(stage, env, batch())
    assert set(counts.values()) == {len({READS[first], READS[second]})}


def test_fp4_experts_and_fp8_linears_share_one_quantised_input():
    """As the released checkpoints store them: the shared expert reads the very codes of the tap."""
    env = written(weights := weights_of("mxfp4", "fp8"), Plan())
    stages = LayerStages(0, weights.layers[0], CONFIG, numerics.of_plan(Plan(), CONFIG), REFS)
    env["moe_in"] = torch.full_like(env["moe_in"], torch.nan)
    assert same(stages.run("shared", env, batch())["shared"], env["shared"])


def both(layer: LayerWeights, plan: Plan, env: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """What the model's stages and the floor's write, each from the same inputs and its own codes."""
    ours = LayerStages(0, layer, CONFIG, numerics.of_plan(plan, CONFIG), REFS)
    theirs = FloorLayer(0, layer, CONFIG, plan, Dither(None))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    one, other = dict(env), dict(env)
    for stage in ("attn_quant", "q_a", "kv", "moe_quant", "experts", "shared"):
        for name, value in ours.run(stage, one, batch()).items():
            again = theirs.run(stage, other, batch())[name]
            if name.endswith("_q"):
                one[name], other[name] = value, again
                value, again = value.dequantised(), again.dequantised()
            found[name] = value, again
    return found


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.norm_quant)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_floor_reads_every_combination_alike(first, second, plan):
    weights = weights_of(first, second)
    for name, (one, other) in both(weights.layers[0], plan, written(weights, plan)).items():
        off = distance(one.numpy(), other.numpy(), "value")
        assert off["draw_changed"] < 1e-3 or off["draw_worst"] <= 2.0**-21, (name, off)


@pytest.mark.parametrize("second", [kind for kind in FORMATS if READS[kind] != "fp8"])
def test_reading_the_first_readers_codes_is_not_agreement(second):
    """The comparison above can fail: codes of the wrong format are far from the floor's."""
    weights = weights_of("fp8", second)
    env = written(weights, Plan())
    wrong = linear(env["attn_in_q"], weights.layers[0].kv)
    right = linear(quantise_activation(env["attn_in"], second), weights.layers[0].kv)
    assert distance(wrong.numpy(), right.numpy(), "value")["draw_worst"] > 1e-3
