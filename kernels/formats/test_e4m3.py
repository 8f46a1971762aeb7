"""E4M3 against ml_dtypes, over all codes, all BF16 values and every rounding boundary."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, e4m3

CODES = np.arange(256, dtype=np.uint8)


def test_every_code_decodes_as_in_ml_dtypes(device):
    _oracle.same_values(e4m3.decode(torch.from_numpy(CODES).to(device)), _oracle.e4m3_decode(CODES))


def test_nan_codes_are_0x7f_and_0xff(device):
    nan = e4m3.decode(torch.from_numpy(CODES).to(device)).isnan().cpu().numpy()
    assert CODES[nan].tolist() == [0x7F, 0xFF]


def test_every_code_survives_a_round_trip(device):
    back = e4m3.encode(e4m3.decode(torch.from_numpy(CODES).to(device))).cpu().numpy()
    want = np.where(CODES == 0xFF, 0x7F, CODES)
    np.testing.assert_array_equal(back, want)


def test_every_bf16_value_encodes_as_in_ml_dtypes(device):
    x = _oracle.all_bf16()
    want = _oracle.e4m3_encode(x)
    np.testing.assert_array_equal(e4m3.encode(torch.from_numpy(x).to(device)).cpu().numpy(), want)
    narrow = torch.from_numpy(x).to(device).to(torch.bfloat16)
    np.testing.assert_array_equal(e4m3.encode(narrow).cpu().numpy(), want)


@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer(sign, device):
    lower = np.arange(0x7E, dtype=np.uint8)  # 0 to 416; with its successor, every positive pair
    middle = (_oracle.e4m3_decode(lower) + _oracle.e4m3_decode(lower + 1)) / 2
    x = torch.from_numpy(_oracle.neighbours(middle) * np.float32(sign)).to(device)
    even = np.where(lower % 2 == 0, lower, lower + 1)
    want = np.stack([lower, even, lower + 1]) | (0x80 if sign < 0 else 0)
    np.testing.assert_array_equal(e4m3.encode(x).cpu().numpy(), want)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),  # tie between 0 and the smallest subnormal
        (-(2.0**-10), 0x80),
        (1.4e-45, 0x00),
        (1.0625, 0x38),  # tie between 1 and 1.125
        (1.1875, 0x3A),  # tie between 1.125 and 1.25
        (448.0, 0x7E),
        (464.0, 0x7E),
        (500.0, 0x7E),
        (-500.0, 0xFE),
        (3.4e38, 0x7E),
        (float("inf"), 0x7E),
        (float("-inf"), 0xFE),
        (float("nan"), 0x7F),
    ],
)
def test_hand_computed_values(value, code, device):
    x = torch.tensor([value] * 9, device=device)  # 9: both the vectorised part and the tail of the cast
    assert e4m3.encode(x).tolist() == [code] * 9


def test_nan_of_either_sign_is_0x7f(device):
    x = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32, device=device).view(
        torch.float32
    )
    assert e4m3.encode(x).tolist() == [0x7F] * 3


def test_float64_is_rounded_to_float32_first(device):
    x = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64, device=device)
    assert e4m3.encode(x).tolist() == [0x38]  # the tie, not the value just above it


def test_strided_inputs_give_the_same_codes(device):
    x = torch.from_numpy(_oracle.nasty_rows(6, 10, 0)).to(device)
    assert torch.equal(e4m3.encode(x.T), e4m3.encode(x).T)
    codes = e4m3.encode(x)
    assert torch.equal(e4m3.decode(codes[:, ::2]), e4m3.decode(codes)[:, ::2])


def test_wrong_dtypes_are_refused(device):
    with pytest.raises(TypeError, match="int64"):
        e4m3.encode(torch.arange(3, device=device))
    with pytest.raises(TypeError, match="float32"):
        e4m3.decode(torch.zeros(3, device=device))
