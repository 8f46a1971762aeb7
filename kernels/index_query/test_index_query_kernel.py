"""The query's kernel against the ref, bit for bit, in its three forms."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16, e4m3
from kernels.index_query import kernel, ref
from kernels.rope.ref import cos_sin, inverse_frequencies
from kernels.rounding import exact

D, SCALE = 128, 128**-0.5 * 64**-0.5


def case(T, H, seed=0, decades=0.0):
    cos, sin = cos_sin(torch.arange(T) * 977 + 5, inverse_frequencies(64, 160000.0))
    q = draw(T, H, D, seed=seed, decades=decades).bfloat16()
    return q, cos, sin, draw(T, H, seed=seed + 1).bfloat16()


def wanted(form, q, *tensors):
    store = bf16.round if q.dtype == torch.bfloat16 else exact
    if form == "fp8":
        return ref.query_fp8(q, *tensors, scale=SCALE, store=store)
    packed = ref.query_fp4(q, *tensors, scale=SCALE, store=store)
    return packed if form == "fp4" else ref.folded(*packed)


def assert_same(form, device, *tensors):
    """All outputs equal the ref's; E4M3 NaNs of either sign are alike."""
    got = kernel.index_query(*(x.to(device) for x in tensors), scale=SCALE, form=form)
    for mine, want in zip(got, wanted(form, *tensors), strict=True):
        mine = mine.cpu()
        if mine.dtype == torch.float8_e4m3fn:
            mine, want = e4m3.decode(mine.view(torch.uint8)), e4m3.decode(want)
        assert_bitwise(mine, want)


@pytest.mark.parametrize("form", kernel.FORMS)
@pytest.mark.parametrize(
    ("T", "H", "decades"), [(1, 64, 0.0), (3, 5, 2.0), (0, 4, 0.0), (9, 1, 0.5), (2, 17, 4.0)]
)
def test_equals_the_ref(form, T, H, decades, accelerator):
    assert_same(form, accelerator, *case(T, H, decades=decades))


@pytest.mark.parametrize("form", kernel.FORMS)
def test_a_query_that_nothing_stored_is_quantised_as_it_is(form, accelerator):
    _, cos, sin, weights = case(3, 9)
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    q = draw(3, 9, D, seed=21)
    assert_same(form, accelerator, q, cos, sin, weights)
    stored = kernel.index_query(
        *(x.to(accelerator) for x in (q.bfloat16(), cos, sin, weights)), scale=SCALE, form=form
    )
    assert_differs(wanted(form, q, cos, sin, weights)[0], stored[0].cpu().view(torch.uint8))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on NaN and overflow
@pytest.mark.parametrize("form", kernel.FORMS)
def test_special_rows(form, accelerator):
    q, cos, sin, weights = case(2, 8, seed=5)
    q[0, 0], q[0, 1], q[0, 2, :64] = 0.0, -0.0 if form == "fp8" else 0.0, -0.0
    q[0, 3, 70], q[0, 4, 3], q[0, 5, 127] = math.nan, math.inf, -math.inf
    q[1, 0], q[1, 1], q[1, 2] = 3e38, 1e-38, 1.0
    q[1, 3, 64:] = 0.0
    weights[1, 4] = math.nan
    assert_same(form, accelerator, q, cos, sin, weights)


def test_a_head_of_negative_zeros_is_zero(accelerator):
    """A Hadamard sum of zeros has the sign of the order it is taken in: any zero will do."""
    q, cos, sin, weights = case(1, 4, seed=13)
    q[:] = -0.0
    args = (x.to(accelerator) for x in (q, cos, sin, weights))
    codes = kernel.index_query(*args, scale=SCALE, form="fp4")[0].cpu()
    assert bool(((codes & 0x77) == 0).all())


@pytest.mark.parametrize("form", kernel.FORMS)
def test_strided_tokens(form, accelerator):
    q, cos, sin, weights = case(3, 6, seed=7)
    wide = torch.full((3, 8 * D + 16), math.nan).bfloat16()
    wide[:, : 6 * D] = q.flatten(1)
    heads = torch.full((3, 9), math.nan).bfloat16()
    heads[:, :6] = weights
    strided = wide.to(accelerator)[:, : 6 * D].unflatten(1, (6, D))
    args = (strided, cos.to(accelerator), sin.to(accelerator), heads.to(accelerator)[:, :6])
    got = kernel.index_query(*args, scale=SCALE, form=form)
    dense = kernel.index_query(*(x.contiguous() for x in args), scale=SCALE, form=form)
    for mine, want in zip(got, dense, strict=True):
        view = torch.uint8 if mine.element_size() == 1 else mine.dtype
        assert_bitwise(mine.view(view).cpu(), want.view(view).cpu())


def test_refuses(accelerator):
    q, cos, sin, weights = (x.to(accelerator) for x in case(2, 4))
    with pytest.raises(ValueError, match="form = 'fp6'"):
        kernel.index_query(q, cos, sin, weights, scale=SCALE, form="fp6")
    with pytest.raises(TypeError, match="q is"):
        kernel.index_query(q.half(), cos, sin, weights, scale=SCALE)
    with pytest.raises(ValueError, match="heads must be dense"):
        kernel.index_query(q.transpose(0, 1).contiguous().transpose(0, 1), cos, sin, weights, scale=SCALE)


@pytest.mark.parametrize("form", kernel.FORMS)
def test_faults_would_show(form, accelerator):
    q, cos, sin, weights = case(3, 8, seed=11)
    codes = kernel.index_query(*(x.to(accelerator) for x in (q, cos, sin, weights)), scale=SCALE, form=form)[
        0
    ]
    codes = codes.view(torch.uint8).cpu()
    assert_differs(codes, wanted(form, q, cos, -sin, weights)[0])  # the rotation's direction
    assert_differs(codes, wanted(form, q, cos.roll(1, 1), sin.roll(1, 1), weights)[0])  # pairs
    assert_differs(codes, wanted(form, q, cos.roll(1, 0), sin.roll(1, 0), weights)[0])  # positions
    halves = torch.cat((q[..., :64], q[..., 64::2], q[..., 65::2]), -1)
    assert_differs(codes, wanted(form, halves, cos, sin, weights)[0])  # halves instead of neighbours
