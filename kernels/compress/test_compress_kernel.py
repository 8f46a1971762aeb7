"""The compressor's kernel against the refs, within a bound on FP32 softmax sums; windows, strides, edges."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.compress import kernel, ref

CASES = [
    pytest.param(4, True, 1, 128, id="one CSA entry"),
    pytest.param(4, True, 33, 512, id="CSA"),
    pytest.param(4, True, 3, 100, id="odd width"),
    pytest.param(128, False, 3, 512, id="HCA"),
    pytest.param(3, False, 5, 17, id="odd ratio"),
    pytest.param(4, True, 0, 32, id="only the window before"),
]


def case(ratio, overlap, count, D, seed=0, spread=2.0):
    rows, width = (count + overlap) * ratio, D * (1 + overlap)
    kv, gate = draw(rows, width, seed=seed), draw(rows, width, seed=seed + 1) * spread
    if overlap:
        gate[:ratio] = -math.inf
        kv[:ratio] = 0.0
    return kv, gate, draw(ratio, width, seed=seed + 2)


def slots(kv, gate, bias, ratio, overlap):
    biased = (gate.unflatten(0, (-1, ratio)).double() + bias.double()).flatten(0, 1)
    return ref.windows(kv, biased, ratio, overlap=overlap)


def run(kv, gate, bias, ratio, overlap, device, **kwargs):
    args = (x.to(device) for x in (kv, gate, bias))
    return kernel.compress(*args, ratio=ratio, overlap=overlap, **kwargs).cpu()


def bound(kv, gate):
    """Error of the FP32 pooling of slots in FP64.

    A power is off by its exponent's own error (the biased gate and its maximum, each half an ulp, and three roundings
    of their difference x, times |x|) and by 2 ulp of the function; it enters a sum and its divisor.
    """
    finite = gate.where(gate.isfinite(), torch.zeros(()).double())
    fall = (finite - gate.amax(1, keepdim=True)).abs()
    each = (2 * finite.abs().amax(1, keepdim=True) + 3 * fall + 4) * 2.0**-23
    share = torch.softmax(gate, dim=1)
    wrong = (share * kv.double().abs() * each).sum(1) + (share * kv.double().abs()).sum(1) * (
        share * each
    ).sum(1)
    return wrong + (share * kv.double().abs()).sum(1) * (2 * gate.shape[1] + 2) * 2.0**-24


@pytest.mark.parametrize(("ratio", "overlap", "count", "D"), CASES)
@pytest.mark.parametrize("spread", [0.1, 20.0])
def test_equals_the_ref(ratio, overlap, count, D, spread, accelerator):
    tensors = case(ratio, overlap, count, D, spread=spread)
    got = run(*tensors, ratio, overlap, accelerator)
    kv, gate = slots(*tensors, ratio, overlap)
    error = (got.double() - ref.pool(kv, gate).double()).abs()
    assert bool((error <= bound(kv, gate)).all())


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_gates_far_from_zero(shift, accelerator):
    """No exponential of a gate itself: e^200 is no FP32, nor is e^-200."""
    kv, gate, bias = case(4, True, 3, 64, seed=9)
    args = kv, gate + shift, bias, 4, True
    good = slots(*args)
    error = (run(*args, accelerator).double() - ref.pool(*good).double()).abs()
    assert bool((error <= bound(*good)).all())


def test_an_entry_does_not_see_the_others(accelerator):
    kv, gate, bias = case(4, True, 9, 64, seed=3)
    whole = run(kv, gate, bias, 4, True, accelerator)
    for entry in (0, 4, 8):
        rows = slice(4 * entry, 4 * entry + 8)
        assert_bitwise(run(kv[rows], gate[rows], bias, 4, True, accelerator)[0], whole[entry])
    wide = torch.full((40, 300), math.nan)
    wide[:, :128] = kv
    assert_bitwise(run(wide[:, :128], gate, bias, 4, True, accelerator), whole)
    out = torch.full((9, 64), math.nan, device=accelerator)
    run(kv, gate, bias, 4, True, accelerator, out=out)
    assert_bitwise(out.cpu(), whole)


def test_closed_slots_and_nan(accelerator):
    kv, gate, bias = case(128, False, 2, 32, seed=5)
    gate[:127, 3] = -math.inf  # one open slot: its value, exactly
    kv[200, 7] = math.nan
    got = run(kv, gate, bias, 128, False, accelerator)
    assert got[0, 3] == kv[127, 3]
    assert bool(got[1, 7].isnan())
    assert int(got.isnan().sum()) == 1


def test_refuses(accelerator):
    kv, gate, bias = case(4, True, 2, 16)
    with pytest.raises(ValueError, match="no run of windows of 4 tokens"):
        run(kv[:-1], gate[:-1], bias, 4, True, accelerator)
    with pytest.raises(ValueError, match="gate is"):
        run(kv, gate[:, :16], bias, 4, True, accelerator)
    with pytest.raises(ValueError, match="out is"):
        run(kv, gate, bias, 4, True, accelerator, out=torch.empty(3, 16, device=accelerator))


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
def test_faults_would_show(ratio, overlap, accelerator):
    kv, gate, bias = case(ratio, overlap, 4, 64, seed=7)
    got = run(kv, gate, bias, ratio, overlap, accelerator).double()
    good = slots(kv, gate, bias, ratio, overlap)
    slack = bound(*good)
    faults = [slots(kv, gate, 0 * bias, ratio, overlap), slots(kv, gate, bias.roll(1, 0), ratio, overlap)]
    faults.append((good[0], good[1].roll(1, 1)))
    if overlap:
        faults.append(
            slots(kv.roll(64, 1), gate.roll(64, 1), bias.roll(64, 1), ratio, overlap)
        )  # series swapped
    for fault in faults:
        assert bool(((got - ref.pool(*fault).double()).abs() > slack).any())
