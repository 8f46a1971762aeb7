"""E4M3 with a float32 scale per vector, against numpy and ml_dtypes, bit for bit."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, e4m3, fp8_scaled

F32 = np.float32


def _by_numpy(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, one float32 operation at a time."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), F32(1e-4)) / F32(448)
    return _oracle.e4m3_encode(x * (F32(1) / scale)), scale


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_bits_match_the_independent_implementation(num_tokens, device):
    x = _oracle.nasty_rows(num_tokens, 128, seed=num_tokens)
    want_codes, want_scale = _by_numpy(x)
    codes, scale = fp8_scaled.quantise(torch.from_numpy(x).to(device))
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    _oracle.same_values(scale, want_scale)
    want = _oracle.e4m3_decode(want_codes) * want_scale
    _oracle.same_values(fp8_scaled.round(torch.from_numpy(x).to(device)), want)


def test_codes_at_rounding_boundaries_follow_the_stated_operations(device):
    amax = np.random.default_rng(2).uniform(1, 2, (500, 1)).astype(F32)
    lower = np.arange(8, 0x7E, dtype=np.uint8)
    middle = (_oracle.e4m3_decode(lower) + _oracle.e4m3_decode(lower + 1)) / 2
    scale = amax / F32(448)
    x = np.concatenate([amax, *_oracle.neighbours(middle * scale)], -1)
    want, _ = _by_numpy(x)
    np.testing.assert_array_equal(fp8_scaled.quantise(torch.from_numpy(x).to(device))[0].cpu().numpy(), want)
    assert (_oracle.e4m3_encode(x / scale) != want).any()  # so that a division would show here


def test_largest_value_gets_the_largest_code_whatever_the_scale_rounds_to(device):
    x = np.random.default_rng(0).uniform(1e-3, 1e3, (50_000, 1)).astype(F32)
    codes, _ = fp8_scaled.quantise(torch.from_numpy(x).to(device))
    assert codes.unique().tolist() == [0x7E]


def test_division_is_rounded_once_on_every_device(device):
    x = np.random.default_rng(1).uniform(1, 2, (50_000, 1)).astype(F32)
    _, scale = fp8_scaled.quantise(torch.from_numpy(x).to(device))
    np.testing.assert_array_equal(scale.cpu().numpy(), x / F32(448))
    assert (x / F32(448) != x * F32(1 / 448)).any()  # so that a reciprocal would show here


def test_floor_on_amax_is_1e_4(device):
    x = torch.zeros(3, 128, device=device)
    x[1] = -0.0
    x[2, 0] = 1e-6
    codes, scale = fp8_scaled.quantise(x)
    assert scale.flatten().tolist() == [float(F32(1e-4) / F32(448))] * 3
    assert codes[0].unique().tolist() == [0]
    assert codes[1].unique().tolist() == [0x80]
    assert e4m3.decode(codes[2, 0]).item() == 4.5  # 4.48


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_make_their_vector_nan_and_no_other(bad, device):
    x = torch.ones(3, 128, device=device)
    x[1, 40] = bad
    _, scale = fp8_scaled.quantise(x)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    assert fp8_scaled.round(x).isnan().all(-1).tolist() == [False, True, False]


def test_huge_and_subnormal_vectors(device):
    largest = float(np.finfo(np.float32).max)
    x = torch.tensor([[largest, -largest / 2], [1e-45, 1e-40]], device=device)
    got = fp8_scaled.round(x)
    assert not got.isnan().any()
    assert got[1].tolist() == [0.0, 0.0]
    assert got[0, 1].item() == pytest.approx(-largest / 2, rel=1 / 16)


def test_wrong_shape_of_scale_is_refused(device):
    codes, scale = fp8_scaled.quantise(torch.zeros(3, 8, device=device))
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 8\)"):
        fp8_scaled.dequantise(codes, scale[:, 0])
