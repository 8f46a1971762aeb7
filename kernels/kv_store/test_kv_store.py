"""Rows land in their slots, as their record has them, and nothing else changes."""

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import aligned_record
from kernels.formats.kv_record import RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.kv_store.ref import store, store_aligned, store_nvfp4

SLOTS = torch.tensor([5, -1, 0, 11, 6])


@pytest.mark.parametrize("nope", [64, 192, 448])
@pytest.mark.parametrize(("write", "layout_of"), [(store, RecordLayout), (store_nvfp4, Nvfp4Layout)])
def test_records_in_pages(nope, write, layout_of):
    layout, kv = layout_of(nope), draw(5, nope + 64, seed=1)
    pages = torch.full((3, layout.page_bytes(4)), 0xAA, dtype=torch.uint8)
    untouched = pages.clone()
    write(kv, pages, SLOTS)
    own = SLOTS[SLOTS >= 0]
    assert_bitwise(layout.decode(*layout.read(pages, own)), layout.decode(*layout.encode(kv[SLOTS >= 0])))
    layout.write(pages, own, *layout.read(untouched, own))
    assert_bitwise(pages, untouched)


def test_aligned():
    kv = draw(5, 512, seed=2)
    data, scale = torch.full((3, 4, 576), 0xAA, dtype=torch.uint8), torch.full((3, 4), -1.0)
    store_aligned(kv, data, scale, SLOTS)
    own = SLOTS[SLOTS >= 0]
    read = aligned_record.decode(data.flatten(0, 1)[own], scale.flatten()[own, None])
    assert_bitwise(read, aligned_record.round(kv[SLOTS >= 0]))
    rest = torch.ones(12, dtype=torch.bool).index_fill(0, own, False)
    assert (data.flatten(0, 1)[rest] == 0xAA).all()
    assert (scale.flatten()[rest] == -1).all()
