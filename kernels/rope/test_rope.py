"""RoPE against complex numbers, YaRN's tables against their definition, and the rounding of the whole row."""

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
from kernels.rope.ref import cos_sin, inverse_frequencies, rope

YARN = {"factor": 16.0, "original_max_position": 65536, "beta_fast": 32.0, "beta_slow": 1.0}
P = 64


def table(T, *, first=0, theta=10000.0):
    return cos_sin(torch.arange(first, first + T), inverse_frequencies(P, theta))


def oracle(x, cos, sin, *, inverse=False):
    """Multiplication by cos + i sin of the pairs as complex numbers."""
    wide = x.double().numpy()
    unit = cos.double().numpy() + 1j * sin.double().numpy() * (-1 if inverse else 1)
    unit = unit.reshape(len(unit), *[1] * (wide.ndim - 2), unit.shape[-1])
    head, tail = wide[..., : -2 * unit.shape[-1]], wide[..., -2 * unit.shape[-1] :]
    turned = (tail[..., 0::2] + 1j * tail[..., 1::2]) * unit
    return np.concatenate([head, np.stack([turned.real, turned.imag], -1).reshape(tail.shape)], -1)


def product_error(x):
    """FP64 slack of a difference of two products."""
    return 2.0**-51 * x.abs().amax(-1, keepdim=True).double().numpy()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("T", SIZES)
def test_equals_complex_multiplication_rounded_once(T, inverse):
    cos, sin = table(T, first=3000)
    for x in (draw(T, 96, seed=1, decades=3), draw(T, 3, 96, seed=2), draw(T, P, seed=3)):
        got = rope(x, cos, sin, inverse=inverse)
        assert_nearest(got, oracle(x, cos, sin, inverse=inverse), slack=product_error(x))


def test_pairs_are_neighbours_and_a_quarter_turn_is_exact():
    x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]])
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    assert rope(x, zero, one).tolist() == [[9.0, -2.0, 1.0, -4.0, 3.0]]
    assert rope(x, zero, one, inverse=True).tolist() == [[9.0, 2.0, -1.0, 4.0, -3.0]]
    assert rope(x, one, zero).tolist() == x.tolist()


def test_position_zero_and_the_nope_part_pass_through():
    x = draw(5, 2, 96, seed=4, decades=10)
    x[0, 0, 3], x[1, 0, 0], x[2, 1, 5] = math.nan, math.inf, 2.0**-149
    assert_bitwise(rope(x[:1], *table(1)), x[:1])
    assert_bitwise(rope(x, *table(5, first=77))[..., :32], x[..., :32])


def test_non_finite_values_stay_in_their_pair():
    x = draw(3, 96, seed=5)
    clean = rope(x, *table(3, first=9))
    x[1, 32 + 10] = math.nan
    got = rope(x, *table(3, first=9))
    assert got.isnan().nonzero().tolist() == [[1, 42], [1, 43]]
    got[1, 42:44] = clean[1, 42:44]
    assert_bitwise(got, clean)


@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T):
    cos, sin = table(T, first=500)
    rows = {"x": draw(T, 3, 96, seed=6), "cos": cos, "sin": sin}
    assert_rows_alone(lambda r: rope(r["x"], r["cos"], r["sin"]), rows)


def test_a_table_row_depends_on_its_position_alone():
    frequencies = inverse_frequencies(P, 160000.0, **YARN)
    positions = torch.tensor([0, 1, 127, 128, 4095, 65536, 1_000_000])
    whole = cos_sin(positions, frequencies)
    for row, position in enumerate(positions.tolist()):
        alone = cos_sin(torch.tensor([position]), frequencies)
        assert_bitwise(alone[0], whole[0][row : row + 1])
        assert_bitwise(alone[1], whole[1][row : row + 1])


def test_threads_do_not_change_bits():
    x, (cos, sin) = draw(129, 8, 512, seed=7), table(129)
    assert_threads_agree(lambda: rope(x, cos, sin))
    assert_threads_agree(lambda: table(129, first=4000)[1])


def test_powers_of_two_commute():
    x, (cos, sin) = draw(9, 96, seed=8), table(9, first=30)
    assert_bitwise(rope(x * 2.0**-30, cos, sin), rope(x, cos, sin) * 2.0**-30)


def test_inverse_undoes_the_rotation_and_scores_depend_on_distance():
    x = draw(129, 96, seed=9)
    cos, sin = table(129, first=1000)
    back = rope(rope(x, cos, sin), cos, sin, inverse=True)
    np.testing.assert_allclose(back, x, atol=4 * 2.0**-24 * float(x.abs().max()))
    q, k = draw(1, P, seed=10), draw(1, P, seed=11)
    near = rope(q, *table(1, first=70)) @ rope(k, *table(1, first=50)).T
    far = rope(q, *table(1, first=520)) @ rope(k, *table(1, first=500)).T
    assert near.item() == pytest.approx(far.item(), abs=1e-3)  # FP32 angles: 3e-5 rad at position 520


def test_plain_frequencies():
    got = inverse_frequencies(P, 10000.0)
    want = [10000.0 ** (-2 * i / P) for i in range(P // 2)]
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.double(), want, rtol=3 * 2.0**-23)
    assert got[0] == 1.0
    assert_bitwise(inverse_frequencies(P, 10000.0, factor=1.0, original_max_position=64), got)


def yarn_by_definition(theta, factor, original_max_position, beta_fast, beta_slow):
    """YaRN from the number of turns: each pair keeps a share of its own frequency."""
    want = []
    dims = [
        P * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    ]
    low, high = max(math.floor(dims[0]), 0), min(math.ceil(dims[1]), P - 1)
    for pair in range(P // 2):
        own = theta ** (-2 * pair / P)
        stretched = min(max((pair - low) / (high - low), 0), 1)
        want.append(own * (1 - stretched) + own / factor * stretched)
    return want


@pytest.mark.parametrize(("theta", "length"), [(10000.0, 4096), (160000.0, 65536), (10000.0, 65536)])
def test_yarn_frequencies(theta, length):
    yarn = YARN | {"original_max_position": length}
    got = inverse_frequencies(P, theta, **yarn)
    np.testing.assert_allclose(got.double(), yarn_by_definition(theta, *yarn.values()), rtol=4 * 2.0**-23)
    plain = inverse_frequencies(P, theta)
    turns = length * plain / (2 * math.pi)
    assert_bitwise(got[turns > 40], plain[turns > 40])  # many turns: kept
    few = turns < 0.7
    assert bool(few.any()) == ((theta, length) != (10000.0, 65536))  # the last ramp ends beyond the last pair
    assert_bitwise(got[few], plain[few] / 16)  # under one turn: stretched, exactly (16 is a power of two)
    assert (got.diff() < 0).all()


def test_yarn_with_a_ramp_of_no_width():
    got = inverse_frequencies(4, 10.0, factor=2.0, original_max_position=1, beta_fast=1.0, beta_slow=1.0)
    assert got.isfinite().all()


def test_the_angle_is_an_fp32_product():
    frequencies = inverse_frequencies(P, 10000.0)
    positions = torch.arange(3990, 4119)
    angle = (positions.numpy().astype(np.float32)[:, None] * frequencies.numpy()).astype(np.float64)
    cos, sin = cos_sin(positions, frequencies)
    assert_nearest(cos, np.cos(angle))
    assert_nearest(sin, np.sin(angle))
    wide = positions.numpy()[:, None] * frequencies.double().numpy()
    assert_differs(cos, np.cos(wide).astype(np.float32))


def test_out_is_the_last_step_happens_once_and_covers_nope_too():
    x, (cos, sin) = draw(129, 3, 96, seed=12), table(129, first=20)
    for inverse in (False, True):
        assert_stored_once(lambda out, inverse=inverse: rope(x, cos, sin, inverse=inverse, out=out))
    stored = rope(x, cos, sin, out=bf16.round)
    rope_only = np.concatenate([x[..., :32], to_bf16(rope(x, cos, sin)[..., 32:].numpy())], -1)
    assert_differs(stored, rope_only)
    assert_bitwise(stored[..., :32], to_bf16(x[..., :32].numpy()))


@pytest.mark.parametrize("T", SIZES)
def test_bf16_store_equals_the_emulation(T):
    x, (cos, sin) = draw(T, 3, 96, seed=13), table(T, first=20)
    want = oracle(x, cos, sin).astype(np.float32)
    assert_bitwise(rope(x, cos, sin, out=bf16.round), to_bf16(want))
    if T > 1:
        narrow_input = oracle(bf16.round(x), cos, sin).astype(np.float32)
        assert_differs(to_bf16(want), to_bf16(narrow_input))
        narrow_table = oracle(x, bf16.round(cos), bf16.round(sin)).astype(np.float32)
        assert_differs(to_bf16(want), to_bf16(narrow_table))
