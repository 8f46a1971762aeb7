"""RoPE's kernel against the ref: two products and a sum in FP32, and what passes through unchanged."""

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_fault_seen, assert_rows_alone, draw
from kernels.rope import kernel, ref

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("poisoned")


def turn(T, pairs=32):
    positions = torch.arange(T) * 977 + 3
    return ref.cos_sin(positions, ref.inverse_frequencies(2 * pairs, 1e4))


def assert_near(got, x, cos, sin, inverse=False):
    """2^-24 for each product and for the sum, of the pair's magnitudes; the ref's rounding; nope as it is."""
    want = ref.rope(x.float(), cos, sin, inverse=inverse)
    pairs = x[..., -2 * cos.shape[-1] :].double().abs().unflatten(-1, (-1, 2)).sum(-1, keepdim=True)
    bound = (2.0**-23 * pairs).expand(*pairs.shape[:-1], 2).flatten(-2)
    nope = x.shape[-1] - bound.shape[-1]
    assert_bitwise(got[..., :nope].float().cpu(), want[..., :nope])
    assert ((got[..., nope:].double().cpu() - want[..., nope:].double()).abs() <= bound).all()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("T", SIZES)
def test_every_number_of_rows(T, inverse, accelerator):
    x, (cos, sin) = draw(T, 3, 128, seed=1, decades=1), turn(T)
    on_device = [t.to(accelerator) for t in (x, cos, sin)]
    got = kernel.rope(*on_device, inverse=inverse, dtype=F32)
    assert_near(got, x, cos, sin, inverse)
    assert_bitwise(kernel.rope(*on_device, inverse=inverse).float().cpu(), got.to(BF16).float().cpu())


@pytest.mark.parametrize(("D", "pairs"), [(512, 32), (256, 32), (64, 32), (130, 1), (128, 64)])
def test_every_width_and_rows_without_heads(D, pairs, accelerator):
    x, (cos, sin) = draw(5, D, seed=2).to(BF16), turn(5, pairs)
    got = kernel.rope(*(t.to(accelerator) for t in (x, cos, sin)), dtype=F32)
    assert_near(got, x, cos, sin)


def test_strided_tokens_and_heads_and_rows_alone(accelerator):
    x = draw(8, 9, 200, seed=3).to(accelerator)[::2, 1::2, 8:136]
    cos, sin = (t.to(accelerator) for t in turn(4))
    got = kernel.rope(x, cos, sin, dtype=F32)
    assert_near(got, x.cpu(), cos.cpu(), sin.cpu())
    rows = {"x": x, "cos": cos, "sin": sin}
    assert_rows_alone(lambda some: kernel.rope(**some, dtype=F32).cpu(), rows)


def test_a_turn_back_undoes_a_turn(accelerator):
    x, (cos, sin) = draw(4, 2, 128, seed=4).to(accelerator), (t.to(accelerator) for t in turn(4))
    back = kernel.rope(kernel.rope(x, cos, sin, dtype=F32), cos, sin, inverse=True, dtype=F32)
    assert ((back - x).abs() <= 2.0**-21 * x.abs().amax()).all()


@pytest.mark.parametrize("fault", ["inverse", "halves", "next token", "first dims"])
def test_a_planted_fault_is_seen(fault, accelerator):
    x, (cos, sin) = draw(4, 2, 128, seed=5), turn(4)
    faulty, c, s = x, cos, sin
    if fault == "halves":  # pairs (i, i + 32) instead of neighbours
        faulty = torch.cat((x[..., :64], x[..., 64:].unflatten(-1, (2, 32)).mT.flatten(-2)), -1)
    elif fault == "next token":
        c, s = cos.roll(1, 0), sin.roll(1, 0)
    elif fault == "first dims":
        faulty = x.roll(64, -1)
    got = kernel.rope(*(t.to(accelerator) for t in (faulty, c, s)), inverse=fault == "inverse", dtype=F32)
    assert_fault_seen(lambda: assert_near(got, x, cos, sin))


def test_misfits_are_refused():
    x, (cos, sin) = torch.zeros(3, 2, 128), turn(3)
    with pytest.raises(ValueError, match="rope: sin"):
        kernel.rope(x, cos, sin[:2])
    with pytest.raises(ValueError, match="32 pairs of cos and sin do not fit rows of 48"):
        kernel.rope(torch.zeros(3, 48), cos, sin)
    with pytest.raises(TypeError, match="rope: cos"):
        kernel.rope(x, cos.double(), sin)
