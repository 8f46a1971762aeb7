"""Experts against a loop over tokens, independence of batch and of experts not chosen, each rounding point."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    Spy,
    assert_bitwise,
    assert_differs,
    assert_nearest,
    assert_rows_alone,
    assert_stored_once,
    assert_threads_agree,
    draw,
    to_bf16,
    to_fp8,
    to_nvfp4,
)
from kernels.formats import bf16, nvfp4
from kernels.grouped_ffn.ref import EQUATIONS, FfnRounding, dense_ffn, grouped_ffn
from kernels.linear.ref import Weight, plain_weight, quantise_activation

E, D, F, K = 5, 128, 128, 2
LIMIT = 1.0
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16", "fp32")


def stack(weight_format, n, k, seed):
    """A stack of experts as a checkpoint gives it: NVFP4 with a scale an expert, else plain values."""
    matrix = draw(E, n, k, seed=seed)
    if weight_format != "nvfp4":
        return plain_weight(matrix if weight_format == "fp32" else bf16.round(matrix / 8), weight_format)
    scale = matrix.abs().amax((1, 2), keepdim=True) / 2688 * torch.tensor([1.0, 2, 0.5, 1, 3])[:, None, None]
    codes, scales, _ = nvfp4.quantise(matrix, scale)
    values = nvfp4.scaled_values(codes, scales).double().transpose(1, 2).contiguous()
    return Weight(values=values, scale=scale.flatten().double() / 8, format="nvfp4")


def experts(weight_format, seed=0):
    return stack(weight_format, 2 * F, D, seed), stack(weight_format, D, F, seed + 1)


def case(T, weight_format="nvfp4", seed=2, enabled=True):
    """Quantised rows, distinct ascending experts (expert 3 is never chosen), weights."""
    rng = np.random.default_rng([seed, T])
    ids = [sorted(rng.choice([0, 1, 2, 4], K, replace=False)) for _ in range(T)]
    ids = torch.from_numpy(np.array(ids, dtype=np.int64).reshape(T, K))
    size = 10.0 ** draw(T, 1, seed=seed + 2).clamp(-2, 1)  # some rows reach the clamp, some do not
    x = quantise_activation(draw(T, D, seed=seed) * size, weight_format, enabled=enabled)
    return x, ids, draw(T, K, seed=seed + 1).abs()


def same(x):
    return x


def swiglu(gate, up):
    gate = np.minimum(gate.astype(np.float64), LIMIT)
    return (gate / (1 + np.exp(-gate)) * np.clip(up.astype(np.float64), -LIMIT, LIMIT)).astype(np.float32)


def gemm(values, row_scale, weight, expert):
    """FP32 result of one expert's product, both scales undone."""
    product = values.astype(np.float64) @ weight.values[expert].numpy() * float(weight.scale[expert])
    return (product if row_scale is None else product * row_scale.astype(np.float64)).astype(np.float32)


def store_as(x, weight_format):
    if weight_format == "nvfp4":
        return to_nvfp4(x)
    return {
        "fp8": lambda: to_fp8(x, 128),
        "mxfp4": lambda: to_fp8(x, 128),
        "bf16": lambda: to_bf16(x),
        "fp32": lambda: x,
    }[weight_format](), None


def one_expert(x, gate_up, down, expert, points, fault=""):
    """FP32 output of one expert for rows (values, row scale), in numpy."""
    both = points["gate_up"](gemm(*x, gate_up, expert))
    if fault == "gate stored, up not":
        both[:, F:] = gemm(*x, gate_up, expert)[:, F:]
    hidden = swiglu(both[:, :F], both[:, F:])
    if fault == "quantised before the store":
        values, scale = store_as(hidden, down.format)
        return gemm(points["hidden"](values if scale is None else values * scale), None, down, expert)
    hidden = points["hidden"](hidden)
    quantised = store_as(hidden, down.format) if points["quantise"] else (hidden, None)
    return gemm(*quantised, down, expert)


def emulate(x, ids, weights, gate_up, down, /, fault="", **at):
    """Token by token; ``at`` holds rounding points by field name."""
    points = dict.fromkeys(("gate_up", "hidden", "out"), same) | {"quantise": False} | at
    total = np.zeros((len(ids), down.values.shape[-1]))
    for t in range(len(ids)):
        row = x.values[t : t + 1].numpy(), None if x.row_scale is None else x.row_scale[t : t + 1].numpy()
        for slot, expert in enumerate(ids[t].tolist()):
            y = one_expert(row, gate_up, down, expert, points, fault)[0]
            if fault == "stored by expert":
                y = points["out"](y)
            total[t] += y.astype(np.float64) * float(weights[t, slot])
    return points["out"](total.astype(np.float32))


def run(x, ids, weights, gate_up, down, at=EQUATIONS):
    return grouped_ffn(x, ids, weights, gate_up, down, limit=LIMIT, at=at)


PLAN = FfnRounding(gate_up=bf16.round, hidden=bf16.round, quantise=True, out=bf16.round)
EMULATED_PLAN = {"gate_up": to_bf16, "hidden": to_bf16, "quantise": True, "out": to_bf16}


@pytest.mark.parametrize("T", SIZES)
def test_equations_equal_80_bit_arithmetic(T):
    x, ids, weights = case(T, "fp32", enabled=False)
    gate_up, down = experts("fp32")
    gate_up = replace(gate_up, values=gate_up.values / 16)
    want = np.zeros((T, D), np.longdouble)
    for t, slot in np.ndindex(T, K):
        wide = [w.values[ids[t, slot]].numpy().astype(np.longdouble) for w in (gate_up, down)]
        both = x.values[t].numpy().astype(np.longdouble) @ wide[0]
        gate, up = np.minimum(both[:F], LIMIT), np.clip(both[F:], -LIMIT, LIMIT)
        want[t] += gate / (1 + np.exp(-gate)) * up @ wide[1] * float(weights[t, slot])
    # three FP32 stores of values under 1 (gate, up, hidden), through sums of F terms
    slack = 3 * 2.0**-24 * F * float(down.values.abs().max()) * float(weights.sum(-1).max() if T else 0)
    got = run(x, ids, weights, gate_up, down)
    assert_nearest(got, want, slack=slack)
    typical = np.abs(got.numpy() - want).mean() if T else 0.0
    assert typical <= slack / 50  # the bound is far from what happens


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES)
def test_a_plan_equals_its_emulation(T, weight_format):
    args = *case(T, weight_format), *experts(weight_format)
    want = emulate(*args, **EMULATED_PLAN)
    assert_bitwise(run(*args, at=PLAN), want)
    assert T < 3 or np.abs(want).max() > 0.1


def test_each_row_of_hidden_has_a_gsa_of_its_own():
    args = *case(70, "nvfp4", seed=40), *experts("nvfp4", seed=41)
    hidden = Spy()
    run(*args, at=FfnRounding(hidden=hidden, quantise=True))
    largest = torch.cat([rows.abs().amax(1) for rows in hidden.given])
    assert len(largest.unique()) > 30  # rows apart, so that the emulation above can tell one gsa for all


def uneven(x):
    return bf16.round(x * 0.75)


def uneven_np(x):
    return to_bf16(x * np.float32(0.75))


@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("field", ["gate_up", "hidden", "quantise", "out"])
def test_each_point_alone_equals_its_emulation_and_no_other(field, weight_format):
    args = *case(70, weight_format, seed=5), *experts(weight_format, seed=6)
    base, base_np = (FfnRounding(), {}) if field == "out" else (FfnRounding(out=bf16.round), {"out": to_bf16})
    at, at_np = ({field: True},) * 2 if field == "quantise" else ({field: uneven}, {field: uneven_np})
    got = run(*args, at=replace(base, **at))
    assert_bitwise(got, emulate(*args, **base_np, **at_np))
    assert_differs(got, emulate(*args, **base_np))  # dropped
    if field != "quantise":
        twice = {field: lambda x: uneven_np(uneven_np(x))}
        assert_differs(got, emulate(*args, **base_np, **twice))  # doubled
    for other in {"gate_up", "hidden", "out"} - {field, *base_np}:
        assert_differs(got, emulate(*args, **base_np, **{other: uneven_np}))  # in another place
    if field == "gate_up":
        assert_differs(got, emulate(*args, **base_np, **at_np, fault="gate stored, up not"))
    if field == "out":
        assert_differs(got, emulate(*args, **at_np, fault="stored by expert"))


def test_hidden_is_stored_before_it_is_quantised():
    args = *case(129, "nvfp4", seed=8), *experts("nvfp4", seed=9)
    got = run(*args, at=PLAN)
    assert_bitwise(got, emulate(*args, **EMULATED_PLAN))
    assert_differs(got, emulate(*args, **EMULATED_PLAN, fault="quantised before the store"))
    assert_differs(got, emulate(*args, **EMULATED_PLAN, fault="stored by expert"))


def test_products_store_once_an_expert_and_every_other_point_is_reached_once_in_all():
    args = *case(40, "nvfp4", seed=10), *experts("nvfp4", seed=11)
    gate_up, hidden, out = Spy(), Spy(), Spy()
    result = run(*args, at=FfnRounding(gate_up=gate_up, hidden=hidden, quantise=True, out=out))
    used = args[1].unique().tolist()
    counts = [int((args[1] == e).sum()) for e in used]
    assert [tuple(x.shape) for x in gate_up.given] == [(count, 2 * F) for count in counts]
    assert [tuple(x.shape) for x in hidden.given] == [(sum(counts), F)]
    assert len(out.given) == 1
    assert_bitwise(out.given[0], result)
    for both, after in zip(gate_up.returned, hidden.given[0].split(counts), strict=True):
        assert_bitwise(after, swiglu(both[:, :F].numpy(), both[:, F:].numpy()))


def test_out_is_the_last_step_and_happens_once():
    args = *case(129, "nvfp4", seed=12), *experts("nvfp4", seed=13)
    assert_stored_once(lambda out: run(*args, at=FfnRounding(quantise=True, out=out)))


@pytest.mark.parametrize("T", SIZES[1:])
@pytest.mark.parametrize("weight_format", ["nvfp4", "fp32"])
def test_a_row_does_not_see_its_batch(T, weight_format):
    x, ids, weights = case(T, weight_format, seed=14)
    gate_up, down = experts(weight_format, seed=15)
    at = PLAN if weight_format == "nvfp4" else EQUATIONS

    def op(r):
        return run(x[r["row"]], r["ids"], r["weights"], gate_up, down, at)

    assert_rows_alone(op, {"row": torch.arange(T), "ids": ids, "weights": weights})


def test_threads_do_not_change_bits():
    args = *case(129, "nvfp4", seed=16), *experts("nvfp4", seed=17)
    assert_threads_agree(lambda: run(*args, at=PLAN))


def test_powers_of_two_in_the_weights_commute():
    x, ids, weights = case(20, seed=18)
    matrices = experts("nvfp4", seed=19)
    assert_bitwise(run(x, ids, weights * 4, *matrices, PLAN), run(x, ids, weights, *matrices, PLAN) * 4)


def test_experts_that_no_row_chose_have_no_effect():
    x, ids, weights = case(20, seed=20)
    gate_up, down = experts("nvfp4", seed=21)
    want = run(x, ids, weights, gate_up, down, PLAN)
    for weight in (gate_up, down):
        weight.values[3] = math.nan
    assert_bitwise(run(x, ids, weights, gate_up, down, PLAN), want)


def test_relabelled_experts_give_the_same_bits():
    x, ids, weights = case(20, seed=22)
    gate_up, down = experts("nvfp4", seed=23)
    # 0..4 -> 4..0: the sum of two products is the same either way round
    flipped = [
        Weight(values=w.values.flip(0), scale=w.scale.flip(0), format=w.format) for w in (gate_up, down)
    ]
    got = run(x, (E - 1 - ids).flip(1), weights.flip(1), *flipped, PLAN)
    assert_bitwise(got, run(x, ids, weights, gate_up, down, PLAN))


def test_nan_stays_in_its_row_and_zero_rows_give_zeros():
    x, ids, weights = case(6, "fp32", enabled=False, seed=24)
    matrices = experts("fp32", seed=25)
    clean = run(x, ids, weights, *matrices)
    x.values[2, 5], x.values[4] = math.nan, 0.0
    got = run(x, ids, weights, *matrices)
    assert got[2].isnan().all()
    assert got[4].tolist() == [0.0] * D
    assert_bitwise(got[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


def test_no_rows_and_no_weight():
    matrices = experts("nvfp4")
    x, ids, weights = case(0)
    spy = Spy()
    got = run(x, ids, weights, *matrices, FfnRounding(out=spy))
    assert got.shape == (0, D)
    assert len(spy.given) == 1
    x, ids, weights = case(3)
    assert run(x, ids, weights * 0, *matrices).tolist() == [[0.0] * D] * 3


def test_one_expert_by_hand():
    # gate 3 -> clamped to 1; up -2 -> clamped to -1: silu(1) * -1 through down = 10, weight 0.5
    gate_up = plain_weight(torch.tensor([[[3.0], [-2.0]]]), "fp32")
    down = plain_weight(torch.tensor([[[10.0]]]), "fp32")
    x = quantise_activation(torch.ones(1, 1), "fp32")
    got = run(x, torch.tensor([[0]]), torch.tensor([[0.5]]), gate_up, down)
    assert got.item() == pytest.approx(-5 / (1 + math.exp(-1)), rel=2.0**-23)


def shared(weight_format, seed):
    """Gate, up and down of the shared expert; a stack's expert 1 cut apart."""
    gate_up, down = experts(weight_format, seed)
    scale, values = gate_up.scale[1], gate_up.values[1]
    gate, up = (
        Weight(values=part.contiguous(), scale=scale, format=weight_format) for part in values.split(F, dim=1)
    )
    return gate, up, down[1]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES)
def test_the_shared_expert_equals_its_emulation_and_one_routed_expert_of_weight_one(T, weight_format):
    x, _, _ = case(T, weight_format, seed=30)
    gate_up, down = experts(weight_format, seed=31)
    got = dense_ffn(x, *shared(weight_format, 31), limit=LIMIT, at=PLAN)
    ids, ones = torch.ones(T, 1, dtype=torch.int64), torch.ones(T, 1)
    assert_bitwise(got, emulate(x, ids, ones, gate_up, down, **EMULATED_PLAN))
    assert_bitwise(got, run(x, ids, ones, gate_up, down, PLAN))


@pytest.mark.parametrize("field", ["gate_up", "hidden", "quantise", "out"])
def test_each_point_of_the_shared_expert(field):
    x, _, _ = case(70, "nvfp4", seed=33)
    gate_up, down = experts("nvfp4", seed=34)
    parts = shared("nvfp4", 34)
    base, base_np = (FfnRounding(), {}) if field == "out" else (FfnRounding(out=bf16.round), {"out": to_bf16})
    at, at_np = ({field: True},) * 2 if field == "quantise" else ({field: uneven}, {field: uneven_np})
    got = dense_ffn(x, *parts, limit=LIMIT, at=replace(base, **at))
    chosen = x, torch.ones(70, 1, dtype=torch.int64), torch.ones(70, 1), gate_up, down
    assert_bitwise(got, emulate(*chosen, **base_np, **at_np))
    assert_differs(got, emulate(*chosen, **base_np))
    if field != "quantise":
        assert_differs(got, emulate(*chosen, **base_np, **{field: lambda x: uneven_np(uneven_np(x))}))


def test_the_shared_expert_stores_once_and_a_row_does_not_see_its_batch():
    x, _, _ = case(129, "nvfp4", seed=36)
    parts = shared("nvfp4", 37)
    assert_stored_once(lambda out: dense_ffn(x, *parts, limit=LIMIT, at=FfnRounding(quantise=True, out=out)))
    rows = {"row": torch.arange(129)}
    assert_rows_alone(lambda r: dense_ffn(x[r["row"]], *parts, limit=LIMIT, at=PLAN), rows)


def test_the_defaults_are_the_equations():
    args = *case(9), *experts("nvfp4")
    assert FfnRounding() == EQUATIONS
    assert_bitwise(run(*args), grouped_ffn(*args, limit=LIMIT))
    assert not EQUATIONS.quantise
