"""FP8 block format against numpy and ml_dtypes, bit for bit; its floor, edges and refusals."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, e4m3, fp8_block

FLT_MAX = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_bits_match_the_independent_implementation(num_tokens, group, device):
    x = _oracle.nasty_rows(num_tokens, 384, seed=num_tokens)
    want_codes, want_scale, want = _oracle.block_round(x, group, "e4m3")
    codes, scale = fp8_block.quantise(torch.from_numpy(x).to(device), group)
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    _oracle.same_values(scale, want_scale)
    _oracle.same_values(fp8_block.dequantise(codes, scale, group), want)
    _oracle.same_values(fp8_block.round(torch.from_numpy(x).to(device), group), want)


def test_every_bf16_value_alone_in_its_group(device):
    x = _oracle.all_bf16()[:, None]
    want_codes, want_scale, want = _oracle.block_round(x, 1, "e4m3")
    codes, scale = fp8_block.quantise(torch.from_numpy(x).to(device), 1)
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    _oracle.same_values(scale, want_scale)
    _oracle.same_values(fp8_block.dequantise(codes, scale, 1), want)


def test_amax_one_ulp_around_each_step_of_the_scale(device):
    step = 448 * np.exp2(np.arange(-22, 120).astype(np.float64))
    x = np.repeat(_oracle.neighbours(step)[..., None], 64, -1)  # [3, n, 64]
    codes, scale = fp8_block.quantise(torch.from_numpy(x).to(device), 64)
    scale = scale[..., 0].cpu().numpy()
    np.testing.assert_array_equal(scale, np.stack([step, step, 2 * step]) / 448)
    want = np.array([0x7E, 0x7E, 0x76])[:, None, None]  # 448, 448 and, on the next scale, 224
    np.testing.assert_array_equal(codes.cpu().numpy(), np.broadcast_to(want, x.shape))


def test_floor_on_amax_is_1e_4(device):
    x = torch.zeros(4, 64, device=device)
    x[1] = -0.0
    x[2] = 1e-4
    x[3, 0] = 1.1e-4  # over 448 * 2^-22 = 1.068e-4
    codes, scale = fp8_block.quantise(x, 64)
    assert scale[:, 0].tolist() == [2.0**-22, 2.0**-22, 2.0**-22, 2.0**-21]
    assert codes[0].unique().tolist() == [0]
    assert codes[1].unique().tolist() == [0x80]
    assert torch.equal(fp8_block.dequantise(codes, scale, 64)[1].signbit(), x[1].signbit())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_make_their_group_nan_and_no_other(bad, device):
    x = torch.ones(2, 256, device=device)
    x[1, 70] = bad
    got = fp8_block.round(x, 64)
    want = torch.ones_like(x)
    want[1, 64:128] = float("nan")
    _oracle.same_values(got, want.cpu().numpy())


def test_subnormals_vanish_and_the_largest_values_overflow_as_stated(device):
    x = torch.zeros(5, 64, device=device)
    x[:, 0] = torch.tensor([1e-45, 1.17e-38, FLT_MAX, 1.9375 * 2.0**127, -1.9374 * 2.0**127])
    want = [0.0, 0.0, float("inf"), float("inf"), -1.875 * 2.0**127]
    assert fp8_block.round(x, 64)[:, 0].tolist() == want


def test_error_is_within_the_stated_bound(device):
    x = torch.from_numpy(_oracle.nasty_rows(200, 128, seed=9)).to(device).double()
    codes, scale = fp8_block.quantise(x, 128)
    error = (fp8_block.dequantise(codes, scale, 128).double() - x.float().double()).abs()
    assert (error <= torch.maximum(x.abs() / 16, scale.double() / 1024)).all()


def _weight_by_loop(w: np.ndarray, block: int) -> np.ndarray:
    """Round every square on its own."""
    out = np.empty_like(w)
    for row in range(0, w.shape[0], block):
        for col in range(0, w.shape[1], block):
            square = w[row : row + block, col : col + block]
            _, _, values = _oracle.block_round(square.reshape(1, -1), square.size, "e4m3")
            out[row : row + block, col : col + block] = values.reshape(square.shape)
    return out


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (129, 255), (1, 300), (127, 1), (5, 7)])
def test_weight_squares_match_a_loop_over_them(shape, device):
    w = _oracle.nasty_rows(*shape, seed=shape[1])
    on_device = torch.from_numpy(w).to(device)
    codes, scale = fp8_block.quantise_weight(on_device)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    _oracle.same_values(fp8_block.dequantise_weight(codes, scale), _weight_by_loop(w, 128))
    flipped, flipped_scale = fp8_block.quantise_weight(on_device.T)
    assert torch.equal(flipped, codes.T)
    assert torch.equal(flipped_scale, scale.T)


def test_experts_are_weights_of_their_own(device):
    w = torch.from_numpy(_oracle.nasty_rows(3 * 40, 50, seed=1)).to(device).reshape(3, 40, 50)
    codes, scale = fp8_block.quantise_weight(w, 32)
    assert scale.shape == (3, 2, 2)
    for expert in range(3):
        one, one_scale = fp8_block.quantise_weight(w[expert], 32)
        assert torch.equal(codes[expert], one)
        assert torch.equal(scale[expert], one_scale)


def test_nan_in_a_weight_stays_in_its_square(device):
    w = torch.ones(200, 200, device=device)
    w[150, 10] = float("nan")
    values = fp8_block.dequantise_weight(*fp8_block.quantise_weight(w))
    assert values[128:, :128].isnan().all()
    assert int(values.isnan().sum()) == 72 * 128


def test_wrong_sizes_are_refused_with_shape_and_group(device):
    x = torch.zeros(3, 100, device=device)
    for bad in (64, 0, -4):
        with pytest.raises(ValueError, match=rf"group {bad} .*\(3, 100\)"):
            fp8_block.quantise(x, bad)
    codes, scale = fp8_block.quantise(x, 50)
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(3, 100\).*group 25.*\(3, 4\)"):
        fp8_block.dequantise(codes, scale, 25)
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(3, 100\).*block 128"):
        fp8_block.dequantise_weight(codes, scale)
    with pytest.raises(ValueError, match=r"\(100,\)"):
        fp8_block.quantise_weight(x[0])


def test_codes_never_hold_nan_for_finite_input(device):
    codes, _ = fp8_block.quantise(torch.from_numpy(_oracle.nasty_rows(50, 64, seed=3)).to(device), 64)
    assert not e4m3.decode(codes).isnan().any()
