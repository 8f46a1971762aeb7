"""q's kernel has the values of the norm and the turn, and the ref's record of them, bit for bit."""

from functools import cache

import pytest
import torch

from kernels._check import assert_bitwise, assert_fault_seen, draw
from kernels.q_norm_rope_quantise import kernel, ref
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.kernel import rope
from kernels.rope.ref import cos_sin, inverse_frequencies

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
SHAPES = [(0, 8, 512), (1, 64, 512), (3, 5, 256), (2, 7, 512), (130, 3, 128), (1, 127, 192)]
pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(T, H, K, device, dtype=BF16):
    turn = cos_sin(torch.arange(T) * 977 + 3, inverse_frequencies(64, 1e4))
    return [t.to(device) for t in (draw(T, H, K, seed=1, decades=1).to(dtype), *turn)]


def unfused(q, cos, sin):
    """The kernels in turn: the norm's FP32 rows, turned and stored as BF16."""
    normed = rmsnorm(q.flatten(0, 1), None, eps=EPS, dtype=F32).view(q.shape)
    return rope(normed, cos, sin, dtype=BF16)


@cache
def known_unfused(T, H, K, device):
    """Of FP32 :func:`inputs`, made once for all that is made of it."""
    return unfused(*inputs(T, H, K, device, F32)).cpu()


def assert_same(got, want):
    for part, wanted in zip(got, want, strict=True):
        assert (part is None) == (wanted is None)
        if part is not None:
            assert_bitwise(part.cpu(), wanted.cpu())


@pytest.mark.parametrize(("T", "H", "K"), SHAPES)
def test_bf16_is_the_norm_and_the_turn(T, H, K, accelerator):
    args = inputs(T, H, K, accelerator)
    assert_bitwise(kernel.norm_rope(*args, eps=EPS).float().cpu(), unfused(*args).float().cpu())


@pytest.mark.parametrize("residual", [False, True], ids=["one term", "two terms"])
@pytest.mark.parametrize(("T", "H", "K"), SHAPES)
def test_the_record_is_the_ref_s_of_the_unfused_values(T, H, K, residual, accelerator):
    args = inputs(T, H, K, accelerator, F32)
    got = kernel.norm_rope_quantise(*args, eps=EPS, residual=residual)
    assert_same(got, ref.quantise(known_unfused(T, H, K, accelerator), residual=residual))


def test_values_are_the_ref_s_but_next_to_an_edge(accelerator):
    args = inputs(3, 8, 512, accelerator)
    got = kernel.norm_rope_quantise(*args, eps=EPS)
    want = ref.norm_rope_quantise(*(t.cpu().float() for t in args), eps=EPS)
    assert_bitwise(got.scale.cpu(), want.scale)
    # 12 ulp against BF16's step of 2^16: one in five thousand; an E4M3 edge is met by fewer
    assert (got.record.cpu() != want.record).double().mean() < 2e-3


def test_two_terms_are_as_good_as_bf16(accelerator):
    args = inputs(2, 8, 512, accelerator)
    made = kernel.norm_rope_quantise(*args, eps=EPS, residual=True)
    codes = [
        part[..., :448].cpu().view(torch.float8_e4m3fn).double() for part in (made.record, made.residual)
    ]
    q = kernel.norm_rope(*args, eps=EPS)[..., :448].cpu().double()
    value = (codes[0] + codes[1]) * made.scale.cpu().double()[..., None]
    assert (value - q).norm() <= 2.0**-8 * q.norm()
    one_term = codes[0] * made.scale.cpu().double()[..., None]
    assert_fault_seen(lambda: _assert_at_most((one_term - q).norm(), 2.0**-8 * q.norm()))


def _assert_at_most(value, most):
    assert value <= most


def test_strided_tokens_and_rows_alone(accelerator):
    q, cos, sin = inputs(6, 5, 256, accelerator)
    some = q[::2], cos[::2].contiguous(), sin[::2].contiguous()
    whole = kernel.norm_rope_quantise(*some, eps=EPS, residual=True)
    for row in range(3):
        alone = kernel.norm_rope_quantise(*(t[row : row + 1] for t in some), eps=EPS, residual=True)
        assert_same(alone, [part[row : row + 1] for part in whole])


def test_out_is_written(accelerator):
    args = inputs(2, 3, 256, accelerator)
    made = kernel.norm_rope_quantise(*args, eps=EPS, residual=True)
    out = ref.QuantisedQ(*(torch.empty_like(part) for part in made))
    assert kernel.norm_rope_quantise(*args, eps=EPS, out=out) is out
    assert_same(out, made)
    y = torch.empty(2, 3, 256, dtype=BF16, device=accelerator)
    assert kernel.norm_rope(*args, eps=EPS, out=y) is y
    assert_bitwise(y.float().cpu(), unfused(*args).float().cpu())


def test_special_heads_are_their_own(accelerator):
    q, cos, sin = inputs(1, 5, 256, accelerator, F32)
    q[0, 1], q[0, 2, 7], q[0, 3] = 0.0, float("nan"), 1e-30
    q[0, 4, 192:] *= 100  # the scale is of nope alone
    got = kernel.norm_rope_quantise(q, cos, sin, eps=EPS, residual=True)
    want = ref.quantise(unfused(q, cos, sin).cpu(), residual=True)
    assert_bitwise(got.scale.cpu(), want.scale)
    assert got.scale.isnan().tolist() == [[False, False, True, False, False]]
    finite = [0, 1, 3, 4]
    assert_same([part[:, finite] for part in got], [part[:, finite] for part in want])


@pytest.mark.parametrize("fault", ["a scale for all heads", "no BF16 store", "rope unscaled", "next token"])
def test_a_planted_fault_is_seen(fault, accelerator):
    q, cos, sin = inputs(3, 4, 256, accelerator, F32)
    got = kernel.norm_rope_quantise(q, cos, sin, eps=EPS)
    values = unfused(q, cos, sin).cpu().float()
    if fault == "next token":
        values = unfused(q, cos.roll(1, 0), sin.roll(1, 0)).cpu().float()
    want = ref.quantise(values)
    if fault == "a scale for all heads":
        want = want._replace(scale=want.scale.amax(-1, keepdim=True).expand_as(want.scale).contiguous() * 2)
    elif fault == "no BF16 store":
        normed = rmsnorm(q.flatten(0, 1), None, eps=EPS, dtype=F32).view(q.shape)
        exact = rope(normed, cos, sin, dtype=F32).cpu()
        codes = ref.e4m3.encode(exact[..., :192] / want.scale[..., None])
        want = want._replace(record=torch.cat((codes, want.record[..., 192:]), -1))
    elif fault == "rope unscaled":
        want = want._replace(
            record=torch.cat((want.record[..., :192], ref.rope_bytes(values[..., 192:])), -1)
        )
    assert_fault_seen(lambda: assert_same(got, want))


def test_misfits_are_refused():
    q, cos, sin = inputs(3, 2, 256, "cpu")
    with pytest.raises(ValueError, match="heads not dense"):
        kernel.norm_rope(q[..., :200], cos, sin, eps=EPS)
    with pytest.raises(ValueError, match="q_norm_rope_quantise: sin"):
        kernel.norm_rope_quantise(q, cos, sin[:2], eps=EPS)
    with pytest.raises(TypeError, match="q_norm_rope: q"):
        kernel.norm_rope(q.double(), cos, sin, eps=EPS)
