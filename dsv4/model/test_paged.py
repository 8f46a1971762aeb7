"""Pages and records: every byte where the layout says, through any table, and exactly the formats' bytes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.model import numerics
from dsv4.model._trace import bits, raw_rows, trace
from dsv4.model.paged import PagedStore
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.records import (
    AlignedRecord,
    ExactRecord,
    Fp4Key,
    Fp8Key,
    Fp8Record,
    Nvfp4Record,
    Record,
)
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan, unflatten
from kernels.formats import aligned_record, bf16, e2m1, e4m3, fp8_block, fp8_scaled, mxfp4, nvfp4, ue8m0
from kernels.hadamard.ref import hadamard

RECORDS: dict[str, tuple[Record, int]] = {  # record, values a row
    "exact": (ExactRecord(128), 128),
    "fp8": (Fp8Record(448), 512),
    "fp8-small": (Fp8Record(64), 128),
    "aligned": (AlignedRecord(448), 512),
    "nvfp4": (Nvfp4Record(448), 512),
    "fp8-key": (Fp8Key(128), 128),
    "fp4-key": (Fp4Key(128), 128),
}
every_record = pytest.mark.parametrize("name", RECORDS)


def pattern(record: Record, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scale bytes that tell (row, byte) apart: neighbours in any direction differ."""

    def of(size: int, salt: int) -> Tensor:
        return ((rows[:, None] * 37 + torch.arange(size) * 11 + rows[:, None] // 256 * 5 + salt) % 251).to(
            torch.uint8
        )

    return of(record.data_bytes, 0), of(record.scale_bytes, 101)


def values(size: int, rows: int, seed: int = 0) -> Tensor:
    """Rows over many decades, with a zero row, a zero block, a huge channel, and amax just around a power of two."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    x *= 10.0 ** torch.linspace(-6, 3, rows)[:, None]
    x[0] = 0.0
    x[1, :64] = 0.0
    x[2, 5] = 1e4
    x[3, :64], x[3, 7] = 1e-9, 448.0
    x[4, :64], x[4, 7] = 1.0, float(np.nextafter(np.float32(448.0), np.float32(500)))
    x[5] = -0.0
    return x


@every_record
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_each_byte_lies_at_its_page_slot_and_dim(name, page_size):
    record, _ = RECORDS[name]
    store = PagedStore(record, page_size)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    for part in rows.split(77):  # in any order, in several writes
        store.write(part, *pattern(record, part))
    expected = torch.cat(pattern(record, torch.arange(300)), dim=-1)
    assert torch.equal(raw_rows(store, range(300)), expected)
    assert len({*store.table}) == len(store.table) == -(-300 // page_size)


@every_record
def test_reading_is_decoding_the_bytes_that_were_written(name):
    record, size = RECORDS[name]
    store = PagedStore(record, 3)
    data, scales = record.encode(values(size, 50))
    store.write(torch.arange(50), data, scales)
    picked = torch.tensor([49, 0, 7, 7, 31])
    for got, wanted in zip(store.read(picked), record.decode(data[picked], scales[picked]), strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.equal(bits(got), bits(wanted))
    assert store.read(torch.empty(0, dtype=torch.int64))[0].shape == (0, size)
    assert PagedStore(record, 3).read(torch.empty(0, dtype=torch.int64))[0].shape == (0, size)


@every_record
def test_a_write_touches_its_own_slots_only(name):
    record, _ = RECORDS[name]
    store = PagedStore(record, 4)
    rows = torch.arange(20)
    store.write(rows, *pattern(record, rows))
    before = store.pages.clone()
    changed = torch.tensor([5, 18])
    store.write(changed, *pattern(record, changed + 1000))
    same = torch.tensor([row for row in range(20) if row not in (5, 18)])
    assert torch.equal(raw_rows(store, range(20))[same], torch.cat(pattern(record, same), dim=-1))
    assert torch.equal(
        raw_rows(store, range(20))[changed], torch.cat(pattern(record, changed + 1000), dim=-1)
    )
    touched = (store.pages != before).sum()
    assert touched <= 2 * (record.data_bytes + record.scale_bytes)


@pytest.mark.parametrize(
    "steps", [[1] * 40, [3, 3], [5, 1, 1, 9], [2, 2, 4, 8], [7, 33], [1, 2, 3, 4, 5]], ids=str
)
def test_no_logical_page_is_its_own_physical_page(steps):
    store, written = PagedStore(Fp8Key(64), 1), 0
    for count in steps:
        rows = torch.arange(written, written + count)
        store.write(rows, *pattern(store.record, rows))
        written += count
    assert all(logical != physical for logical, physical in enumerate(store.table))
    assert torch.equal(
        raw_rows(store, range(written)), torch.cat(pattern(store.record, torch.arange(written)), -1)
    )


@every_record
def test_ring_wraps_around_and_keeps_the_last_rows(name):
    record, _ = RECORDS[name]
    store = PagedStore(record, 8, capacity=20)
    assert store.slots == 24  # whole pages
    written = 0
    for count in (1, 23, 1, 7, 24, 24, 5, 1, 24):
        rows = torch.arange(written, written + count)
        store.write(rows, *pattern(record, rows))
        written += count
        held = range(max(0, written - 24), written)
        assert torch.equal(raw_rows(store, held), torch.cat(pattern(record, torch.tensor(held)), dim=-1))
    assert len(store.table) == 3
    data, scales = pattern(record, torch.arange(written - 3, written))
    got, wanted = store.read(torch.arange(written - 3, written))[0], record.decode(data, scales)[0]
    assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("name", ["fp8-small", "fp8-key", "fp4-key", "exact"])
def test_high_page_ids_in_a_shuffled_table(name):
    record, _ = RECORDS[name]
    store = PagedStore(record, 2)
    pages = (1 << 16) + 9  # an int16 page id, or 32 bits of bytes, would wrap
    store.pages = torch.zeros(pages, store._page_bytes(), dtype=torch.uint8)
    store.table = [pages - 1, 3, 1 << 15, pages - 2, 0, 1 << 16]
    rows = torch.arange(12)
    store.write(rows, *pattern(record, rows))
    used = store.pages.any(1).nonzero().flatten().tolist()
    assert used == sorted(store.table)
    assert torch.equal(raw_rows(store, range(12)), torch.cat(pattern(record, rows), dim=-1))
    got, wanted = store.read(rows)[0], record.decode(*pattern(record, rows))[0]
    assert torch.equal(bits(got), bits(wanted))


def test_reading_what_was_never_written_is_refused():
    for name in RECORDS:
        store = PagedStore(RECORDS[name][0], 4)
        store.write(torch.arange(4), *pattern(store.record, torch.arange(4)))
        with pytest.raises((IndexError, ValueError)):
            store.read(torch.tensor([4]))


SIZES = {  # data, scales, a page of 64 with its padding
    "fp8": (576, 8, 64 * 584 + 64),
    "fp8-small": (192, 8, 64 * 200 + 64),
    "aligned": (576, 4, 64 * 580),
    "nvfp4": (224 + 128, 28 + 4, 64 * 384),
    "exact": (512, 0, 64 * 512),
    "fp8-key": (128, 4, 64 * 132),
    "fp4-key": (64, 4, 64 * 68),
}


@every_record
def test_sizes_in_bytes(name):
    record, _ = RECORDS[name]
    store = PagedStore(record, 64)
    store.write(torch.arange(65), *pattern(record, torch.arange(65)))
    assert (record.data_bytes, record.scale_bytes, store._page_bytes()) == SIZES[name]
    assert store.nbytes == 2 * SIZES[name][2]


def little_endian(x: Tensor) -> Tensor:
    return torch.from_numpy(x.contiguous().numpy().view(np.uint8).reshape(len(x), -1).copy())


def bf16_bytes(x: Tensor) -> Tensor:
    return little_endian(bf16.bits(x).contiguous())


def expected_bytes(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The record's bytes from the formats' own codes."""
    nope, rope = x[:, :-64], x[:, -64:]
    if name == "exact":
        return little_endian(x), torch.empty(len(x), 0, dtype=torch.uint8)
    if name.startswith("fp8") and "key" not in name:
        codes, scale = fp8_block.quantise(nope, 64)
        padded = torch.zeros(len(x), 8, dtype=torch.uint8)
        padded[:, : scale.shape[1]] = ue8m0.encode(scale)
        return torch.cat((codes, bf16_bytes(rope)), dim=-1), padded
    if name == "aligned":
        data, scale = aligned_record.encode(x)
        return data, little_endian(scale)
    if name == "nvfp4":
        codes, scales, gsa = nvfp4.quantise(nope)
        return torch.cat((e2m1.pack(codes), bf16_bytes(rope)), dim=-1), torch.cat(
            (scales, little_endian(gsa)), dim=-1
        )
    if name == "fp8-key":
        codes, scale = fp8_scaled.quantise(x)
        return codes, little_endian(scale)
    codes, scale = mxfp4.quantise(hadamard(x))
    return e2m1.pack(codes), ue8m0.encode(scale)


@every_record
def test_bytes_are_the_formats(name):
    record, size = RECORDS[name]
    x = values(size, 40)
    for got, wanted in zip(record.encode(x), expected_bytes(name, x), strict=True):
        assert torch.equal(got, wanted)


ROUNDED = {
    "exact": lambda x: x,
    "fp8": lambda x: torch.cat((fp8_block.round(x[:, :-64], 64), bf16.round(x[:, -64:])), dim=-1),
    "aligned": aligned_record.round,
    "nvfp4": lambda x: torch.cat((nvfp4.round(x[:, :-64]), bf16.round(x[:, -64:])), dim=-1),
    "fp8-key": fp8_scaled.round,
    "fp4-key": lambda x: mxfp4.round(hadamard(x)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_decoded_values_are_the_formats_rounding(name):
    record, size = RECORDS[name]
    x = values(size, 40)
    got, scale = record.decode(*record.encode(x))
    assert torch.equal(bits(got if scale is None else got * scale), bits(ROUNDED[name](x)))


def test_keys_with_their_own_scale_decode_to_bare_codes():
    x = values(128, 40)
    got, scale = Fp8Key(128).decode(*Fp8Key(128).encode(x))
    codes, expected = fp8_scaled.quantise(x)
    assert torch.equal(got, e4m3.decode(codes))
    assert torch.equal(scale, expected)


@pytest.mark.parametrize(
    "changes", [{}, {"kv_record": "aligned"}, {"kv_format": "nvfp4", "index_score": "fp4"}], ids=str
)
def test_a_models_pages_hold_the_bytes_of_its_taps(changes):
    config = small_config(sliding_window=16)
    num = numerics.of_plan(unflatten(changes), config)
    model = Transformer(config, random_weights(config, 0), num, page_size=8)
    got = trace(model, [torch.arange(60) % 64], [[33], [1], [26]])[0]
    for layer in range(4):
        assert torch.equal(got.stored[layer, "window"], got.taps[layer, "kv_bytes"][-16:])
        assert torch.equal(
            got.taps[layer, "kv_bytes"], torch.cat(num.record.encode(got.taps[layer, "kv"]), dim=-1)
        )
    for layer, entries in ((1, 15), (2, 7), (3, 15)):
        assert got.stored[layer, "compressor"].shape[0] == entries
        assert torch.equal(got.stored[layer, "compressor"], got.taps[layer, "comp_bytes"])
    keys = torch.cat(num.index_record.encode(got.taps[1, "index_k"]), dim=-1)
    assert torch.equal(got.stored[1, "indexer"], keys)
    values_, scale = num.index_record.decode(*num.index_record.encode(got.taps[1, "index_k"]))
    plain = values_ if scale is None else values_ * scale
    stored = hadamard(plain) if isinstance(num.index_record, Fp4Key) else plain
    assert torch.equal(got.taps[1, "index_k_store"], stored)


def test_cache_bytes_are_counted_by_pages():
    config = small_config(sliding_window=16)
    model = Transformer(config, random_weights(config, 0), numerics.of_plan(Plan(), config), page_size=8)
    cache = model.new_cache()
    assert cache.nbytes == 0
    model.forward([cache], [torch.arange(60) % 64])
    record = Fp8Record(64).layout.page_bytes(8)
    windows, csa, hca = 4 * 2, 2 * 2, 1  # 16 rows, 15 entries, 7 entries in pages of 8
    assert cache.nbytes == (windows + csa + hca) * record + 2 * 2 * 8 * (64 + 4)
