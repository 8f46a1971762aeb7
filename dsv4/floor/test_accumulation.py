"""How finely sums are kept: Hopper's FP8 sums against a simulation of how they are cut, a router's in FP32."""

import pytest
import torch

from dsv4.floor.accumulation import FP32, HOPPER_FP8_UNIT, accumulation_of
from dsv4.floor.dither import Dither
from dsv4.floor.model import FloorModel
from dsv4.floor.stages import FloorLayer
from dsv4.model.random_model import random_weights, small_config
from dsv4.plan import Plan
from kernels.formats import e4m3, fp8_block

BITS = 14  # kept of the largest addend
STEP = 32  # products a step


def cut(x, exponent):
    """Towards zero, to 14 bits of the largest."""
    unit = torch.ldexp(torch.ones_like(x), exponent - BITS)
    return torch.trunc(x / unit) * unit


def hopper_sum(products):
    """Sums [T] of products [T, K]: steps of 32, each addend and the running sum under the largest exponent."""
    total = torch.zeros(len(products), 1, dtype=torch.float64)
    for part in products.split(STEP, dim=1):
        addends = torch.cat((total, part), dim=1)
        exponent = torch.frexp(addends.abs().amax(1, keepdim=True)).exponent
        total = cut(addends, exponent).sum(1, keepdim=True)
    return total.squeeze(1)


@pytest.mark.parametrize("terms", [64, 192, 448])
def test_a_draw_is_as_far_as_a_simulated_sum(terms):
    generator = torch.Generator().manual_seed(terms)
    a, b = (
        e4m3.decode(e4m3.encode(100 * torch.randn(4096, terms, generator=generator))).double() for _ in "ab"
    )
    exact = (a * b).sum(1)
    simulated = (hopper_sum(a * b) - exact).square().mean().sqrt()
    sums = accumulation_of("kernel", (9, 0))
    drawn = (Dither(1)(exact[None], terms // sums.products, sums.fp8)[0] - exact).square().mean().sqrt()
    assert 1 / 1.5 < float(drawn / simulated) < 1.5


@pytest.mark.parametrize("blocks", [1, 4, 16])
def test_a_draw_is_as_far_as_simulated_blocks_that_are_added_in_fp32(blocks):
    """Products with FP8 matrices: each block of 128 columns is cut under its own sums."""
    generator = torch.Generator().manual_seed(blocks)
    a, b = (
        e4m3.decode(e4m3.encode(100 * torch.randn(4096, 128 * blocks, generator=generator))).double()
        for _ in "ab"
    )
    products = (a * b).unflatten(1, (blocks, 128))
    simulated = sum(hopper_sum(products[:, block]) for block in range(blocks)) - products.sum((1, 2))
    sums = accumulation_of("kernel", (9, 0))
    exact = products.sum((1, 2))
    drawn = Dither(1)(exact[None], fp8_block.GROUP // sums.products, sums.fp8)[0] - exact
    ratio = float(drawn.square().mean().sqrt() / simulated.square().mean().sqrt())
    assert 1 / 1.5 < ratio < 1.5


def test_only_kernels_on_hopper_keep_fewer_bits():
    assert accumulation_of("kernel", (9, 0)).fp8 == HOPPER_FP8_UNIT
    for kind, capability in (("ref", None), ("kernel", (10, 0)), ("kernel", None), ("ref", (9, 0))):
        assert accumulation_of(kind, capability) == FP32


@pytest.mark.parametrize("chosen", [2, 4, 6, 8])
def test_draws_of_expert_weights_have_the_size_of_an_fp32_routers_error(chosen):
    """Sum, quotient and product in FP32 err by what the draws say, within a factor of 1.5; one rounding is less."""
    generator = torch.Generator().manual_seed(chosen)
    scores = torch.rand(4000, 16, generator=generator) + 0.2
    ids = torch.rand(4000, 16, generator=generator).argsort(-1)[:, :chosen]
    config = small_config(n_routed_experts=16, num_experts_per_tok=chosen, routed_scaling_factor=1.3)
    weights = random_weights(small_config(), 0).layers[0]
    env = {"router_scores": scores, "expert_ids": ids}

    def stage(seed):
        layer = FloorLayer(0, weights, config, Plan(), Dither(seed))
        return layer.route_weights(env, None)["expert_weights"].double()

    kept = scores.gather(1, ids)
    total = kept[:, :1]
    for slot in range(1, chosen):
        total = total + kept[:, slot : slot + 1]
    in_fp32 = (kept / (total + 1e-20) * config.routed_scaling_factor).double()
    exact = stage(None)
    measured, drawn = ((one / exact - 1).square().mean().sqrt() for one in (in_fp32, stage(1)))
    single = (Dither(1)(exact, 1).float().double() / exact - 1).square().mean().sqrt()
    assert 1 / 1.5 < measured / drawn < 1.5
    assert single < drawn / 1.5


@pytest.mark.parametrize(("rounding", "unit"), [("plan", HOPPER_FP8_UNIT), ("none", FP32.fp8)])
def test_who_rounds_nothing_has_no_fp8_operand(rounding, unit):
    hopper, config = accumulation_of("kernel", (9, 0)), small_config()
    model = FloorModel(config, random_weights(config, 0), Plan(rounding=rounding), None, hopper)
    assert {layer.sums.fp8 for layer in model.stages} == {unit}
