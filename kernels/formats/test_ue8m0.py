"""UE8M0 over all bytes, and the choice of a scale one ulp around every power of two times the limit."""

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.formats import _oracle, ue8m0

BYTES = np.arange(256, dtype=np.uint8)


def test_every_byte_decodes_as_in_ml_dtypes(device):
    want = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = ue8m0.decode(torch.from_numpy(BYTES).to(device))
    _oracle.same_values(got, want)
    assert got[0].item() == 2.0**-127
    assert got[127].item() == 1.0
    assert got[255].isnan()


def test_every_byte_survives_a_round_trip(device):
    codes = torch.from_numpy(BYTES).to(device)
    assert torch.equal(ue8m0.encode(ue8m0.decode(codes)), codes)


@pytest.mark.parametrize("limit", [448.0, 6.0, 2.0, 57344.0, 3.625])
def test_scale_steps_one_ulp_after_each_power_of_two_times_limit(limit, device):
    with np.errstate(over="ignore"):
        product = np.exp2(np.arange(-126, 128).astype(np.float64)) * limit
    product = product[product <= np.finfo(np.float32).max]
    scale = product / limit
    x = torch.from_numpy(_oracle.neighbours(product)).to(device)
    got = ue8m0.scale_for(x, limit).cpu().numpy().astype(np.float64)
    np.testing.assert_array_equal(got[0], scale)
    np.testing.assert_array_equal(got[1], scale)
    np.testing.assert_array_equal(got[2], 2 * scale)


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_scale_meets_its_definition_for_every_bf16_magnitude(limit, device):
    x = np.abs(_oracle.all_bf16())
    got = ue8m0.scale_for(torch.from_numpy(x).to(device), limit)
    _oracle.same_values(got, _oracle.power_of_two(x, limit))


def test_scale_meets_its_definition_for_random_float32_bits(device):
    x = np.random.default_rng(1).integers(0, 2**31, 20_000).astype(np.uint32).view(np.float32)
    _oracle.same_values(ue8m0.scale_for(torch.from_numpy(x).to(device), 448), _oracle.power_of_two(x, 448.0))


def test_scale_for_subnormals_is_exact_where_the_limit_allows(device):
    amax = torch.tensor([2.0**-126, 2.0**-125, 2.0**-149, 0.0], device=device)
    assert ue8m0.scale_for(amax, 2).tolist() == [2.0**-127, 2.0**-126, 2.0**-127, 2.0**-127]


def test_non_finite_amax_has_a_nan_scale(device):
    amax = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device)
    scale = ue8m0.scale_for(amax, 448)
    assert scale.isnan().all()
    assert ue8m0.encode(scale).tolist() == [0xFF] * 3


def test_limit_is_compared_with_all_its_bits(device):
    limit = 3.0 + 2.0**-40  # float32(limit) is 3
    amax = torch.tensor([3.0, np.nextafter(np.float32(3), np.float32(4))], device=device)
    assert ue8m0.scale_for(amax, limit).tolist() == [1.0, 2.0]
    just_under = 3.0 - 2.0**-40
    assert ue8m0.scale_for(amax, just_under).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("limit", [1.0, 0.0, -6.0, float("inf"), float("nan")])
def test_a_limit_that_leaves_the_range_is_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        ue8m0.scale_for(torch.ones(1), limit)


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, float("inf"), 2.0**-128, 1.5 * 2.0**-127, 1 + 2.0**-23])
def test_what_is_no_power_of_two_is_refused(scale, device):
    with pytest.raises(ValueError, match=r"\(2,\)"):
        ue8m0.encode(torch.tensor([1.0, scale], device=device))
