"""The fused ref is its parts; gate comes first; a store between them shows."""

import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16
from kernels.nvfp4_quantise.ref import quantise
from kernels.swiglu.ref import swiglu
from kernels.swiglu_quantise_nvfp4.ref import swiglu_quantise


def test_is_swiglu_then_the_quantiser():
    gate, up = 4 * draw(9, 48, seed=1), 4 * draw(9, 48, seed=2)
    got = swiglu_quantise(torch.cat((gate, up), -1), limit=2.5)
    assert_bitwise(got.values(), quantise(swiglu(gate, up, limit=2.5)).values())
    assert_differs(got.values(), swiglu_quantise(torch.cat((up, gate), -1), limit=2.5).values())


def test_the_product_may_be_stored():
    gate_up = draw(9, 96, seed=3)
    stored = swiglu_quantise(gate_up, limit=10.0, between=bf16.round)
    assert_differs(stored.values(), swiglu_quantise(gate_up, limit=10.0).values())
