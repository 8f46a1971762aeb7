"""B3's kernel has the bytes of its three kernels, and of the record's encoder on what two of them give."""

import pytest
import torch

from kernels._check import assert_bitwise, assert_fault_seen, draw
from kernels.formats.kv_record import RecordLayout
from kernels.kv_norm_rope_store import kernel, ref
from kernels.kv_store import kernel as kv_store
from kernels.kv_store import ref as kv_store_ref
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.kernel import rope
from kernels.rope.ref import cos_sin, inverse_frequencies

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6


def inputs(T, device, width=512, dtype=BF16, seed=1):
    """kv, weight, cos, sin, and slots of 16 a page, shuffled."""
    turn = cos_sin(torch.arange(T) * 977 + 3, inverse_frequencies(64, 1.6e5))
    slots = torch.randperm(320, generator=torch.Generator().manual_seed(seed))[:T]
    kv = draw(T, width, seed=seed, decades=1).to(dtype)
    return [t.to(device) for t in (kv, draw(width, seed=2).to(BF16), *turn, slots)]


def pages(width, device):
    return torch.full((20, RecordLayout(width - 64).page_bytes(16)), 0xAA, dtype=torch.uint8, device=device)


def unfused(kv, weight, cos, sin, dtype):
    return rope(rmsnorm(kv, weight, eps=EPS, dtype=dtype), cos, sin, dtype=dtype)


@pytest.mark.parametrize("between", [BF16, F32], ids=["through bf16", "in registers"])
@pytest.mark.parametrize(
    ("T", "width", "dtype"),
    [(0, 512, BF16), (1, 512, BF16), (3, 256, F32), (127, 512, BF16), (270, 512, F32)],
)
def test_has_the_bytes_of_three_kernels(T, width, dtype, between, accelerator):
    *values, slots = inputs(T, accelerator, width, dtype)
    got, want = pages(width, accelerator), pages(width, accelerator)
    kernel.kv_norm_rope_store(*values, got, slots, eps=EPS, between=between)
    kv_store.store(unfused(*values, between), want, slots)
    assert_bitwise(got.cpu(), want.cpu())


def test_is_the_encoder_of_the_unrounded_row(accelerator):
    *values, slots = inputs(20, accelerator)
    got, want = pages(512, accelerator), pages(512, "cpu")
    kernel.kv_norm_rope_store(*values, got, slots, eps=EPS)
    layout = RecordLayout(448)
    layout.write(want, slots.cpu(), *layout.encode(unfused(*values, F32).cpu()))
    assert_bitwise(got.cpu(), want)


@pytest.mark.parametrize("between", [BF16, F32], ids=["through bf16", "in registers"])
@pytest.mark.parametrize("T", [0, 1, 40])
def test_aligned_record(T, between, accelerator):
    *values, slots = inputs(T, accelerator)
    data = torch.full((20, 16, 576), 0xAA, dtype=torch.uint8)
    got, want = (data.to(accelerator), torch.zeros(20, 16, device=accelerator)), (data, torch.zeros(20, 16))
    kernel.kv_norm_rope_store_aligned(*values, *got, slots, eps=EPS, between=between)
    kv_store_ref.store_aligned(unfused(*values, between).float().cpu(), *want, slots.cpu())
    assert_bitwise(got[0].cpu(), want[0])
    assert_bitwise(got[1].cpu(), want[1])


def test_values_are_the_ref_s_but_next_to_a_code_s_edge(accelerator):
    *values, slots = inputs(20, accelerator)
    got, want = pages(512, accelerator), pages(512, "cpu")
    kernel.kv_norm_rope_store(*values, got, slots, eps=EPS)
    ref.kv_norm_rope_store(*(v.cpu().float() for v in values), want, slots.cpu(), eps=EPS)
    layout = RecordLayout(448)
    (data, scales), (wanted, wanted_scales) = (layout.read(p.cpu(), slots.cpu()) for p in (got, want))
    assert_bitwise(scales, wanted_scales)
    # an error of 12 ulp against a BF16 step of 2^16 and an E4M3 step of 2^20: less than one in a thousand
    assert (data != wanted).double().mean() < 1e-3


def test_padding_strides_and_rows_alone(accelerator):
    *values, slots = inputs(12, accelerator)
    slots[3], slots[7] = -1, -9
    whole = pages(512, accelerator)
    wide = torch.zeros(12, 600, dtype=BF16, device=accelerator)
    wide[:, 40:552] = values[0]
    kernel.kv_norm_rope_store(wide[:, 40:552], *values[1:], whole, slots, eps=EPS)
    alone = pages(512, accelerator)
    for row in torch.randperm(12).tolist():
        kv, weight, *turn = values
        part = [t[row : row + 1] for t in (kv, *turn, slots)]
        kernel.kv_norm_rope_store(part[0], weight, *part[1:3], alone, part[3], eps=EPS)
    assert_bitwise(whole.cpu(), alone.cpu())
    want = pages(512, accelerator)
    kv_store.store(unfused(*values, F32), want, slots)
    assert_bitwise(whole.cpu(), want.cpu())
    assert_bitwise((whole != 0xAA).any(1).cpu(), torch.isin(torch.arange(20), slots.cpu() // 16))


def test_special_rows_are_their_own(accelerator):
    *values, slots = inputs(5, accelerator, dtype=F32)
    values[0][1], values[0][2, 5], values[0][3] = 0.0, float("nan"), 1e-30
    got, want = pages(512, accelerator), pages(512, accelerator)
    kernel.kv_norm_rope_store(*values, got, slots, eps=EPS)
    kv_store.store(unfused(*values, F32), want, slots)
    layout = RecordLayout(448)
    read = [layout.decode(*layout.read(p.cpu(), slots.cpu())) for p in (got, want)]
    assert_bitwise(*read)
    assert read[0].isnan().all(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("fault", ["position", "rounds between", "eps", "weight"])
def test_a_planted_fault_is_seen(fault, accelerator):
    *values, slots = inputs(6, accelerator)
    values[0] = values[0] * 1e-3
    got, want = pages(512, accelerator), pages(512, accelerator)
    kv_store.store(unfused(*values, F32), want, slots)
    if fault == "position":
        values[2], values[3] = values[2].roll(1, 0), values[3].roll(1, 0)
    elif fault == "weight":
        values[1] = values[1].roll(1)
    options = {
        "eps": EPS * 2 if fault == "eps" else EPS,
        "between": BF16 if fault == "rounds between" else F32,
    }
    kernel.kv_norm_rope_store(*values, got, slots, **options)
    assert_fault_seen(lambda: assert_bitwise(got.cpu(), want.cpu()))


def test_misfits_are_refused():
    kv, weight, cos, sin, slots = inputs(3, "cpu")
    with pytest.raises(ValueError, match="kv_norm_rope_store: weight"):
        kernel.kv_norm_rope_store(kv, weight[:-1], cos, sin, pages(512, "cpu"), slots, eps=EPS)
    with pytest.raises(ValueError, match="no page of"):
        kernel.kv_norm_rope_store(kv, weight, cos, sin, pages(256, "cpu"), slots, eps=EPS)
    with pytest.raises(ValueError, match="kv_norm_rope_store: cos"):
        kernel.kv_norm_rope_store(kv, weight, cos[:, :31], sin, pages(512, "cpu"), slots, eps=EPS)
