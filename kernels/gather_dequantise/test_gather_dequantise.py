"""Gather and dequantise: the ref's properties, and the kernel bit for bit."""

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16
from kernels.formats.kv_record import ROPE, RecordLayout
from kernels.gather_dequantise import kernel
from kernels.gather_dequantise.kernel import gather_dequantise as gather_kernel
from kernels.gather_dequantise.ref import gather_dequantise

PAGE, PAGES = 16, 6
TABLE = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)


def pages_of(nope, x):
    """Two sequences' rows x (96, K) in pages whose other bytes are 0xff, and the values of all slots."""
    layout = RecordLayout(nope)
    place = (TABLE[:, :, None] * PAGE + torch.arange(PAGE)).reshape(-1).long()
    data, scales = layout.encode(x)
    pages = torch.full((PAGES, layout.page_bytes(PAGE)), 0xFF, dtype=torch.uint8)
    layout.write(pages, place, data, scales)
    return pages, place, layout.decode(data, scales)


def case(T, S, nope=192, seed=0):
    x = draw(PAGE * PAGES, nope + ROPE, seed=seed, decades=3.0)
    pages, place, values = pages_of(nope, x)
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-9, PAGE * 3, (T, S), generator=generator).clamp_min(-1)
    sequence = torch.arange(T) % 2
    rows = torch.where(idx >= 0, idx + sequence[:, None] * PAGE * 3, -1)
    return pages, place, values, idx.int(), sequence.int(), rows


def test_names_rows_and_leaves_zeros():
    pool = draw(4, 3, seed=1)
    got = gather_dequantise(pool, torch.tensor([[2, -1], [0, 2]]), store=lambda x: 2 * x)
    assert_bitwise(got[0], torch.stack([2 * pool[2], torch.zeros(3)]))
    assert_bitwise(got[1], torch.stack([2 * pool[0], 2 * pool[2]]))
    assert gather_dequantise(pool[:0], torch.full((1, 2), -1)).tolist() == [[[0.0] * 3] * 2]


@pytest.mark.parametrize("bad", [-2, 4])
def test_indices_outside_the_pool_are_refused(bad):
    with pytest.raises(ValueError, match="the pool has 4 rows"):
        gather_dequantise(draw(4, 3, seed=1), torch.tensor([[bad]]))


@pytest.mark.parametrize("T", [0, 1, 3, 129])
def test_the_kernel_is_the_ref_with_a_page_table_and_with_slots(T, accelerator):
    pages, place, values, idx, sequence, rows = case(T, 5)
    want = gather_dequantise(values, rows, store=bf16.round)
    at = [t.to(accelerator) for t in (pages, idx)]
    paged = {"page_table": TABLE.to(accelerator), "sequence": sequence.to(accelerator)}
    out = torch.full((T, 5, 256), torch.nan, dtype=torch.bfloat16, device=accelerator)
    got = gather_kernel(*at, nope=192, **paged, out=out)
    assert_bitwise(got.float().cpu(), want)
    slots = torch.where(rows >= 0, place[rows.clamp_min(0)], -1).int()[:3]
    want = want[:3]
    assert_bitwise(gather_kernel(at[0], slots.to(accelerator), nope=192).float().cpu(), want)


@pytest.mark.parametrize("S", [0, 1, 33, 127])
def test_the_kernel_at_head_dim_512(S, accelerator):
    pages, _, values, idx, sequence, rows = case(2, S, nope=448)
    got = gather_kernel(
        pages.to(accelerator),
        idx.to(accelerator),
        nope=448,
        page_table=TABLE.to(accelerator),
        sequence=sequence.to(accelerator),
    )
    assert_bitwise(got.float().cpu(), gather_dequantise(values, rows, store=bf16.round))


@pytest.mark.parametrize("cache", [0, 1 << 40], ids=["past the cache", "in the cache"])
def test_a_buffer_of_any_size(cache, accelerator, monkeypatch):
    monkeypatch.setattr(kernel, "_cache_bytes", lambda _device: cache)
    test_the_kernel_at_head_dim_512(33, accelerator)


def test_a_scale_of_the_token_before_is_seen(accelerator):
    pages, place, values, _, _, _ = case(1, 1)
    end = PAGE * (192 + 128)
    pages[:, end : end + PAGE * 8] = pages[:, end : end + PAGE * 8].roll(8, 1)
    got = gather_kernel(pages.to(accelerator), place[None].int().to(accelerator), nope=192)
    assert_differs(got[0].float().cpu(), values)


def test_strided_pages_and_refusals(accelerator):
    pages, place, values, _, sequence, _ = case(1, 3)
    wide = torch.full((PAGES, 3, pages.shape[1]), 0xFF, dtype=torch.uint8)
    wide[:, 2] = pages
    slots = place[None].int().to(accelerator)
    assert_bitwise(gather_kernel(wide.to(accelerator)[:, 2], slots, nope=192)[0].float().cpu(), values)
    with pytest.raises(ValueError, match="no page of nope 448"):
        gather_kernel(pages.to(accelerator), slots, nope=448)
    with pytest.raises(TypeError, match=r"idx is torch\.int64"):
        gather_kernel(pages.to(accelerator), slots.long(), nope=192)
    with pytest.raises(ValueError, match="come together"):
        gather_kernel(pages.to(accelerator), slots, nope=192, sequence=sequence.to(accelerator))
