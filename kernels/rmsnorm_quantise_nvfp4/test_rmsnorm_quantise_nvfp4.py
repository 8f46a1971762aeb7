"""The fused ref is its parts; a store between them shows."""

from kernels._check import Spy, assert_bitwise, assert_differs, draw
from kernels.formats import bf16
from kernels.nvfp4_quantise.ref import quantise
from kernels.rmsnorm.ref import rmsnorm
from kernels.rmsnorm_quantise_nvfp4.ref import rmsnorm_quantise

EPS = 1e-6


def test_is_the_norm_then_the_quantiser():
    x, weight = draw(9, 96, seed=1), draw(96, seed=2)
    y = rmsnorm(x, weight, eps=EPS)
    got = rmsnorm_quantise(x, weight, eps=EPS, copy=bf16.round)
    assert_bitwise(got.rows.values(), quantise(y).values())
    assert_bitwise(got.copy, bf16.round(y))


def test_what_is_stored_between_is_what_is_quantised_and_copied():
    x, weight = draw(9, 96, seed=3), draw(96, seed=4)
    between, copy = Spy(bf16.round), Spy()
    got = rmsnorm_quantise(x, weight, eps=EPS, between=between, copy=copy)
    assert_bitwise(copy.given[0], between.returned[0])
    assert_bitwise(got.rows.values(), quantise(between.returned[0]).values())
    assert_differs(got.rows.values(), rmsnorm_quantise(x, weight, eps=EPS).rows.values())
