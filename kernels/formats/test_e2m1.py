"""E2M1 against ml_dtypes, over all codes, all BF16 values and every rounding boundary; packing."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, e2m1

CODES = np.arange(16, dtype=np.uint8)
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_code_decodes_as_in_ml_dtypes(device):
    got = e2m1.decode(torch.from_numpy(CODES).to(device))
    _oracle.same_values(got, _oracle.e2m1_decode(CODES))
    assert got.tolist() == VALUES + [-v for v in VALUES]


def test_every_code_survives_a_round_trip(device):
    codes = torch.from_numpy(CODES).to(device)
    assert torch.equal(e2m1.encode(e2m1.decode(codes)), codes)


def test_every_bf16_value_encodes_as_in_ml_dtypes(device):
    x = _oracle.all_bf16()
    want = _oracle.e2m1_encode(x)
    np.testing.assert_array_equal(e2m1.encode(torch.from_numpy(x).to(device)).cpu().numpy(), want)
    narrow = torch.from_numpy(x).to(device).to(torch.bfloat16)
    np.testing.assert_array_equal(e2m1.encode(narrow).cpu().numpy(), want)


@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer(sign, device):
    lower = CODES[:7]
    middle = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.from_numpy(_oracle.neighbours(middle) * np.float32(sign)).to(device)
    even = np.array([0, 2, 2, 4, 4, 6, 6])
    want = np.stack([lower, even, lower + 1]) | (8 if sign < 0 else 0)
    np.testing.assert_array_equal(e2m1.encode(x).cpu().numpy(), want)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0),
        (-0.0, 8),
        (1e-45, 0),
        (-1e-45, 8),
        (6.5, 7),
        (3e38, 7),
        (float("inf"), 7),
        (float("-inf"), 15),
        (float("nan"), 0),
        (float("-nan"), 0),
    ],
)
def test_hand_computed_values(value, code, device):
    assert e2m1.encode(torch.tensor([value], device=device)).tolist() == [code]


def test_strided_inputs_give_the_same_contiguous_codes(device):
    x = torch.from_numpy(_oracle.nasty_rows(6, 10, 0)).to(device)
    codes = e2m1.encode(x.T)
    assert codes.is_contiguous()
    assert torch.equal(codes, e2m1.encode(x).T)


def test_even_index_goes_to_the_low_nibble(device):
    codes = torch.tensor([[0x1, 0xF, 0xA, 0x0]], dtype=torch.uint8, device=device)
    assert e2m1.pack(codes).tolist() == [[0xF1, 0x0A]]


def test_every_byte_survives_unpack_and_pack(device):
    packed = torch.arange(256, dtype=torch.uint8, device=device).reshape(4, 64)
    codes = e2m1.unpack(packed)
    assert codes.shape == (4, 128)
    assert torch.equal(e2m1.pack(codes), packed)
    assert torch.equal(e2m1.pack(codes, checked=False), packed)
    assert torch.equal(e2m1.unpack(packed.T), torch.stack([packed.T & 15, packed.T >> 4], -1).flatten(-2))


def test_empty_tensors_pass(device):
    empty = torch.zeros(0, 8, dtype=torch.uint8, device=device)
    assert e2m1.decode(empty).shape == (0, 8)
    assert e2m1.pack(empty).shape == (0, 4)
    assert e2m1.unpack(empty).shape == (0, 16)
    assert e2m1.encode(torch.zeros(0, 8, device=device)).shape == (0, 8)


def test_packed_bytes_given_for_codes_are_refused(device):
    bytes_ = torch.tensor([[3, 16]], dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="16"):
        e2m1.decode(bytes_)
    with pytest.raises(ValueError, match="16"):
        e2m1.pack(bytes_)


def test_odd_length_is_not_packed(device):
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8, device=device))


def test_unchecked_packing_does_not_wait_for_the_device():
    codes = torch.zeros(2, 8, dtype=torch.uint8, device="meta")  # holds nothing to look at
    assert e2m1.pack(codes, checked=False).shape == (2, 4)
    with pytest.raises(RuntimeError, match="meta"):
        e2m1.pack(codes)
