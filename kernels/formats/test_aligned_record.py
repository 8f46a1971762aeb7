"""Aligned record: its bytes against the KV record's values, its error bound, and what is exact."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, aligned_record, bf16, fp8_block
from kernels.formats.kv_record import RecordLayout

BOUND = 4.4e-6  # of the token's largest nope value; design: 2^-10 / 224 = 4.36e-6


def _uneven(num_tokens: int, seed: int) -> torch.Tensor:
    """Tokens whose seven groups of 64 differ by up to 2^16 in size, so that shifts are long."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, 512)) * np.exp2(rng.integers(-8, 9, (num_tokens, 8))).repeat(64, -1)
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_bytes_match_the_independent_implementation(num_tokens, device):
    x = _uneven(num_tokens, seed=num_tokens)
    data, scale = aligned_record.encode(x.to(device))
    assert data.shape == (num_tokens, 576)
    _, group_scale, values = _oracle.block_round(x[:, :448].numpy(), 64, "e4m3")
    want_scale = group_scale.max(-1, keepdims=True)
    _oracle.same_values(scale, want_scale)
    np.testing.assert_array_equal(data[:, :448].cpu().numpy(), _oracle.e4m3_encode(values / want_scale))
    rope = bf16.bits(bf16.round(x[:, 448:]) / torch.from_numpy(want_scale)).numpy()
    np.testing.assert_array_equal(data[:, 448:].cpu().numpy(), rope.astype("<u2").view(np.uint8))


def test_error_is_within_the_bound_and_comes_near_it(device):
    x = _uneven(4000, seed=1).to(device)
    stored = fp8_block.round(x[:, :448], 64).double()
    error = (aligned_record.round(x)[:, :448].double() - stored).abs().amax(-1)
    relative = error / stored.abs().amax(-1)
    assert relative.max() <= BOUND
    assert relative.max() > 0.9 * BOUND


def test_error_stays_in_the_bound_for_every_shift_and_code(device):
    shift = torch.arange(25, device=device)
    codes = torch.arange(1, 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    x = torch.zeros(25, 192, device=device)
    x[:, 0] = 224.1  # scale 1: the smallest maximum for its scale
    x[:, 64:128] = 448 * torch.exp2(-shift.float())[:, None]
    for first in range(0, 126, 63):
        x[:, 65:128] = codes[first : first + 63] * torch.exp2(-shift.float())[:, None]
        stored = fp8_block.round(x[:, :128], 64)
        error = (aligned_record.round(x)[:, :128] - stored).abs()
        assert error.max() <= BOUND * 224
        large = stored.abs() >= 2.0**-6
        assert torch.equal(aligned_record.round(x)[:, :128][large], stored[large])


def test_rope_is_exact(device):
    x = _uneven(500, seed=2).to(device)
    assert torch.equal(aligned_record.round(x)[:, 448:], bf16.round(x[:, 448:]))


def test_equals_the_kv_record_where_all_groups_share_a_scale(device):
    x = torch.from_numpy(np.random.default_rng(3).uniform(-1, 1, (50, 512)).astype(np.float32)).to(device)
    x[:, :448:64] = 1.0
    layout = RecordLayout(448)
    data, scales = layout.encode(x)
    aligned, scale = aligned_record.encode(x)
    assert torch.equal(aligned[:, :448], data[:, :448])
    assert torch.equal(aligned_record.decode(aligned, scale), layout.decode(data, scales))


def test_token_of_zeros_has_the_floor_scale(device):
    data, scale = aligned_record.encode(torch.zeros(2, 128, device=device))
    assert scale.tolist() == [[2.0**-22]] * 2
    assert not data.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_nope_makes_its_token_nan_and_no_other(bad, device):
    x = torch.ones(3, 512, device=device)
    x[1, 100] = bad
    assert aligned_record.round(x).isnan().all(-1).tolist() == [False, True, False]


def test_non_finite_rope_is_kept(device):
    x = torch.ones(1, 128, device=device)
    x[0, 64:67] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    got = aligned_record.round(x)[0]
    assert got[:64].tolist() == [1.0] * 64
    assert got[64].isnan()
    assert got[65:67].tolist() == [float("inf"), float("-inf")]


def test_wrong_shapes_are_refused(device):
    for size in (64, 130):
        with pytest.raises(ValueError, match=rf"\(2, {size}\)"):
            aligned_record.encode(torch.zeros(2, size, device=device))
    data, scale = aligned_record.encode(torch.zeros(2, 128, device=device))
    with pytest.raises(ValueError, match=r"\(2,\).*\(2, 192\)"):
        aligned_record.decode(data, scale[:, 0])
    with pytest.raises(ValueError, match=r"\(2, 128\)"):
        aligned_record.decode(data[:, :128], scale)
