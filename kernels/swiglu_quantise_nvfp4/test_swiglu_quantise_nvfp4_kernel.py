"""The fused kernel has the bits of its two kernels."""

import pytest
import torch

from kernels._check import assert_fault_seen, assert_same_fp8, assert_same_rows, draw
from kernels.fp8_quantise.kernel import quantise as quantise_fp8
from kernels.nvfp4_quantise.kernel import quantise
from kernels.swiglu.kernel import swiglu
from kernels.swiglu_quantise_nvfp4 import kernel, ref

BF16, F32 = torch.bfloat16, torch.float32
LIMIT = 2.5
pytestmark = pytest.mark.usefixtures("poisoned")


def unfused(gate_up, dtype, limit=LIMIT):
    return quantise(swiglu(gate_up, limit=limit, dtype=dtype))


@pytest.mark.parametrize("between", [BF16, F32], ids=["through bf16", "in registers"])
@pytest.mark.parametrize("T", [0, 1, 3, 17])
def test_has_the_bits_of_two_kernels(T, between, accelerator):
    gate_up = 2 * draw(T, 192, seed=1).to(BF16).to(accelerator)
    assert_same_rows(kernel.swiglu_quantise(gate_up, limit=LIMIT, between=between), unfused(gate_up, between))


@pytest.mark.parametrize("between", [BF16, F32], ids=["through bf16", "in registers"])
@pytest.mark.parametrize(("T", "F"), [(0, 128), (3, 384), (2, 2048)])
def test_in_fp8_it_has_the_bits_of_two_kernels(T, F, between, accelerator):
    gate_up = 2 * draw(T, 2 * F, seed=6).to(BF16).to(accelerator)
    if T:
        gate_up[1, 3] = float("nan")
    got = kernel.swiglu_quantise(gate_up, limit=LIMIT, form="fp8", between=between)
    assert_same_fp8(got, quantise_fp8(swiglu(gate_up, limit=LIMIT, dtype=between)))
    if T:
        other = quantise_fp8(swiglu(gate_up, limit=2.2, dtype=between))
        assert_fault_seen(lambda: assert_same_fp8(got, other))


@pytest.mark.parametrize("F", [16, 2048, 3072])
def test_every_width_strided(F, accelerator):
    gate_up = draw(4, 2 * F + 8, seed=2).to(BF16).to(accelerator)[::2, 8:]
    assert_same_rows(kernel.swiglu_quantise(gate_up, limit=LIMIT), unfused(gate_up, F32))


def test_values_are_the_ref_s_but_for_codes_next_to_a_threshold(accelerator):
    gate_up = 2 * draw(20, 192, seed=3).to(BF16)
    got = kernel.swiglu_quantise(gate_up.to(accelerator), limit=LIMIT, between=BF16)
    want = ref.swiglu_quantise(gate_up, limit=LIMIT, between=lambda x: x.to(BF16).float())
    # an error of 8 ulp moves a BF16 store of one value in 2^13, half a step of E2M1 of fewer
    assert (got.codes.cpu() != want.codes).double().mean() < 0.01
    assert ((got.gsa.cpu() - want.gsa).abs() <= 2.0**-8 * want.gsa).all()


def test_special_rows_are_their_own(accelerator):
    gate_up = draw(4, 64, seed=4).to(accelerator)
    gate_up[1], gate_up[2, 3] = 0.0, float("nan")
    got = kernel.swiglu_quantise(gate_up, limit=LIMIT)
    assert_same_rows(got, unfused(gate_up, F32))
    assert got.gsa.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("fault", ["limit", "rounds between"])
def test_a_planted_fault_is_seen(fault, accelerator):
    gate_up = 2 * draw(3, 192, seed=5).to(BF16).to(accelerator)
    limit, between = (2.4, F32) if fault == "limit" else (LIMIT, BF16)
    got = kernel.swiglu_quantise(gate_up, limit=limit, between=between)
    assert_fault_seen(lambda: assert_same_rows(got, unfused(gate_up, F32)))


def test_a_misfit_is_refused():
    with pytest.raises(ValueError, match="no multiple of NVFP4's 16"):
        kernel.swiglu_quantise(torch.zeros(3, 40), limit=LIMIT)
