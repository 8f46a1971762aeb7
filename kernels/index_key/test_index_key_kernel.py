"""The key's kernel against norm kernel + refs, bit for bit; pages, slots that write nothing, special rows."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import e2m1, e4m3, fp8_scaled, mxfp4, ue8m0
from kernels.hadamard.ref import hadamard
from kernels.index_key import kernel, ref
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.ref import cos_sin, inverse_frequencies, rope

D, EPS = 128, 1e-6
POISON = 0xAA


def case(E, seed=0, decades=0.0):
    cos, sin = cos_sin(torch.arange(E) * 4 + 1000, inverse_frequencies(64, 160000.0))
    return draw(E, D, seed=seed, decades=decades), draw(D, seed=seed + 1).bfloat16(), cos, sin


def unfused(form, x, weight, cos, sin, device):
    """Codes and scale bytes of the norm's own kernel, then the refs."""
    normed = rmsnorm(x.to(device), weight.to(device), eps=EPS, dtype=torch.float32).cpu()
    turned = rope(normed, cos, sin)
    if form == "fp8":
        codes, scale = fp8_scaled.quantise(turned)
        return codes, scale.contiguous().view(torch.uint8)
    codes, scale = mxfp4.quantise(hadamard(turned))
    return e2m1.pack(codes), ue8m0.encode(scale)


def run(form, tensors, slots, device, *, page_size=4, num_pages=6, spare=0):
    bytes_a_page = page_size * kernel.ENTRY_BYTES[form] + spare
    pages = torch.full((num_pages, bytes_a_page), POISON, dtype=torch.uint8, device=device)
    args = (x.to(device) for x in (*tensors, slots))
    kernel.store_index_keys(*args, pages, eps=EPS, page_size=page_size, form=form)
    return pages.cpu()


def read(form, pages, slots, page_size):
    """Codes and scale bytes at slots, by hand."""
    size = kernel.ENTRY_BYTES[form] - 4
    codes, scales = [], []
    for slot in slots.tolist():
        page, inside = pages[slot // page_size], slot % page_size
        codes.append(page[inside * size : (inside + 1) * size])
        at = page_size * size + 4 * inside
        scales.append(page[at : at + 4])
    return torch.stack(codes), torch.stack(scales)


def assert_same(form, got, want):
    if form == "fp8":  # NaNs of any sign and payload are alike
        got = e4m3.decode(got[0]), got[1].contiguous().view(torch.float32)
        want = e4m3.decode(want[0]), want[1].contiguous().view(torch.float32)
    for mine, wanted in zip(got, want, strict=True):
        assert_bitwise(mine, wanted)


@pytest.mark.parametrize("form", kernel.ENTRY_BYTES)
@pytest.mark.parametrize(("E", "decades"), [(1, 0.0), (3, 0.0), (19, 2.0)])
def test_equals_the_norm_kernel_and_the_refs(form, E, decades, accelerator):
    tensors = case(E, decades=decades)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(E))[:E]
    pages = run(form, tensors, slots, accelerator)
    assert_same(form, read(form, pages, slots, 4), unfused(form, *tensors, accelerator))
    touched = run(form, tensors, torch.full((E,), -1), accelerator)
    assert bool((touched == POISON).all())


@pytest.mark.parametrize("form", kernel.ENTRY_BYTES)
def test_stands_by_the_ref(form, accelerator):
    """The norm in FP32 is a few ulp from the FP64 ref's: codes flip only where they were about to.

    A norm's error of 9 ulp (a tree of 7 sums, a division, a root, two products) moves a value across a rounding
    boundary of E4M3 (2^20 ulp apart) or E2M1 with a chance under 2^-16.
    """
    tensors = case(40, seed=3)
    slots = torch.arange(40)
    pages = run(form, tensors, slots, accelerator, num_pages=10)
    codes = read(form, pages, slots, 4)[0]
    want = (ref.key_fp8 if form == "fp8" else ref.key_fp4)(*tensors, eps=EPS)[0]
    assert int((codes != want).sum()) <= 2  # of 5120 or 2560


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on NaN and overflow
@pytest.mark.parametrize("form", kernel.ENTRY_BYTES)
def test_special_rows(form, accelerator):
    x, weight, cos, sin = case(7, seed=5)
    x[0], x[1, :64], x[2, 3], x[3, 100] = 0.0, -0.0, math.nan, math.inf
    x[4], x[5] = x[4] * 1e-30, x[5] * 1e15
    slots = torch.arange(7)
    pages = run(form, (x, weight, cos, sin), slots, accelerator)
    assert_same(form, read(form, pages, slots, 4), unfused(form, x, weight, cos, sin, accelerator))


@pytest.mark.parametrize("form", kernel.ENTRY_BYTES)
def test_writes_its_own_bytes_alone(form, accelerator):
    tensors = case(3, seed=7)
    slots = torch.tensor([13, -1, 6])
    pages = run(form, tensors, slots, accelerator, spare=16)
    other = run(form, case(3, seed=8), slots, accelerator, spare=16)
    size = kernel.ENTRY_BYTES[form] - 4
    mine = torch.zeros_like(pages, dtype=torch.bool)
    for slot in (13, 6):
        at = 4 * size + 4 * (slot % 4)
        mine[slot // 4, (slot % 4) * size : (slot % 4 + 1) * size] = True
        mine[slot // 4, at : at + 4] = True
    assert bool((pages[~mine] == POISON).all())
    assert_differs(pages[mine], other[mine])


def test_strided_rows_and_none(accelerator):
    x, weight, cos, sin = case(3, seed=9)
    wide = torch.full((3, 200), math.nan)
    wide[:, :D] = x
    slots = torch.arange(3)
    dense = run("fp8", (x, weight, cos, sin), slots, accelerator)
    assert_bitwise(run("fp8", (wide[:, :D], weight, cos, sin), slots, accelerator), dense)
    empty = run("fp8", (x[:0], weight, cos[:0], sin[:0]), slots[:0], accelerator)
    assert bool((empty == POISON).all())


def test_refuses(accelerator):
    tensors = case(2)
    with pytest.raises(ValueError, match="form = 'fp6'"):
        kernel.store_index_keys(*tensors, torch.arange(2), tensors[0], eps=EPS, page_size=4, form="fp6")
    pages = torch.zeros(2, 500, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected rows of 528 bytes"):
        kernel.store_index_keys(*tensors, torch.arange(2), pages, eps=EPS, page_size=4)
    with pytest.raises(TypeError, match="slots is"):
        kernel.store_index_keys(*tensors, torch.arange(2).int(), pages, eps=EPS, page_size=4)


@pytest.mark.parametrize("form", kernel.ENTRY_BYTES)
def test_faults_would_show(form, accelerator):
    x, weight, cos, sin = case(6, seed=11)
    slots = torch.arange(6)
    codes = read(form, run(form, (x, weight, cos, sin), slots, accelerator), slots, 4)[0]
    for fault in (
        (x, weight, cos, -sin),
        (x, weight, cos.roll(1, 0), sin.roll(1, 0)),
        (x, weight.roll(1), cos, sin),
        (x.roll(1, 0), weight, cos, sin),
    ):
        assert_differs(codes, unfused(form, *fault, accelerator)[0])
