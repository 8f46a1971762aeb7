"""The fused ref is its parts; a store after the sum shows."""

from kernels._check import Spy, assert_bitwise, assert_differs, draw
from kernels.formats import bf16
from kernels.hc.ref import collapse
from kernels.mhc_rmsnorm_quantise_nvfp4.ref import mhc_rmsnorm_quantise
from kernels.rmsnorm_quantise_nvfp4.ref import rmsnorm_quantise

EPS = 1e-6


def test_is_the_sum_then_the_norm_and_the_quantiser():
    streams, pre, weight = draw(9, 4, 96, seed=1), draw(9, 4, seed=2).abs(), draw(96, seed=3)
    got = mhc_rmsnorm_quantise(streams, pre, weight, eps=EPS)
    want = rmsnorm_quantise(collapse(streams, pre), weight, eps=EPS)
    assert_bitwise(got.rows.values(), want.rows.values())
    assert_bitwise(got.copy, want.copy)


def test_the_sum_may_be_stored():
    streams, pre = draw(9, 4, 96, seed=4), draw(9, 4, seed=5).abs()
    spy = Spy(bf16.round)
    got = mhc_rmsnorm_quantise(streams, pre, None, eps=EPS, collapsed=spy)
    assert_bitwise(spy.given[0], collapse(streams, pre))
    assert_differs(got.copy, mhc_rmsnorm_quantise(streams, pre, None, eps=EPS).copy)
