"""The gather of NVFP4 records, bit for bit what the format says of their bytes, then rounded to BF16."""

import functools

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16
from kernels.formats.kv_record import ROPE
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.gather_dequantise import kernel
from kernels.gather_dequantise.ref import gather_dequantise

PAGE, PAGES = 16, 6
gather_dequantise_nvfp4 = functools.partial(kernel.gather_dequantise, kv_format="nvfp4")
TABLE = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)


def case(T, S, nope=192, seed=0):
    """Two sequences' rows in pages whose other bytes are 0xff, their values, and lists of T rows."""
    layout = Nvfp4Layout(nope)
    place = (TABLE[:, :, None] * PAGE + torch.arange(PAGE)).reshape(-1).long()
    x = draw(PAGE * PAGES, nope + ROPE, seed=seed, decades=3.0)
    x[3], x[50, 7] = 0.0, torch.nan
    data, scales = layout.encode(x)
    pages = torch.full((PAGES, layout.page_bytes(PAGE)), 0xFF, dtype=torch.uint8)
    layout.write(pages, place, data, scales)
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-9, PAGE * 3, (T, S), generator=generator).clamp_min(-1)
    sequence = torch.arange(T) % 2
    rows = torch.where(idx >= 0, idx + sequence[:, None] * PAGE * 3, -1)
    return pages, place, layout.decode(data, scales), idx.int(), sequence.int(), rows


@pytest.mark.parametrize("T", [0, 1, 3, 129])
def test_a_page_table_and_slots(T, accelerator):
    pages, place, values, idx, sequence, rows = case(T, 5)
    want = gather_dequantise(values, rows, store=bf16.round)
    on = pages.to(accelerator)
    out = torch.full((T, 5, 256), torch.nan, dtype=torch.bfloat16, device=accelerator)
    paged = {"page_table": TABLE.to(accelerator), "sequence": sequence.to(accelerator)}
    got = gather_dequantise_nvfp4(on, idx.to(accelerator), nope=192, **paged, out=out)
    assert_bitwise(got.float().cpu(), want)
    slots = torch.where(rows >= 0, place[rows.clamp_min(0)], -1).int()[:3].to(accelerator)
    assert_bitwise(gather_dequantise_nvfp4(on, slots, nope=192).float().cpu(), want[:3])


@pytest.mark.parametrize("S", [0, 1, 33, 127])
def test_head_dim_512(S, accelerator):
    pages, _, values, idx, sequence, rows = case(2, S, nope=448)
    paged = {"page_table": TABLE.to(accelerator), "sequence": sequence.to(accelerator)}
    got = gather_dequantise_nvfp4(pages.to(accelerator), idx.to(accelerator), nope=448, **paged)
    assert_bitwise(got.float().cpu(), gather_dequantise(values, rows, store=bf16.round))


def test_every_code_under_every_scale(accelerator):
    """Bytes of a cache, not of a quantiser: scales of either sign, subnormal and NaN, and gsa down to subnormal."""
    layout = Nvfp4Layout(192)
    codes = torch.arange(256, dtype=torch.uint8).repeat(22 * 2)[: 64 * 96].view(64, 96)
    rope = torch.randint(0, 256, (64, 128), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    gsa = (2.0 ** torch.linspace(-149, 90, 64))[:, None]
    scales = torch.cat((torch.arange(768).to(torch.uint8).view(64, 12), gsa.view(torch.uint8)), -1)
    data = torch.cat((codes, rope), -1)
    pages = torch.zeros(4, layout.page_bytes(16), dtype=torch.uint8)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    layout.write(pages, slots, data, scales)
    want = bf16.round(layout.decode(data, scales))
    got = gather_dequantise_nvfp4(pages.to(accelerator), slots[None].int().to(accelerator), nope=192)
    assert_bitwise(got[0].float().cpu(), want)


@pytest.mark.parametrize("part", ["code", "scale", "gsa", "rope"])
def test_bytes_of_the_token_before_are_seen(part, accelerator):
    pages, place, values, _, _, _ = case(1, 1)
    half, data, scales = 96, 224, 16
    first, size, stride = {
        "code": (0, half, data),
        "rope": (half, 128, data),
        "scale": (PAGE * data, 12, scales),
        "gsa": (PAGE * data + 12, 4, scales),
    }[part]
    tokens = pages.as_strided((PAGES, PAGE, size), (pages.stride(0), stride, 1), first)
    tokens.copy_(tokens.roll(1, 1))
    got = gather_dequantise_nvfp4(pages.to(accelerator), place[None].int().to(accelerator), nope=192)
    assert_differs(got[0].float().cpu(), bf16.round(values))


def test_strided_pages_and_refusals(accelerator):
    pages, place, values, _, sequence, _ = case(1, 3)
    wide = torch.full((PAGES, 3, pages.shape[1]), 0xFF, dtype=torch.uint8)
    wide[:, 2] = pages
    slots = place[None].int().to(accelerator)
    got = gather_dequantise_nvfp4(wide.to(accelerator)[:, 2], slots, nope=192)
    assert_bitwise(got[0].float().cpu(), bf16.round(values))
    with pytest.raises(ValueError, match="no page of nope 192"):
        gather_dequantise_nvfp4(pages[:, :-16].to(accelerator), slots, nope=192)
    with pytest.raises(ValueError, match="come together"):
        gather_dequantise_nvfp4(pages.to(accelerator), slots, nope=192, sequence=sequence.to(accelerator))
