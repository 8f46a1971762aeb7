"""SwiGLU's kernel against the ref, in ulp; clamps, halves and special values."""

import math

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_fault_seen, assert_rows_alone, draw
from kernels.swiglu import kernel, ref

BF16, F32 = torch.bfloat16, torch.float32
LIMIT = 10.0
pytestmark = pytest.mark.usefixtures("poisoned")
# 3 of the exponential, as much of the sigmoid; 1 + it, the quotient, the product, the ref: 2^-24 each, and
# a relative 2^-24 is up to an ulp
ULPS = 8


def assert_near(got, gate_up, limit=LIMIT):
    want = ref.swiglu(*gate_up.float().chunk(2, -1), limit=limit)
    error = (got.double().cpu() - want.double()).abs()
    assert (error <= ULPS * 2.0**-24 * want.double().abs() + 1e-33).all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("T", SIZES)
def test_every_number_of_rows(T, dtype, accelerator):
    gate_up = draw(T, 96, seed=1, decades=1).to(dtype)
    got = kernel.swiglu(gate_up.to(accelerator), limit=LIMIT, dtype=F32)
    assert_near(got, gate_up)
    narrow = kernel.swiglu(gate_up.to(accelerator), limit=LIMIT)
    assert_bitwise(narrow.float().cpu(), got.to(BF16).float().cpu())


def test_every_gate(accelerator):
    gate = torch.linspace(-88, 12, 8000)
    gate_up = torch.cat((gate, torch.full_like(gate, 3.0)))[None]
    assert_near(kernel.swiglu(gate_up.to(accelerator), limit=LIMIT, dtype=F32), gate_up)


@pytest.mark.parametrize("F", [1, 3072, 1500])
def test_every_width(F, accelerator):
    gate_up = 4 * draw(2, 2 * F, seed=2)
    assert_near(kernel.swiglu(gate_up.to(accelerator), limit=LIMIT, dtype=F32), gate_up)


def test_clamps_and_special_values(accelerator):
    inf, nan = math.inf, math.nan
    gate_up = torch.tensor(
        [
            [11.0, 100.0, 1.0, -1.0, nan, 1.0, -inf, inf, -1000.0, 0.0],
            [1.0, -11.0, 11.0, inf, 1.0, nan, 1, 1, 1, -inf],
        ]
    ).flatten()[None]
    got = kernel.swiglu(gate_up.to(accelerator), limit=LIMIT, dtype=F32).cpu()[0]
    want = ref.swiglu(*gate_up.chunk(2, -1), limit=LIMIT)[0]
    finite = [0, 1, 2, 3, 7, 8, 9]
    assert ((got - want).abs()[finite] <= ULPS * 2.0**-24 * want.abs()[finite] + 1e-33).all()
    assert got[[4, 5]].isnan().all()
    assert got[6] == -inf or got[6].isnan()  # -inf times a sigmoid of 0, which FP32 stops at 2^-127


def test_rows_may_be_strided_and_do_not_see_their_batch(accelerator):
    x = draw(40, 300, seed=3).to(accelerator)[::2, 20:148]
    got = kernel.swiglu(x, limit=LIMIT, dtype=F32)
    assert_near(got, x.cpu())
    assert_rows_alone(lambda rows: kernel.swiglu(rows["x"], limit=LIMIT, dtype=F32).cpu(), {"x": x})


@pytest.mark.parametrize("fault", ["halves swapped", "gate clamped below", "no limit"])
def test_a_planted_fault_is_seen(fault, accelerator):
    gate_up = 8 * draw(3, 96, seed=4)
    faulty = gate_up.clone()
    if fault == "halves swapped":
        faulty = torch.cat(gate_up.chunk(2, -1)[::-1], -1)
    elif fault == "gate clamped below":
        faulty[:, :48] = faulty[:, :48].clamp_min(-LIMIT)
    limit = 1e9 if fault == "no limit" else LIMIT
    got = kernel.swiglu(faulty.to(accelerator), limit=limit, dtype=F32)
    assert_fault_seen(lambda: assert_near(got, gate_up))


def test_a_misfit_is_refused():
    with pytest.raises(ValueError, match="has no two halves"):
        kernel.swiglu(torch.zeros(3, 33), limit=LIMIT)
    with pytest.raises(TypeError, match="swiglu: gate_up"):
        kernel.swiglu(torch.zeros(3, 32, dtype=torch.float64), limit=LIMIT)
