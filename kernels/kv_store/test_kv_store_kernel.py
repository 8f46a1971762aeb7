"""The cache write has the records' bytes, in the right slots of shuffled pages, and touches nothing else."""

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_fault_seen, draw
from kernels.formats.kv_record import RecordLayout
from kernels.kv_store import kernel, ref

BF16, F32 = torch.bfloat16, torch.float32


def slots_of(T, pages, page, seed=1):
    """T slots, each once, over shuffled pages, page 0 and the last among them."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * page, generator=generator)[:T]
    if T > 1:
        slots[0], slots[1] = 0, pages * page - 1
    return slots.unique()[torch.randperm(len(slots.unique()), generator=generator)]


def blank(nope, pages, page, device):
    return torch.full((pages, RecordLayout(nope).page_bytes(page)), 0xAA, dtype=torch.uint8, device=device)


def both(kv, nope, pages, page, slots, device):
    """Pages by the kernel and by the ref."""
    got, want = blank(nope, pages, page, device), blank(nope, pages, page, "cpu")
    kernel.store(kv.to(device), got, slots.to(device))
    ref.store(kv, want, slots)
    return got.cpu(), want


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("T", SIZES)
def test_every_number_of_rows(T, dtype, accelerator):
    slots = slots_of(T, 6, 64)
    kv = draw(len(slots), 512, seed=2, decades=2).to(dtype)
    assert_bitwise(*both(kv, 448, 6, 64, slots, accelerator))


@pytest.mark.parametrize(("nope", "page"), [(64, 1), (192, 16), (448, 2), (512, 64), (576, 3)])
def test_every_width_and_page(nope, page, accelerator):
    slots = slots_of(5, 7, page)
    kv = draw(len(slots), nope + 64, seed=3, decades=1)
    assert_bitwise(*both(kv, nope, 7, page, slots, accelerator))


def test_many_rows_hold_several_a_program(accelerator):
    slots = slots_of(270, 20, 16)
    kv = draw(len(slots), 512, seed=4)
    assert_bitwise(*both(kv, 448, 20, 16, slots, accelerator))


def test_negative_slots_are_skipped_and_strided_rows_and_pages_are_read(accelerator):
    kv = draw(8, 600, seed=5)[::2, 40:552]
    slots = torch.tensor([3, -1, 9, -7])
    wide = torch.full((5, RecordLayout(448).page_bytes(2) + 64), 0xAA, dtype=torch.uint8, device=accelerator)
    want = blank(448, 5, 2, "cpu")
    ref.store(kv, want, slots)
    kernel.store(kv.to(accelerator), wide[:, :-64], slots.to(accelerator))
    assert_bitwise(wide[:, :-64].cpu(), want)
    assert (wide[:, -64:] == 0xAA).all()


def specials():
    kv = draw(10, 512, seed=6)
    kv[0], kv[1], kv[2, 70], kv[3, 500] = 0.0, -0.0, float("nan"), float("nan")
    kv[4, 3], kv[5, 511], kv[6] = float("inf"), float("-inf"), kv[6] * 1e-30
    kv[7, :64], kv[8, 64:128] = 1e-5, kv[8, 64:128] * 1e30
    kv[9, :448] = 448 * 2.0 ** (torch.arange(448) // 64)  # each group's maximum is on its scale's edge
    return kv


def test_special_values(accelerator):
    slots = torch.arange(10)
    got, want = both(specials(), 448, 2, 8, slots, accelerator)
    layout = RecordLayout(448)
    assert_bitwise(*(layout.decode(*layout.read(pages, slots)) for pages in (got, want)))
    finite = torch.tensor([0, 1, 3, 5, 6, 7, 8, 9])
    for one, other in zip(layout.read(got, finite), layout.read(want, finite), strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("T", [0, 1, 3, 270])
def test_aligned_record(T, accelerator):
    slots = slots_of(T, 20, 16)
    kv = draw(len(slots), 512, seed=7, decades=1)
    written = []
    for module, device in ((kernel, accelerator), (ref, "cpu")):
        data = torch.full((20, 16, 576), 0xAA, dtype=torch.uint8, device=device)
        scale = torch.full((20, 16), -1.0, device=device)
        module.store_aligned(kv.to(device), data, scale, slots.to(device))
        written.append((data.cpu(), scale.cpu()))
    assert_bitwise(written[0][0], written[1][0])
    assert_bitwise(written[0][1], written[1][1])


def test_aligned_special_values(accelerator):
    slots, kv = torch.arange(10), specials()
    data, scale = torch.zeros(2, 8, 576, dtype=torch.uint8), torch.zeros(2, 8)
    got = data.to(accelerator), scale.to(accelerator)
    kernel.store_aligned(kv.to(accelerator), *got, slots.to(accelerator))
    ref.store_aligned(kv, data, scale, slots)
    assert_bitwise(got[1].cpu(), scale)
    finite = torch.tensor([0, 1, 3, 5, 6, 7, 8, 9])
    assert_bitwise(got[0].cpu().flatten(0, 1)[finite], data.flatten(0, 1)[finite])


@pytest.mark.parametrize("fault", ["slot", "scale byte", "rope through FP8", "floor"])
def test_a_planted_fault_is_seen(fault, accelerator):
    kv, slots = draw(3, 512, seed=8), torch.tensor([5, 1, 2])
    want = blank(448, 2, 4, "cpu")
    ref.store(kv, want, slots)
    faulty = kv.clone()
    if fault == "rope through FP8":
        faulty[:, 448:] = faulty[:, 448:].to(torch.float8_e4m3fn).float()
    elif fault == "floor":
        faulty[0, :64] = 0
    got = blank(448, 2, 4, accelerator)
    kernel.store(faulty.to(accelerator), got, (slots.flip(0) if fault == "slot" else slots).to(accelerator))
    if fault == "scale byte":
        got[0, 4 * 576 + 8] += 1
    assert_fault_seen(lambda: assert_bitwise(got.cpu(), want))


@pytest.mark.gpu
def test_a_page_far_out_is_reached(accelerator):
    if accelerator == "cpu":
        pytest.skip("no GPU: the interpreter copies all 2.5 GB of pages twice")
    page_bytes = RecordLayout(448).page_bytes(64)
    pages = torch.zeros(2**31 // page_bytes + 3, page_bytes, dtype=torch.uint8, device=accelerator)
    kv = draw(1, 512, seed=9)
    last = torch.tensor([len(pages) * 64 - 1])
    kernel.store(kv.to(accelerator), pages, last.to(accelerator))
    layout = RecordLayout(448)
    for got, want in zip(layout.read(pages[-1:].cpu(), torch.tensor([63])), layout.encode(kv), strict=True):
        assert_bitwise(got, want)
    assert not pages[:-1].any()


def test_misfits_are_refused():
    kv, slots = torch.zeros(3, 512), torch.zeros(3, dtype=torch.int64)
    pages = blank(448, 2, 4, "cpu")
    with pytest.raises(ValueError, match="no page of"):
        kernel.store(kv, pages[:, :-1], slots)
    with pytest.raises(ValueError, match="multiple of 64"):
        kernel.store(kv[:, :500], pages, slots)
    with pytest.raises(TypeError, match="kv_store: slots"):
        kernel.store(kv, pages, slots.int())
    with pytest.raises(ValueError, match="kv_store: slots"):
        kernel.store(kv, pages, slots[:2])
    with pytest.raises(ValueError, match="kv_store: token_scale"):
        kernel.store_aligned(kv, torch.zeros(2, 4, 576, dtype=torch.uint8), torch.zeros(2, 3), slots)
