"""BF16 over all values and all midpoints, from float32 and, with a single rounding, from float64."""

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.formats import _oracle, bf16

ALL = np.arange(65536, dtype=np.uint16)
FINITE = np.arange(0x7F80, dtype=np.uint32)  # codes of 0 and all positive finite values


def test_every_code_survives_a_round_trip(device):
    values = bf16.from_bits(torch.from_numpy(ALL).to(device))
    _oracle.same_values(values, _oracle.all_bf16())
    is_nan = (ALL & 0x7FFF) > 0x7F80
    want = np.where(is_nan, 0x7FC0, ALL)
    np.testing.assert_array_equal(bf16.bits(values).cpu().numpy(), want)
    _oracle.same_values(bf16.round(values), _oracle.all_bf16())


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer(sign, dtype, device):
    middle = (FINITE << 16) | 0x8000
    x = np.stack([middle - 1, middle, middle + 1]).astype(np.uint32) | np.uint32(sign << 16)
    even = FINITE + (FINITE & 1)
    want = np.stack([FINITE, even, FINITE + 1]) | sign  # the last becomes infinite
    got = bf16.bits(torch.from_numpy(x.view(np.float32)).to(device, dtype))
    np.testing.assert_array_equal(got.cpu().numpy(), want)


def test_random_float32_bits_round_as_in_ml_dtypes(device):
    x = (
        np.random.default_rng(0)
        .integers(0, 2**32, 100_000, dtype=np.uint64)
        .astype(np.uint32)
        .view(np.float32)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    _oracle.same_values(bf16.round(torch.from_numpy(x).to(device)), want)


def _round_float64(x: np.ndarray) -> np.ndarray:
    """Bits of positive finite float64 values: by comparison with the exact midpoints, no rounding."""
    values = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    values[-1] = 2.0**128  # where the code after the largest would stand
    low = np.searchsorted(values, x, side="right") - 1
    low = np.minimum(low, 0x7F7F)
    middle = (values[low] + values[low + 1]) / 2
    up = (x > middle) | ((x == middle) & (low % 2 == 1))
    return (low + up).astype(np.uint16)


def test_float64_is_rounded_once(device):
    rng = np.random.default_rng(2)
    middle = (((FINITE << 16) | 0x8000).astype(np.uint32)).view(np.float32).astype(np.float64)
    x = np.concatenate(
        [
            np.nextafter(middle, 0),  # through float32 these three collapse
            middle,
            np.nextafter(middle, np.inf),
            np.exp2(rng.uniform(-160, 130, 50_000)),
            [5e-324, 2.0**-134, 2.0**-150, 1e300, 2.0**128 - 2.0**119, 2.0**128 - 2.0**119 - 2.0**75],
        ]
    )
    want = _round_float64(x)
    np.testing.assert_array_equal(bf16.bits(torch.from_numpy(x).to(device)).cpu().numpy(), want)
    np.testing.assert_array_equal(bf16.bits(torch.from_numpy(-x).to(device)).cpu().numpy(), want | 0x8000)


def test_double_rounding_would_show(device):
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64, device=device)
    assert bf16.round(x).tolist() == [1 + 2.0**-7]
    assert bf16.round(x.float()).tolist() == [1.0]  # float32 has made it a tie


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_values", [1, 3, 17, 64])
def test_every_nan_is_0x7fc0_at_any_length(dtype, num_values, device):
    x = torch.full((num_values,), float("nan"), dtype=dtype, device=device)
    assert bf16.bits(x).tolist() == [0x7FC0] * num_values
    assert bf16.bits(-x).tolist() == [0x7FC0] * num_values
    assert bf16.round(x).isnan().all()


def test_zeros_and_infinities_keep_their_sign(device):
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 3.4e38, -3.4e38], device=device)
    want = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F80, 0xFF80]
    assert bf16.bits(x).tolist() == want
    assert bf16.bits(x.double()).tolist() == want


def test_strided_float64_gives_the_same_bits(device):
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((5, 7))).to(device)
    assert torch.equal(bf16.round(x.T), bf16.round(x).T)


def test_wrong_dtypes_are_refused(device):
    with pytest.raises(TypeError, match="int32"):
        bf16.round(torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match="int16"):
        bf16.from_bits(torch.zeros(2, dtype=torch.int16, device=device))
