"""Clamped SwiGLU against 80-bit arithmetic, its clamps by hand, and its store."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_differs,
    assert_nearest,
    assert_rows_alone,
    assert_stored_once,
    assert_threads_agree,
    draw,
    to_bf16,
)
from kernels.formats import bf16
from kernels.swiglu.ref import swiglu

LIMIT = 10.0


def oracle(gate, up, limit):
    g = np.minimum(gate.numpy().astype(np.longdouble), limit)
    u = np.clip(up.numpy().astype(np.longdouble), -limit, limit)
    return g / (1 + np.exp(-g)) * u


def inputs(T, seed):
    return draw(T, 67, seed=seed) * 8, draw(T, 67, seed=seed + 1) * 8  # about a fifth is beyond the limit


@pytest.mark.parametrize("limit", [LIMIT, 1.0, 7.3])
@pytest.mark.parametrize("T", SIZES)
def test_equals_80_bit_arithmetic_rounded_once(T, limit):
    gate, up = inputs(T, 1)
    assert T < 3 or ((gate > limit).any() and (up < -limit).any() and (gate < -limit).any())
    assert_nearest(swiglu(gate, up, limit=limit), oracle(gate, up, limit))


def test_gate_is_clamped_above_only_and_up_on_both_sides():
    top = LIMIT / (1 + math.exp(-LIMIT))
    low = -20 / (1 + math.exp(20))
    gate = torch.tensor([[10.0, 11.0, 1e30, math.inf, -20.0, 11.0, 11.0, 0.0, -0.0]])
    up = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1e30, -math.inf, 5.0, 5.0]])
    want = [top, top, top, top, low, 10 * top, -10 * top, 0.0, -0.0]
    np.testing.assert_allclose(swiglu(gate, up, limit=LIMIT)[0].double(), want, rtol=2.0**-24)


def test_strongly_negative_gates_vanish_without_nan():
    gate = torch.tensor([[-88.0, -104.0, -800.0, -3e38]])
    got = swiglu(gate, torch.full((1, 4), LIMIT), limit=LIMIT)
    assert got[0, 0] == np.float32(-880 * math.exp(-88))
    assert got[0, 1] == np.float32(-1040 * math.exp(-104))  # subnormal, not flushed
    assert got[0, 2:].tolist() == [0.0, 0.0]
    assert got[0, 2:].signbit().all()


def test_nan_stays_in_its_element_and_minus_infinity_gives_nan():
    gate, up = inputs(3, 3)
    clean = swiglu(gate, up, limit=LIMIT)
    gate[0, 0], up[1, 1], gate[2, 2] = math.nan, math.nan, -math.inf  # -inf * sigmoid(-inf) = -inf * 0
    got = swiglu(gate, up, limit=LIMIT)
    assert got.isnan().nonzero().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert_bitwise(got.masked_fill(got.isnan(), 0.0), clean.masked_fill(got.isnan(), 0.0))


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    gate, up = inputs(T, 5)
    assert_rows_alone(lambda r: swiglu(r["gate"], r["up"], limit=LIMIT), {"gate": gate, "up": up})


def test_threads_and_powers_of_two():
    gate, up = draw(300, 300, seed=7), draw(300, 300, seed=8)
    assert_threads_agree(lambda: swiglu(gate, up, limit=LIMIT))
    small = up.clamp(-1, 1)
    assert_bitwise(swiglu(gate, small * 8, limit=LIMIT), swiglu(gate, small, limit=LIMIT) * 8)
    assert_bitwise(swiglu(gate, -up, limit=LIMIT), -swiglu(gate, up, limit=LIMIT))


def test_halves_of_one_gemm_need_no_copy():
    both = draw(5, 128, seed=9)
    gate, up = both.chunk(2, dim=-1)
    assert_bitwise(swiglu(gate, up, limit=LIMIT), swiglu(gate.contiguous(), up.contiguous(), limit=LIMIT))


def test_out_is_the_last_step_and_happens_once():
    gate, up = inputs(129, 11)
    assert_stored_once(lambda out: swiglu(gate, up, limit=LIMIT, out=out))


@pytest.mark.parametrize("T", SIZES)
def test_bf16_store_equals_the_emulation(T):
    gate, up = inputs(T, 13)
    want = to_bf16(oracle(gate, up, LIMIT).astype(np.float32))
    assert_bitwise(swiglu(gate, up, limit=LIMIT, out=bf16.round), want)


def test_a_rounding_or_clamp_in_another_place_would_show():
    gate, up = inputs(129, 15)
    stored = swiglu(gate, up, limit=7.3, out=bf16.round)
    silu = oracle(gate, torch.ones_like(up), 7.3).astype(np.float32)
    faults = {
        "silu stored first": to_bf16(to_bf16(silu) * np.clip(up.numpy(), -7.3, 7.3)),
        "inputs stored first": to_bf16(oracle(bf16.round(gate), bf16.round(up), 7.3).astype(np.float32)),
        "clamp skipped": to_bf16(oracle(gate, up, 1e30).astype(np.float32)),
        "gate clamped below too": to_bf16(oracle(gate.clamp(min=-7.3), up, 7.3).astype(np.float32)),
        "clamp after the product": to_bf16(np.clip(oracle(gate, up, 1e30), -7.3, 7.3).astype(np.float32)),
    }
    for fault in faults.values():
        assert_differs(stored, fault)
