"""CUDA graphs of the ops whose rows have lengths of their own: a replay reads what its inputs' buffers hold by then.

A whole decode step is in dsv4/backend/test_step.py, the Hopper attention kernels in sparse_attn/test_hopper_kernel.py.
"""

from functools import partial

import pytest
import torch

from kernels._check import assert_replay_equals_eager
from kernels.compress.kernel import compress
from kernels.formats import aligned_record
from kernels.formats.kv_record import RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.gather_dequantise.kernel import gather_dequantise
from kernels.index_key.kernel import ENTRY_BYTES, store_index_keys
from kernels.index_logits.kernel import paged_index_logits, paged_index_logits_fp4
from kernels.index_topk.kernel import index_topk
from kernels.kv_norm_rope_store.kernel import kv_norm_rope_store, kv_norm_rope_store_aligned
from kernels.kv_store.kernel import store, store_aligned, store_nvfp4
from kernels.sparse_attn.kernel import room, sparse_attn_fp8, sparse_attn_gathered, sparse_attn_widened

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no GPU: CUDA graphs need one")]
B, PAGE, PAGES, EPS = 5, 64, 40, 1e-6
F32, U8 = torch.float32, torch.uint8


@pytest.fixture(autouse=True)
def on_gpu():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


def slots(count):
    """A slot of its own for each row, but none for every third."""
    found = torch.randperm(PAGES * PAGE)[:count]
    found[::3] = -1
    return found


def lists(width):
    """Keys of B rows at unequal lengths: int32, -1 behind."""
    found = torch.randint(0, PAGES * PAGE, (B, width), dtype=torch.int32)
    lengths = torch.randint(0, width + 1, (B, 1))
    return torch.where(torch.arange(width) < lengths, found, -1)


def stored():
    """Pages of random records, and the aligned ones' data and scales."""
    layout, rows = RecordLayout(448), torch.randn(PAGES * PAGE, 512)
    pages = torch.zeros(PAGES, layout.page_bytes(PAGE), dtype=U8)
    layout.write(pages, torch.arange(PAGES * PAGE), *layout.encode(rows))
    data, scale = aligned_record.encode(rows)
    return pages, data.view(PAGES, PAGE, -1), scale.view(PAGES, PAGE)


@pytest.mark.parametrize("form", ["fp8", "fp4"])
@pytest.mark.parametrize("entries", [200, 20_000])
def test_scores_of_unequal_lengths(form, entries):
    M, H = -(-entries // PAGE), 64
    pages = torch.randint(0, 120, (4 * M, PAGE * ENTRY_BYTES[form]), dtype=U8)
    table = torch.randint(0, 4 * M, (B, M), dtype=torch.int32)
    q = torch.randint(0, 120, (B, 1, H, 128), dtype=U8).view(torch.float8_e4m3fn)
    weights, out = torch.randn(B, 1, H), torch.empty(B, 1, M * PAGE)
    limits = torch.randint(0, entries, (B, 1), dtype=torch.int32)
    op = paged_index_logits if form == "fp8" else paged_index_logits_fp4

    def change():
        limits.add_(7)
        table.copy_(table.roll(1, 1))

    def launch():
        op(q, pages, table, weights, limits, page_size=PAGE, out=out)

    assert_replay_equals_eager(launch, [out], change)


@pytest.mark.parametrize(("entries", "k"), [(64, 40), (4000, 512), (40_000, 512)])
def test_choices_of_unequal_lengths(entries, k):
    scores, out = torch.randn(B, entries), torch.empty(B, k, dtype=torch.int32)
    visible = torch.randint(0, entries, (B,), dtype=torch.int32)

    def change():
        visible.add_(1)
        scores.neg_()

    assert_replay_equals_eager(lambda: index_topk(scores, visible, k, out=out), [out], change)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_kv_rows_at_changing_slots(fused, aligned):
    kv, at, (pages, data, scale) = torch.randn(B, 512).bfloat16(), slots(B), stored()
    args = (torch.rand(512), torch.randn(B, 32), torch.randn(B, 32)) if fused else ()
    place = (data, scale) if aligned else (pages,)
    plain, turned = (store_aligned, kv_norm_rope_store_aligned) if aligned else (store, kv_norm_rope_store)
    op, options = (turned, {"eps": EPS}) if fused else (plain, {})
    assert_replay_equals_eager(
        lambda: op(kv, *args, *place, at, **options), place, lambda: at.copy_(slots(B + 1)[1:])
    )


def test_nvfp4_rows_at_changing_slots_and_lists():
    kv, at, idx = torch.randn(B, 512).bfloat16(), slots(B), lists(200)
    pages = torch.zeros(PAGES, Nvfp4Layout(448).page_bytes(PAGE), dtype=U8)
    keys = torch.empty(B, 200, 512, dtype=torch.bfloat16)

    def change():
        at.copy_(slots(B + 1)[1:])
        idx.copy_(lists(200))

    assert_replay_equals_eager(lambda: store_nvfp4(kv, pages, at), [pages], change)
    Nvfp4Layout(448).write(
        pages, torch.arange(PAGES * PAGE), *Nvfp4Layout(448).encode(torch.randn(PAGES * PAGE, 512))
    )
    gather = partial(gather_dequantise, pages, idx, nope=448, kv_format="nvfp4", out=keys)
    assert_replay_equals_eager(gather, [keys], change)


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_index_keys_at_changing_slots(form):
    x, weight, cos, sin = torch.randn(B, 128), torch.rand(128), torch.randn(B, 32), torch.randn(B, 32)
    at, pages = slots(B), torch.zeros(PAGES, PAGE * ENTRY_BYTES[form], dtype=U8)

    def launch():
        store_index_keys(x, weight, cos, sin, at, pages, eps=EPS, page_size=PAGE, form=form)

    assert_replay_equals_eager(launch, [pages], lambda: at.copy_(slots(B + 1)[1:]))


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
def test_windows(ratio, overlap):
    rows, D = ratio * (3 + overlap), 512
    kv, gate = torch.randn(2, rows, D * (1 + overlap))
    bias, out = torch.randn(ratio, D * (1 + overlap)), torch.empty(3, D)
    assert_replay_equals_eager(
        lambda: compress(kv, gate, bias, ratio=ratio, overlap=overlap, out=out), [out], lambda: kv.mul_(2)
    )


@pytest.mark.parametrize("path", ["b0", "b1a", "b1", "b1_q2", "b1_aligned"])
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_to_lists_of_unequal_length(path, splits):
    H, S, (pages, data, scale) = 64, 640, stored()
    q, idx, sinks = torch.randn(B, H, 512).bfloat16(), lists(S), torch.randn(H)
    record = torch.randint(0, 100, (B, H, 576), dtype=U8)
    record[..., 448:] = torch.randn(B, H, 64).bfloat16().view(U8)
    rest = torch.randint(0, 100, (B, H, 448), dtype=U8) if "q2" in path else None
    q_scale, keys = torch.rand(B, H) / 64, torch.empty(B, S, 512, dtype=torch.bfloat16)
    into, aligned = room(B, H, S, 512, torch.device("cuda"), splits=splits), "aligned" in path
    on = {"scale": 512**-0.5, "into": into}

    def launch():
        if path == "b0":
            gather_dequantise(pages, idx, nope=448, out=keys)
            sparse_attn_gathered(q, keys, idx, sinks, **on)
        elif path == "b1a":
            sparse_attn_widened(q, pages, idx, sinks, **on)
        else:
            where = data if aligned else pages
            token_scale = scale if aligned else None
            sparse_attn_fp8(record, q_scale, where, idx, sinks, residual=rest, token_scale=token_scale, **on)

    assert_replay_equals_eager(launch, [into.out, into.lse], lambda: idx.copy_(lists(S)))
