"""NVFP4 against numpy and ml_dtypes, bit for bit; zeros, tiny, huge and non-finite rows, shapes of gsa."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, e4m3, nvfp4

F32 = np.float32


def _by_numpy(x: np.ndarray, gsa: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale codes and values of finite ``x``, one float32 operation at a time."""
    with np.errstate(all="ignore"):
        if gsa is None:
            gsa = np.abs(x).max(-1, keepdims=True) / F32(2688)
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
        ideal = np.where(gsa == 0, F32(0), np.abs(groups).max(-1) / F32(6) / gsa)
        scale_codes = _oracle.e4m3_encode(ideal)
        step = (_oracle.e4m3_decode(scale_codes) * gsa)[..., None]
        codes = np.where(step == 0, np.uint8(0), _oracle.e2m1_encode(groups / step))
        scaled = _oracle.e2m1_decode(codes) * _oracle.e4m3_decode(scale_codes)[..., None]
    return codes.reshape(x.shape), scale_codes, scaled.reshape(x.shape) * gsa


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_bits_match_the_independent_implementation(num_tokens, device):
    x = _oracle.nasty_rows(num_tokens, 128, seed=num_tokens)
    want_codes, want_scale, want = _by_numpy(x)
    codes, scale_codes, gsa = nvfp4.quantise(torch.from_numpy(x).to(device))
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    np.testing.assert_array_equal(scale_codes.cpu().numpy(), want_scale)
    _oracle.same_values(nvfp4.dequantise(codes, scale_codes, gsa), want)
    _oracle.same_values(nvfp4.round(torch.from_numpy(x).to(device)), want)


def test_scales_at_rounding_boundaries_follow_the_stated_operations(device):
    rng = np.random.default_rng(0)
    lower = rng.integers(8, 0x7D, (4000, 1)).astype(np.uint8)
    middle = (_oracle.e4m3_decode(lower) + _oracle.e4m3_decode(lower + 1)) / 2
    gsa = rng.uniform(0.5, 2, (4000, 1)).astype(F32)
    x = _oracle.neighbours(middle * F32(6) * gsa).transpose(1, 0, 2).repeat(16, -1)  # [4000, 3, 16]
    _, scale_codes, _ = nvfp4.quantise(
        torch.from_numpy(x).to(device), torch.from_numpy(gsa[..., None]).to(device)
    )
    amax = x[..., :1]
    want = _oracle.e4m3_encode(amax / F32(6) / gsa[..., None])
    np.testing.assert_array_equal(scale_codes.cpu().numpy(), want)
    for other in (amax / (F32(6) * gsa[..., None]), amax / gsa[..., None] / F32(6)):
        assert (_oracle.e4m3_encode(other) != want).any()  # so that another order would show here


def test_codes_at_rounding_boundaries_follow_the_stated_operations(device):
    rng = np.random.default_rng(1)
    row_amax = rng.uniform(1, 2, (4000, 1)).astype(F32)
    middle = np.array([0.25, 0.75, 1.25, 1.75, 2.5], dtype=F32)
    step = F32(448) * (row_amax / F32(2688))
    x = np.concatenate([row_amax, *_oracle.neighbours(middle * step)], -1)  # [4000, 16]
    want, scale_codes, _ = _by_numpy(x)
    assert set(scale_codes.flat) == {0x7E}
    np.testing.assert_array_equal(nvfp4.quantise(torch.from_numpy(x).to(device))[0].cpu().numpy(), want)
    gsa = row_amax / F32(2688)
    for other in (x * (F32(1) / step), x / gsa / F32(448)):
        assert (_oracle.e2m1_encode(other) != want).any()


def test_every_code_times_every_scale_is_exact_even_in_bf16(device):
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat(256, 1)
    scale_codes = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    got = nvfp4.scaled_values(codes, scale_codes)
    values = _oracle.e2m1_decode(np.arange(16, dtype=np.uint8)).astype(np.float64)
    scales = _oracle.e4m3_decode(np.arange(256, dtype=np.uint8)).astype(np.float64)
    want = scales[:, None] * values
    _oracle.same_values(got, want.astype(F32))
    np.testing.assert_array_equal(got.cpu().numpy().astype(np.float64), want)
    assert torch.equal(got.bfloat16().float().nan_to_num(), got.nan_to_num())


def test_hand_computed_row(device):
    x = torch.zeros(48, device=device)
    x[0], x[1] = 2688.0, -224.0  # gsa 1, scale 448
    x[16], x[17], x[18] = 6.0, 2.5, -0.25  # scale 1
    codes, scale_codes, gsa = nvfp4.quantise(x)
    assert gsa.tolist() == [1.0]
    assert e4m3.decode(scale_codes).tolist() == [448.0, 1.0, 0.0]
    assert codes[:2].tolist() == [7, 9]  # 6 and -0.5
    assert codes[16:19].tolist() == [7, 4, 8]  # 6, the tie 2.5 down to 2, the tie -0.25 to -0
    assert nvfp4.dequantise(codes, scale_codes, gsa)[[0, 1, 16, 17]].tolist() == [2688.0, -224.0, 6.0, 2.0]


def test_row_of_zeros_is_zero_and_not_nan(device):
    x = torch.zeros(3, 32, device=device)
    x[1] = 1.0
    x[2] = -0.0
    codes, scale_codes, gsa = nvfp4.quantise(x)
    assert gsa[[0, 2], 0].tolist() == [0.0, 0.0]
    assert not codes[[0, 2]].any()
    assert not scale_codes[[0, 2]].any()
    assert nvfp4.round(x)[[0, 2]].unique().tolist() == [0.0]
    assert nvfp4.round(x)[1].isfinite().all()


def test_block_whose_scale_rounds_to_zero_has_codes_zero(device):
    x = torch.zeros(2, 32, device=device)
    x[:, 0] = 2688.0
    x[0, 16:] = -6 * 2.0**-10  # scale 2^-10, a tie with 0
    x[1, 16:] = -6 * 2.0**-10 * (1 + 2.0**-23)  # just over: the smallest scale, 2^-9
    codes, scale_codes, _ = nvfp4.quantise(x)
    assert scale_codes[:, 1].tolist() == [0, 1]
    assert not codes[0, 16:].any()
    assert nvfp4.round(x)[1, 16:].unique().tolist() == [-3 * 2.0**-9]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_make_their_row_nan(bad, device):
    x = torch.ones(3, 64, device=device)
    x[1, 5] = bad
    assert nvfp4.row_gsa(x).isnan().flatten().tolist() == [False, True, False]
    assert nvfp4.round(x).isnan().all(-1).tolist() == [False, True, False]
    assert nvfp4.round(x)[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gsa", [1.0, 0.0])
def test_non_finite_values_make_their_block_nan_under_a_given_gsa(gsa, bad, device):
    x = torch.ones(1, 32, device=device)
    x[0, 5] = bad
    assert nvfp4.round(x, gsa)[0, :16].isnan().all()  # not saturated to 6 * 448
    assert nvfp4.round(x, gsa)[0, 16:].isfinite().all()


@pytest.mark.parametrize("gsa", [float("nan"), float("inf")])
def test_non_finite_gsa_makes_everything_nan(gsa, device):
    assert nvfp4.round(torch.ones(2, 32, device=device), gsa).isnan().all()


def test_tiny_and_huge_rows(device):
    amax = torch.tensor([3.4e38, 1e30, 1e-30, 1e-34, 1e-38, 1e-40, 1e-45], device=device)
    x = torch.linspace(-1, 1, 32, device=device) * amax[:, None]
    got = nvfp4.round(x)
    assert not got.isnan().any()
    error = ((got - x).abs().amax(-1).double() / amax).tolist()
    assert max(error[:4]) < 1 / 6  # a step of 2 at 6, halved
    assert error[4] < 1 / 3  # gsa is subnormal: 1 to 11 bits
    assert got[6].tolist() == [0.0] * 32  # gsa is 0


def test_one_gsa_for_all_and_one_per_expert(device):
    x = torch.from_numpy(_oracle.nasty_rows(24, 64, seed=5)).to(device).reshape(2, 12, 64)
    one = torch.tensor(0.37, device=device)
    codes, scale_codes, gsa = nvfp4.quantise(x, one)
    assert gsa.shape == (2, 12, 1)
    want = _by_numpy(x.cpu().numpy(), np.full((2, 12, 1), F32(0.37)))
    np.testing.assert_array_equal(codes.cpu().numpy(), want[0])
    np.testing.assert_array_equal(scale_codes.cpu().numpy(), want[1])
    assert torch.equal(nvfp4.round(x, one), nvfp4.round(x, 0.37))
    per_expert = torch.tensor([0.37, 0.05], device=device)[:, None, None]
    got = nvfp4.round(x, per_expert)
    assert torch.equal(got[0], nvfp4.round(x[0], 0.37))
    assert torch.equal(got[1], nvfp4.round(x[1], 0.05))
    assert torch.equal(nvfp4.round(x, nvfp4.row_gsa(x)), nvfp4.round(x))


def test_too_small_a_gsa_saturates(device):
    assert nvfp4.round(torch.full((1, 16), -1e4, device=device), 1.0).unique().tolist() == [-2688.0]


def test_wrong_sizes_are_refused_with_shape_and_group(device):
    x = torch.zeros(3, 40, device=device)
    with pytest.raises(ValueError, match=r"group 16 .*\(3, 40\)"):
        nvfp4.quantise(x)
    x = torch.zeros(3, 32, device=device)
    for bad in (
        torch.zeros(3, device=device),
        torch.zeros(2, 1, device=device),
        torch.zeros(1, 3, 1, device=device),
    ):
        with pytest.raises(ValueError, match=r"gsa of shape .*\(3, 1\)"):
            nvfp4.quantise(x, bad)
    codes, scale_codes, _ = nvfp4.quantise(x)
    with pytest.raises(ValueError, match=r"\(3, 1\).*\(3, 32\).*group 16"):
        nvfp4.scaled_values(codes, scale_codes[:, :1])
