"""NVFP4 record: hand-computed bytes, sizes, pages, and values that are the format's."""

import numpy as np
import pytest
import torch

from kernels.formats import _oracle, bf16, nvfp4
from kernels.formats.nvfp4_record import Nvfp4Layout

V4, SMALL = Nvfp4Layout(448), Nvfp4Layout(64)


@pytest.mark.parametrize(
    ("nope", "data", "scale"), [(448, 352, 32), (64, 160, 8), (192, 224, 16), (576, 416, 40)]
)
def test_sizes(nope, data, scale):
    layout = Nvfp4Layout(nope)
    assert (layout.data_bytes, layout.scale_bytes, layout.token_bytes) == (data, scale, data + scale)
    for page_size in range(1, 70):
        size = layout.page_bytes(page_size)
        assert size % 16 == 0
        assert 0 <= size - page_size * layout.token_bytes < 16
        assert layout.page_size(size) == page_size


def test_a_token_made_by_hand(device):
    x = torch.zeros(128)
    x[0:16] = 6.0  # gsa 2688 / 2688 = 1: the largest
    x[5] = 2688.0  # its block's scale is 448 (0x7e): 2688 / 448 is code 7 of 6, and 6 / 448 rounds to code 0
    x[16], x[17], x[18] = 6.0, -0.5, 1.0  # scale 1 (0x38): codes 7, 9, 2
    x[32:48] = 3.0  # scale 0.5 (0x30): code 7
    x[64], x[127] = 1.0, -2.0  # rope: 0x3f80, 0xc000
    data, scales = SMALL.encode(x[None].to(device))
    codes = [0] * 32
    codes[2] = 0x70  # value 5 in a high nibble
    codes[8], codes[9] = 0x97, 0x02
    codes[16:24] = [0x77] * 8
    rope = [0] * 128
    rope[0:2], rope[126:128] = [0x80, 0x3F], [0x00, 0xC0]
    assert data[0].tolist() == codes + rope
    assert scales[0].tolist() == [0x7E, 0x38, 0x30, 0, 0x00, 0x00, 0x80, 0x3F]


def test_values_are_the_formats_and_survive_a_page(device):
    x = torch.from_numpy(_oracle.nasty_rows(6, 512, seed=1)).to(device)
    pages = torch.full((3, V4.page_bytes(2)), 0xAA, dtype=torch.uint8, device=device)
    slots = torch.tensor([5, 0, 3, 1, 4, 2], device=device)
    V4.write(pages, slots, *V4.encode(x))
    got = V4.decode(*V4.read(pages, slots)).cpu().numpy()
    want = torch.cat((nvfp4.round(x[:, :448]), bf16.round(x[:, 448:])), -1).cpu().numpy()
    np.testing.assert_array_equal(got, want)
    pages[0, 2 * V4.data_bytes + V4.scale_bytes] ^= 8  # a scale byte of slot 1, its fourth token
    read = V4.decode(*V4.read(pages, slots)).cpu().numpy()
    assert np.flatnonzero((read != want).any(-1)).tolist() == [3]


def test_wrong_shapes_are_refused(device):
    with pytest.raises(ValueError, match=r"512.*\(2, 511\)"):
        V4.encode(torch.zeros(2, 511, device=device))
    zeros = torch.zeros(2, 352, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"32.*\(2, 8\)"):
        V4.decode(zeros, zeros[:, :8])
    with pytest.raises(ValueError, match="nope 448"):
        V4.page_size(384 * 3 + 16)
