"""The write of NVFP4 records has the ref's bytes, in the right slots of shuffled pages, and touches nothing else."""

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, draw
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.kv_store import kernel, ref
from kernels.kv_store.test_kv_store_kernel import slots_of

BF16, F32 = torch.bfloat16, torch.float32


def blank(nope, pages, page, device, beside=0):
    """Pages of 0xaa with bytes of nobody's ``beside`` them."""
    size = Nvfp4Layout(nope).page_bytes(page)
    wide = torch.full((pages, size + beside), 0xAA, dtype=torch.uint8, device=device)
    return wide[:, :size]


def both(kv, pages, page, slots, device):
    """Pages by the kernel and by the ref."""
    nope = kv.shape[1] - 64
    got, want = blank(nope, pages, page, device), blank(nope, pages, page, "cpu")
    kernel.store_nvfp4(kv.to(device), got, slots.to(device))
    ref.store_nvfp4(kv, want, slots)
    return got.cpu(), want


@pytest.mark.parametrize(("T", "dtype"), list(zip(SIZES, (BF16, F32, BF16, F32, BF16), strict=True)))
def test_every_number_of_rows(T, dtype, accelerator):
    slots = slots_of(T, 6, 64)
    kv = draw(len(slots), 512, seed=2, decades=2).to(dtype)
    assert_bitwise(*both(kv, 6, 64, slots, accelerator))


@pytest.mark.parametrize(("nope", "page"), [(64, 1), (192, 16), (448, 2), (512, 64), (576, 3)])
def test_every_width_and_page(nope, page, accelerator):
    slots = slots_of(5, 7, page)
    assert_bitwise(*both(draw(len(slots), nope + 64, seed=3, decades=1), 7, page, slots, accelerator))


def test_negative_slots_are_skipped_and_strided_rows_and_pages_are_read(accelerator):
    kv = draw(8, 600, seed=5)[::2, 40:552]
    slots = torch.tensor([3, -1, 9, -7])
    got, want = blank(448, 5, 2, accelerator, beside=64), blank(448, 5, 2, "cpu")
    ref.store_nvfp4(kv, want, slots)
    kernel.store_nvfp4(kv.to(accelerator), got, slots.to(accelerator))
    assert_bitwise(got.cpu(), want)
    assert (got.as_strided((5, 64), (got.stride(0), 1), got.shape[1]) == 0xAA).all()


def test_special_values_have_the_refs_bytes(accelerator):
    kv = draw(12, 512, seed=6)
    kv[0], kv[1], kv[2, 70], kv[3, 500] = 0.0, -0.0, float("nan"), float("nan")
    kv[4, 3], kv[5, 511], kv[6] = float("inf"), float("-inf"), kv[6] * 1e-30
    kv[7, :16], kv[8, 64:80] = 1e-9, kv[8, 64:80] * 1e30  # a scale that rounds to 0; others that do
    kv[9], kv[10] = kv[9] * 1e-42, kv[10] * 3e37  # gsa 0 or subnormal; near FP32's largest
    kv[11, :448] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(56)  # ties
    assert_bitwise(*both(kv, 2, 8, torch.arange(12), accelerator))


def test_misfits_are_refused():
    kv, slots, pages = torch.zeros(3, 512), torch.zeros(3, dtype=torch.int64), blank(448, 2, 4, "cpu")
    with pytest.raises(ValueError, match=r"no page of Nvfp4Layout\(nope=448\)"):
        kernel.store_nvfp4(kv, pages[:, :-1], slots)
    with pytest.raises(ValueError, match="multiple of 64"):
        kernel.store_nvfp4(kv[:, :500], pages, slots)
    with pytest.raises(TypeError, match="kv_store: slots"):
        kernel.store_nvfp4(kv, pages, slots.int())
