"""Checkpoints with matrices in FP8 and MXFP4 on kernels, beside the refs stage by stage on the same inputs."""

from collections import Counter

import pytest
import torch

from dsv4.backend.conftest import PAGE, SIZES, TOKENS, InMemory
from dsv4.backend.count import step_launches
from dsv4.backend.launches import withheld
from dsv4.backend.model import KernelTransformer
from dsv4.backend.paths import NoKernelError
from dsv4.backend.sizes import filled_cache
from dsv4.backend.step import DecodeStep
from dsv4.backend.test_backend import compare, forward
from dsv4.backend.test_bound import LADDER
from dsv4.judge.kernel_launches import QUANTISE, QUANTISE_FP8, words, wrong
from dsv4.judge.launches import Sizes
from dsv4.model.random_model import random_weights, small_config
from dsv4.plan import flatten
from kernels._check import assert_fault_seen
from kernels.formats import nvfp4
from kernels.fp8_quantise.kernel import quantise as quantise_fp8

# what groups of 128 divide; one CSA layer
WIDE = {"hidden_size": 128, "q_lora_rank": 128, "o_lora_rank": 128, "moe_intermediate_size": 128}
CONFIG = small_config(**SIZES | WIDE | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
ALL = ("proj", "experts")
STORED = {
    "fp8": dict.fromkeys(ALL, "fp8"),
    "released": dict.fromkeys(ALL, "fp8") | {"mlp.experts": "mxfp4"},
    "mxfp4": dict.fromkeys(ALL, "mxfp4"),
    # readers of one input in two formats: kv of q_a's, the shared expert of the routed ones'
    "mixed": {
        "kv_proj": "fp8",
        "q_b_proj": "mxfp4",
        "o_a_proj": "fp8",
        "shared_experts": "fp8",
        "down_proj": "nvfp4",
    },
}
MATRICES = frozenset(
    ("attn_quant", "q_a", "q_quant", "q_b", "kv", "attn_proj", "moe_quant", "experts", "shared", "attn_mhc")
)
OF_MATRICES = {"attn_in_q", "qr", "qr_q", "q", "kv", "attn_proj", "moe_in_q", "routed", "shared"}


def small_of(stored):
    weights = random_weights(CONFIG, 0, formats=STORED[stored])
    return CONFIG, weights, InMemory(CONFIG, weights)


@pytest.mark.parametrize(
    ("stored", "rung"),
    [
        ("fp8", "B4_head"),
        ("released", "B0_unfused"),
        ("mxfp4", "P4_scalar_gsa"),
        ("mixed", "B0_unfused"),
        ("mixed", "B4_head"),
    ],
)
def test_every_stage_with_a_matrix_equals_the_refs(stored, rung, accelerator):
    taps = compare(small_of(stored), LADDER[rung].plan, accelerator, MATRICES)
    assert {name for _, name in taps} >= OF_MATRICES


@pytest.mark.parametrize(
    "rung", ["B0_unfused", "P4", "P4_launch_gsa", "P5", "B0", "KV_nvfp4", "B3", "B4_head"]
)
@pytest.mark.parametrize("stored", STORED)
def test_the_plans_kernels_are_launched(stored, rung):
    plan, weights = LADDER[rung].plan, random_weights(CONFIG, 0, formats=STORED[stored])
    sizes = Sizes(**{name: getattr(CONFIG, name) for name in Sizes.__annotations__})
    with withheld():
        model = KernelTransformer(CONFIG, weights, plan, device="meta")
        found = step_launches(DecodeStep(model, [filled_cache(model, 30)], 1))
    launched = sum(found.values(), Counter())
    assert model.requantised == (2 if stored == "mixed" else 0)
    assert [words(*one) for one in wrong(flatten(plan), sizes, launched, model.requantised)] == []
    if stored == "mixed":
        known = (0, 1, 3) if rung != "P4_launch_gsa" else ()  # torch makes them there
        for other in known:  # neither of the second readers' inputs may be left out, none is made twice
            assert list(wrong(flatten(plan), sizes, launched, other))
    else:
        quantisers = {QUANTISE, QUANTISE_FP8} & set(launched)
        assert quantisers == {QUANTISE_FP8}


def test_a_sequence_sees_neither_its_batch_nor_its_chunks(accelerator):
    weights = random_weights(CONFIG, 0, formats=STORED["released"])
    model = KernelTransformer(CONFIG, weights, LADDER["B4_head"].plan, page_size=PAGE, device=accelerator)
    long, short = TOKENS[:3], TOKENS[4:6]
    both, _ = forward(model, [[long, short]])
    for row, chunks in ((2, [[long[:2]], [long[2:]]]), (4, [[short]])):
        alone, _ = forward(model, chunks)
        torch.testing.assert_close(both[row : row + 1], alone[-1:], rtol=0, atol=0)


def test_rows_in_another_format_are_seen(accelerator, monkeypatch):
    monkeypatch.setattr(
        "dsv4.backend.products.quantise_fp8", lambda x: quantise_fp8(nvfp4.round(x.float()).contiguous())
    )
    assert_fault_seen(lambda: compare(small_of("fp8"), LADDER["B0_unfused"].plan, accelerator, MATRICES))


def test_weights_are_the_checkpoints_own_bytes(accelerator):
    _, weights, _ = small_of("released")
    layer = weights.layers[0]
    native = KernelTransformer(CONFIG, weights, LADDER["B0"].plan, device=accelerator).stages[0].native
    codes, scales = layer.o_a.stored
    assert torch.equal(native.o_a.codes.cpu().view(torch.uint8).flatten(0, 1), codes.view(torch.uint8))
    assert torch.equal(native.o_a.scales.cpu().flatten(0, 1), scales)
    assert torch.equal(native.experts_down.codes.cpu(), layer.experts_down.stored[0])
    assert native.shared.codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("formats", "sizes", "said"),
    [
        ({"q_b_proj": "bf16"}, {}, "layer 0, q_b stored as bf16: expected nvfp4 or fp8 or mxfp4"),
        ({"experts.down_proj": "fp8"}, {}, "experts_gate_up stored as nvfp4 and experts_down as fp8"),
        ({"o_a_proj": "fp8"}, {"o_lora_rank": 64}, "o_a stored as fp8 with o_lora_rank = 64"),
    ],
)
def test_formats_that_no_kernel_joins_are_refused_by_name(formats, sizes, said, accelerator):
    config = small_config(**SIZES | WIDE | sizes)
    weights = random_weights(config, 0, formats=formats)
    with pytest.raises(NoKernelError, match=said):
        KernelTransformer(config, weights, LADDER["B0"].plan, device=accelerator)
