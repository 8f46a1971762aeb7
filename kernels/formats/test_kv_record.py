"""KV record: hand-computed bytes, sizes, and a pattern per (page, slot, byte) through shuffled pages."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, bf16, fp8_block
from kernels.formats.kv_record import RecordLayout

V4 = RecordLayout(448)


@pytest.mark.parametrize(
    ("nope", "data", "scale"), [(448, 576, 8), (64, 192, 8), (128, 256, 8), (512, 640, 8), (576, 704, 16)]
)
def test_sizes(nope, data, scale):
    layout = RecordLayout(nope)
    assert (layout.data_bytes, layout.scale_bytes, layout.token_bytes) == (data, scale, data + scale)


def test_page_is_padded_to_whole_data_sizes():
    assert V4.token_bytes == 584
    assert V4.page_bytes(64) == 65 * 576  # 64 * 584 = 37376, rounded up
    assert V4.page_bytes(72) == 73 * 576  # 72 * 584, no padding
    assert V4.page_bytes(1) == 2 * 576


@pytest.mark.parametrize("nope", [64, 448, 576])
def test_page_size_can_be_told_from_the_bytes(nope):
    layout = RecordLayout(nope)
    assert all(layout.page_bytes(p) // layout.token_bytes == p for p in range(300))


def _hand_made() -> tuple[torch.Tensor, list[int], list[int]]:
    """One V4 token, its 576 data bytes and its 8 scale bytes, worked out on paper."""
    x = torch.zeros(512)
    x[0:64] = 1.0  # scale 2^-8: 448 * 2^-9 < 1. Code of 256 = 2^8: exponent 15, mantissa 0
    x[64:128] = 448.0  # scale 1, code of the maximum
    x[128:192] = -449.0  # scale 2; -224.5 goes to -224 = -1.75 * 2^7: exponent 14, mantissa 6
    x[192:256] = -0.0  # floor: scale 2^-22
    x[256:320] = 1e-4  # floor: scale 2^-22; 419.43 goes to 416 = 1.625 * 2^8: exponent 15, mantissa 5
    x[320:384] = float("nan")
    x[384:448] = 1.0625 * 2.0**-8  # scale 2^-16; 272 is a tie of 256 and 288, even is 256
    x[448:450] = torch.tensor([1.0, -2.0])
    x[450] = 1 + 2.0**-8  # a tie: down to 1
    x[451] = float("inf")
    nope = [[0x78], [0x7E], [0xF6], [0x80], [0x7D], [0x7F], [0x78]]
    rope = [0x80, 0x3F, 0x00, 0xC0, 0x80, 0x3F, 0x80, 0x7F] + [0] * 120
    return x, [byte for code in nope for byte in code * 64] + rope, [119, 127, 128, 105, 105, 255, 111, 0]


def test_hand_computed_bytes(device):
    x, want_data, want_scales = _hand_made()
    data, scales = V4.encode(x[None].to(device))
    assert data.tolist() == [want_data]
    assert scales.tolist() == [want_scales]


def test_hand_computed_page(device):
    x, want_data, want_scales = _hand_made()
    pages = torch.full((3, V4.page_bytes(2)), 0xAA, dtype=torch.uint8, device=device)
    V4.write(pages, torch.tensor([3], device=device), *V4.encode(x[None].to(device)))
    want = np.full((3, 1728), 0xAA)  # 2 * 576 of data, 2 * 8 of scales, 560 of padding
    want[1, 576:1152] = want_data
    want[1, 1160:1168] = want_scales
    np.testing.assert_array_equal(pages.cpu().numpy(), want)


@pytest.mark.parametrize("nope", [64, 448, 576])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_decode_undoes_encode_up_to_rounding(nope, num_tokens, device):
    layout = RecordLayout(nope)
    x = torch.from_numpy(_oracle.nasty_rows(num_tokens, nope + 64, seed=nope)).to(device)
    data, scales = layout.encode(x)
    assert data.shape == (num_tokens, layout.data_bytes)
    assert scales.shape == (num_tokens, layout.scale_bytes)
    assert not scales[:, nope // 64 :].any()
    want = torch.cat([fp8_block.round(x[:, :nope], 64), bf16.round(x[:, nope:])], -1)
    _oracle.same_values(layout.decode(data, scales), want.cpu().numpy())


@pytest.mark.parametrize(
    ("nope", "page_size", "num_pages"), [(448, 64, 40), (448, 5, 37), (64, 3, 200), (576, 1, 9)]
)
def test_pattern_goes_to_its_page_slot_and_byte(nope, page_size, num_pages, device):
    layout = RecordLayout(nope)
    rng = np.random.default_rng(nope + page_size)
    slots = rng.permutation(num_pages * page_size)[: -page_size // 2 or None]
    pages = torch.full((num_pages, layout.page_bytes(page_size)), 0xEE, dtype=torch.uint8, device=device)
    data = rng.integers(0, 256, (len(slots), layout.data_bytes), dtype=np.uint8)
    scales = rng.integers(0, 256, (len(slots), layout.scale_bytes), dtype=np.uint8)
    on_device = [torch.from_numpy(array).to(device) for array in (slots, data, scales)]
    layout.write(pages, *on_device)

    want = np.full(tuple(pages.shape), 0xEE, dtype=np.uint8)
    for token, slot in enumerate(slots):  # the layout in words, without a view
        page, offset = divmod(int(slot), page_size)
        start = offset * layout.data_bytes
        want[page, start : start + layout.data_bytes] = data[token]
        start = page_size * layout.data_bytes + offset * layout.scale_bytes
        want[page, start : start + layout.scale_bytes] = scales[token]
    np.testing.assert_array_equal(pages.cpu().numpy(), want)

    order = torch.from_numpy(rng.permutation(len(slots))).to(device)
    got_data, got_scales = layout.read(pages, on_device[0][order])
    assert torch.equal(got_data, on_device[1][order])
    assert torch.equal(got_scales, on_device[2][order])


def test_pages_may_be_strided_and_reads_may_repeat(device):
    wide = torch.zeros(4, V4.page_bytes(2) + 100, dtype=torch.uint8, device=device)
    pages = wide[:, 30 : 30 + V4.page_bytes(2)]
    x = torch.from_numpy(_oracle.nasty_rows(8, 512, seed=4)).to(device)
    slots = torch.tensor([7, 0, 5, 2, 1, 6, 3, 4], device=device)
    V4.write(pages, slots, *V4.encode(x))
    assert torch.equal(V4.decode(*V4.read(pages, slots)), V4.decode(*V4.encode(x)))
    twice = V4.read(pages, torch.tensor([5, 5], device=device))[0]
    assert torch.equal(twice[0], twice[1])
    assert not wide[:, :30].any()
    assert not wide[:, 30 + V4.page_bytes(2) :].any()


def test_strided_bf16_keys_give_the_same_bytes(device):
    x = torch.from_numpy(_oracle.nasty_rows(6, 512, seed=6)).to(device).bfloat16()
    wide = torch.zeros(6, 3, 600, dtype=torch.bfloat16, device=device)
    wide[:, 1, 50:562] = x
    for got, want in zip(V4.encode(wide[:, 1, 50:562]), V4.encode(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("nope", [0, -64, 32, 450])
def test_nope_is_a_positive_multiple_of_64(nope):
    with pytest.raises(ValueError, match=str(nope)):
        RecordLayout(nope)


@pytest.mark.parametrize("slots", [[-1], [6], [0, 1, 0], [[1]], [1.0]])
def test_bad_slots_are_refused(slots, device):
    pages = torch.zeros(3, V4.page_bytes(2), dtype=torch.uint8, device=device)
    slots = torch.tensor(slots, device=device)
    data = torch.zeros(len(slots), 576, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="slots"):
        V4.write(pages, slots, data, data[:, :8])
    assert not pages.any()


def test_wrong_shapes_are_refused(device):
    with pytest.raises(ValueError, match=r"512.*\(2, 511\)"):
        V4.encode(torch.zeros(2, 511, device=device))
    zeros = torch.zeros(2, 600, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"576.*\(2, 600\)"):
        V4.decode(zeros, zeros[:, :8])
    with pytest.raises(ValueError, match=r"\(2, 600\)"):
        V4.read(zeros, torch.tensor([0], device=device))
    pages = torch.zeros(3, V4.page_bytes(2), dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"1 slots.*\(2, 576\)"):
        V4.write(pages, torch.tensor([0], device=device), zeros[:, :576], zeros[:, :8])
