"""An index key's record: what its steps are, and that it is what the model's cache holds."""

import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import e2m1, fp8_scaled, mxfp4, ue8m0
from kernels.hadamard.ref import hadamard
from kernels.index_key import ref
from kernels.rmsnorm.ref import rmsnorm
from kernels.rope.ref import cos_sin, inverse_frequencies, rope

D, EPS = 128, 1e-6


def case(E, seed=0):
    cos, sin = cos_sin(torch.arange(E) * 4, inverse_frequencies(64, 160000.0))
    return draw(E, D, seed=seed), draw(D, seed=seed + 1), cos, sin


def test_fp8_is_of_the_normed_and_turned_key():
    x, weight, cos, sin = case(5)
    codes, scale = ref.key_fp8(x, weight, cos, sin, eps=EPS)
    wanted = fp8_scaled.quantise(rope(rmsnorm(x, weight, eps=EPS), cos, sin))
    assert_bitwise(codes, wanted[0])
    assert_bitwise(scale, wanted[1])
    assert_differs(codes, fp8_scaled.quantise(rmsnorm(rope(x, cos, sin), weight, eps=EPS))[0])  # order


def test_fp4_is_of_the_rotated_key():
    x, weight, cos, sin = case(5, seed=3)
    codes, scales = ref.key_fp4(x, weight, cos, sin, eps=EPS)
    got = mxfp4.dequantise(e2m1.unpack(codes), ue8m0.decode(scales))
    turned = rope(rmsnorm(x, weight, eps=EPS), cos, sin)
    assert_bitwise(got, mxfp4.round(hadamard(turned)))
    assert_differs(got, mxfp4.round(turned))
