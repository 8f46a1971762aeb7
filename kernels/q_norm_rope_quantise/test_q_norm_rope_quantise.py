"""q's record is the plan's rounding of its BF16 values: one term, or a value and its residual."""

import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16, e4m3, fp8_block
from kernels.formats.kv_record import rope_values
from kernels.q_norm_rope_quantise.ref import norm_rope, norm_rope_quantise, quantise
from kernels.rmsnorm.ref import rmsnorm
from kernels.rope.ref import cos_sin, inverse_frequencies, rope

Q = draw(5, 3, 512, seed=1)
TURN = cos_sin(torch.arange(5) * 17, inverse_frequencies(64, 1e4))


def test_norm_and_turn():
    assert_bitwise(norm_rope(Q, *TURN, eps=1e-6), rope(rmsnorm(Q, None, eps=1e-6), *TURN))


def test_one_term_is_the_fp8_block_of_a_head_s_nope():
    got = quantise(Q)
    q = bf16.round(Q)
    assert_bitwise(
        e4m3.decode(got.record[..., :448]) * got.scale[..., None], fp8_block.round(q[..., :448], 448)
    )
    assert_bitwise(rope_values(got.record[..., 448:]) * got.scale[..., None], q[..., 448:])
    assert got.residual is None
    assert_differs(fp8_block.round(Q[..., :448], 448), fp8_block.round(q[..., :448], 448))  # BF16 first


def test_the_residual_is_of_what_the_first_term_left():
    got, q = quantise(Q, residual=True), bf16.round(Q)[..., :448]
    assert got.residual is not None
    first, second = e4m3.decode(got.record[..., :448]), e4m3.decode(got.residual)
    scale = got.scale[..., None]
    assert_bitwise(second, e4m3.decode(e4m3.encode(q / scale - first)))
    one, two = (value - q for value in (first * scale, (first + second) * scale))
    assert two.norm() < one.norm() / 12  # three more bits and a sign: 16, less what is subnormal


def test_whole():
    whole = norm_rope_quantise(Q, *TURN, eps=1e-6)
    assert_bitwise(whole.record, quantise(norm_rope(Q, *TURN, eps=1e-6)).record)
