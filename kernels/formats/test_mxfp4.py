"""MXFP4 against numpy and ml_dtypes, bit for bit; its floor, edges and refusals."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, mxfp4


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_bits_match_the_independent_implementation(num_tokens, device):
    x = _oracle.nasty_rows(num_tokens, 128, seed=num_tokens)
    want_codes, want_scale, want = _oracle.block_round(x, 32, "e2m1")
    codes, scale = mxfp4.quantise(torch.from_numpy(x).to(device))
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    _oracle.same_values(scale, want_scale)
    _oracle.same_values(mxfp4.dequantise(codes, scale), want)
    _oracle.same_values(mxfp4.round(torch.from_numpy(x).to(device)), want)


def test_every_bf16_value_alone_in_its_group(device):
    x = _oracle.all_bf16()[:, None]
    want_codes, want_scale, want = _oracle.block_round(x, 1, "e2m1")
    codes, scale = mxfp4.quantise(torch.from_numpy(x).to(device), 1)
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    _oracle.same_values(scale, want_scale)
    _oracle.same_values(mxfp4.dequantise(codes, scale, 1), want)


def test_amax_one_ulp_around_each_step_of_the_scale(device):
    step = 6 * np.exp2(np.arange(-125, 125).astype(np.float64))
    x = np.repeat(_oracle.neighbours(step)[..., None], 32, -1)  # [3, n, 32]
    codes, scale = mxfp4.quantise(torch.from_numpy(x).to(device))
    np.testing.assert_array_equal(scale[..., 0].cpu().numpy(), np.stack([step, step, 2 * step]) / 6)
    want = np.array([7, 7, 5])[:, None, None]  # 6, 6 and, on the next scale, 3
    np.testing.assert_array_equal(codes.cpu().numpy(), np.broadcast_to(want, x.shape))


def test_hand_computed_block(device):
    x = torch.zeros(32, device=device)
    x[:8] = torch.tensor([12.0, -12.0, 0.5, 1.5, 2.5, -0.25, 3.5, 7.0])
    codes, scale = mxfp4.quantise(x)
    assert scale.tolist() == [2.0]
    assert codes[:8].tolist() == [7, 15, 0, 2, 2, 8, 4, 6]
    assert mxfp4.dequantise(codes, scale)[:8].tolist() == [12.0, -12.0, 0.0, 2.0, 2.0, -0.0, 4.0, 8.0]


def test_zeros_have_the_smallest_scale_and_keep_their_sign(device):
    x = torch.zeros(2, 32, device=device)
    x[1] = -0.0
    codes, scale = mxfp4.quantise(x)
    assert scale[:, 0].tolist() == [2.0**-126] * 2
    assert codes.unique(dim=-1)[:, 0].tolist() == [0, 8]
    assert mxfp4.dequantise(codes, scale)[1].signbit().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_make_their_group_nan_and_no_other(bad, device):
    x = torch.ones(2, 96, device=device)
    x[1, 40] = bad
    want = torch.ones_like(x)
    want[1, 32:64] = float("nan")
    _oracle.same_values(mxfp4.round(x), want.cpu().numpy())
    codes, _ = mxfp4.quantise(x)
    assert codes[1, 32:64].unique().tolist() == [0]


def test_ends_of_the_range(device):
    x = torch.zeros(4, 32, device=device)
    x[:, 0] = torch.tensor([2.0**-127, 1e-45, 1.75 * 2.0**127, -1.74 * 2.0**127])
    want = [2.0**-127, 0.0, float("inf"), -1.5 * 2.0**127]
    assert mxfp4.round(x)[:, 0].tolist() == want


def test_error_is_within_the_stated_bound(device):
    x = torch.from_numpy(_oracle.nasty_rows(200, 64, seed=9)).to(device)
    codes, scale = mxfp4.quantise(x)
    error = (mxfp4.dequantise(codes, scale) - x).abs()
    assert (error <= torch.maximum(x.abs() / 4, scale.repeat_interleave(32, -1) / 4)).all()


def test_wrong_sizes_are_refused_with_shape_and_group(device):
    x = torch.zeros(3, 48, device=device)
    with pytest.raises(ValueError, match=r"group 32 .*\(3, 48\)"):
        mxfp4.quantise(x)
    codes, scale = mxfp4.quantise(x, 16)
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(3, 48\).*group 24"):
        mxfp4.dequantise(codes, scale, 24)
