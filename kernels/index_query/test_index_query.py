"""The indexer's query: what its steps are, and when MXFP4 as E4M3 is exact."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16, e2m1, e4m3, fp8_scaled, mxfp4, ue8m0
from kernels.hadamard.ref import hadamard
from kernels.index_query import ref
from kernels.rope.ref import cos_sin, inverse_frequencies, rope

H, D, SCALE = 5, 128, 128**-0.5 * 64**-0.5


def case(T, seed=0, decades=0.0):
    cos, sin = cos_sin(torch.arange(T) * 977, inverse_frequencies(64, 160000.0))
    q = draw(T, H, D, seed=seed, decades=decades).bfloat16()
    return q, cos, sin, draw(T, H, seed=seed + 1).bfloat16()


def test_fp8_scores_are_of_the_rounded_query():
    q, cos, sin, weights = case(4)
    codes, folded = ref.query_fp8(q, cos, sin, weights, scale=SCALE, store=bf16.round)
    turned = bf16.round(rope(q.float(), cos, sin))
    wanted, scale = fp8_scaled.quantise(turned)
    assert_bitwise(codes, wanted)
    assert_bitwise(folded, (weights.double() * SCALE).float() * scale.squeeze(-1))
    assert_differs(codes, fp8_scaled.quantise(q.float())[0])  # no RoPE
    assert_differs(codes, fp8_scaled.quantise(rope(q.float(), cos, sin))[0])  # no store


def test_fp4_is_of_the_rotated_query():
    q, cos, sin, weights = case(4, seed=3)
    codes, scales, plain = ref.query_fp4(q, cos, sin, weights, scale=SCALE, store=bf16.round)
    got = mxfp4.dequantise(e2m1.unpack(codes), ue8m0.decode(scales))
    turned = bf16.round(rope(q.float(), cos, sin))
    assert_bitwise(got, mxfp4.round(hadamard(turned)))
    assert_differs(got, mxfp4.round(turned))
    assert_bitwise(plain, (weights.double() * SCALE).float())


@pytest.mark.parametrize("spread", [0, 7, 14])
def test_folding_is_exact_while_scales_lie_near_each_other(spread):
    values = e2m1.decode((torch.arange(2 * D) % 16).to(torch.uint8)).view(1, 2, D)
    scale = torch.ones(1, 2, 4)
    scale[0, 0, 1], scale[0, 1, 3] = 2.0**-spread, 2.0**spread
    codes = e2m1.pack(e2m1.encode(values))
    folded, weights = ref.folded(codes, ue8m0.encode(scale), torch.ones(1, 2))
    stated = (values.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)
    assert_bitwise(e4m3.decode(folded) * weights[..., None], stated)


def test_folding_beyond_that_loses_what_is_small():
    values = torch.ones(1, 1, D)
    scale = torch.tensor([[[1.0, 2.0**-15, 2.0**-16, 2.0**-30]]])
    folded, weights = ref.folded(e2m1.pack(e2m1.encode(values)), ue8m0.encode(scale), torch.ones(1, 1))
    got = (e4m3.decode(folded) * weights[..., None]).unflatten(-1, (-1, 32))[0, 0, :, 0]
    assert got.tolist() == [1.0, 2.0**-15, 0.0, 0.0]  # 2^-16: a tie with zero, the even one
    bound = 2.0**-10 * float(weights)
    assert bool(((got - scale[0, 0]).abs() <= bound).all())
    assert (
        bound <= 2.0**-16
    )  # of the largest value here, 1; of the 3 or more that a scale's group holds, 2^-17


def test_a_group_that_is_lost_makes_its_head_nan():
    q, cos, sin, weights = case(2, seed=5)
    q[1, 2, 7] = math.inf
    codes, scales, plain = ref.query_fp4(q, cos, sin, weights, scale=SCALE, store=bf16.round)
    folded, out = ref.folded(codes, scales, plain)
    bad = torch.zeros(2, H, dtype=torch.bool)
    bad[1, 2] = True
    assert bool(e4m3.decode(folded)[bad].isnan().all())
    assert bool(e4m3.decode(folded)[~bad].isfinite().all())
    assert bool(out[~bad].isfinite().all())
