"""Pages past 2^31 bytes give what pages at the start give: offsets are 64 bits wide. On a GPU with 5 GB free.

The pool lies in memory that an offset wrapped at 32 bits stays inside: it would be read there as other bytes, of
which each test shows that they give another result, and would be written there, where nothing may change.
"""

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs
from kernels.formats import aligned_record
from kernels.formats.kv_record import RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.gather_dequantise.kernel import gather_dequantise
from kernels.index_key.kernel import ENTRY_BYTES, store_index_keys
from kernels.index_logits.kernel import paged_index_logits, paged_index_logits_fp4
from kernels.kv_norm_rope_store.kernel import kv_norm_rope_store, kv_norm_rope_store_aligned
from kernels.kv_store.kernel import store, store_aligned, store_nvfp4
from kernels.sparse_attn.combine_kernel import _combine_kernel, sizes_for
from kernels.sparse_attn.kernel import room, sparse_attn_fp8, sparse_attn_gathered, sparse_attn_widened

LIMIT, FREE = 2**31, 5 * 10**9
GPU = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= FREE
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="no GPU with 5 GB free: nothing is past 2^31"),
]
PAGE, T, S, H, WIDTH = 64, 3, 130, 64, 512
BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
LAYOUT, NVFP4 = RecordLayout(WIDTH - 64), Nvfp4Layout(WIDTH - 64)
RECORDS, ALIGNED = LAYOUT.page_bytes(PAGE), PAGE * (WIDTH + 64)


@pytest.fixture(autouse=True)
def _on_gpu():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@pytest.fixture(params=["dense", "strided"])
def pool(request):
    """Makes pages of so many bytes: the far pool, where a wrapped offset to its last page lies, and that page."""

    def make(page_bytes: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        stride = page_bytes if request.param == "dense" else 2**26
        far = LIMIT // stride + 1
        memory = torch.empty(2 * LIMIT + 2 * stride, dtype=U8)
        pages = memory[LIMIT:].as_strided((far + 1, page_bytes), (stride, 1))
        wrapped = memory[LIMIT + far * stride - 2**32 :][:page_bytes]
        return pages, wrapped, far

    return make


def records(layout: RecordLayout = LAYOUT) -> torch.Tensor:
    """Three pages of records, (3, page_bytes)."""
    pages = torch.zeros(3, layout.page_bytes(PAGE), dtype=U8)
    layout.write(pages, torch.arange(3 * PAGE), *layout.encode(torch.randn(3 * PAGE, WIDTH)))
    return pages


def aligned() -> torch.Tensor:
    """Three pages of the aligned record's data, (3, ALIGNED)."""
    return aligned_record.encode(torch.randn(3 * PAGE, WIDTH))[0].view(3, -1)


def index_keys(form: str) -> torch.Tensor:
    """Three pages of index keys, (3, bytes)."""
    codes = PAGE * (128 if form == "fp8" else 64)
    pages = torch.randint(0, 120, (3, PAGE * ENTRY_BYTES[form]), dtype=U8)
    if form == "fp8":
        pages[:, codes:] = torch.rand(3, PAGE).view(U8)
    return pages


def assert_read(op, pool, three: torch.Tensor) -> None:
    """``op(pages, number of the second page)``: far as near, and another with the bytes of a wrapped offset."""
    pages, wrapped, far = pool(three.shape[1])
    pages[0], pages[far], wrapped[:] = three
    want = op(three[:2], 1)
    assert want.isfinite().all()
    assert_bitwise(op(pages, far).float().cpu(), want.float().cpu())
    assert_differs(op(three[::2], 1).float().cpu(), want.float().cpu())


def assert_written(op, pool, page_bytes: int) -> None:
    """``op(pages, number of the second page)`` writes the far page as a near one, and nothing that wraps there."""
    pages, wrapped, far = pool(page_bytes)
    near = torch.full((2, page_bytes), 0xAA, dtype=U8)
    for place in (pages[0], pages[far], wrapped):
        place.fill_(0xAA)
    op(near, 1)
    op(pages, far)
    assert_differs(near[1].cpu(), torch.full_like(near[1], 0xAA).cpu())
    assert_bitwise(torch.stack([pages[0], pages[far]]).cpu(), near.cpu())
    assert (wrapped == 0xAA).all()


def lists(far: int, table: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keys on the first and the far page (T, S), as slots or through a page table."""
    generator = torch.Generator("cuda").manual_seed(1)
    row = torch.randint(0, 2 * PAGE, (T, S), dtype=I32, generator=generator)
    if table:
        sequence = torch.zeros(T, dtype=I32)
        return row, {"page_table": torch.tensor([[0, far]], dtype=I32), "sequence": sequence}
    return torch.where(row < PAGE, row, far * PAGE + row % PAGE), {}


@pytest.mark.parametrize("table", [False, True], ids=["slots", "table"])
@pytest.mark.parametrize(("kv_format", "layout"), [("fp8", LAYOUT), ("nvfp4", NVFP4)], ids=["584", "nvfp4"])
def test_the_gather(pool, table, kv_format, layout):
    def op(pages, far):
        idx, paged = lists(far, table)
        return gather_dequantise(pages, idx, nope=WIDTH - 64, kv_format=kv_format, **paged)

    assert_read(op, pool, records(layout))


@pytest.mark.parametrize("table", [False, True], ids=["slots", "table"])
def test_attention_in_place(pool, table):
    q, sinks = torch.randn(T, H, WIDTH).to(BF16), torch.randn(H)

    def op(pages, far):
        idx, paged = lists(far, table)
        return sparse_attn_widened(q, pages, idx, sinks, scale=WIDTH**-0.5, **paged)[0]

    assert_read(op, pool, records())


@pytest.mark.parametrize("path", [None, "portable"])
@pytest.mark.parametrize("form", ["584", "584_table", "584_q2", "aligned"])
def test_attention_in_fp8(pool, form, path):
    q = torch.randint(0, 100, (T, H, WIDTH + 64), dtype=U8)
    q[..., WIDTH - 64 :] = torch.randn(T, H, 64).to(BF16).view(U8)
    rest = torch.randint(0, 100, (T, H, WIDTH - 64), dtype=U8) if "q2" in form else None
    q_scale, sinks = torch.full((T, H), 2.0**-6), torch.randn(H)

    def op(pages, far):
        idx, paged = lists(far, "table" in form)
        scale = {}
        if form == "aligned":
            pages = pages.unflatten(1, (PAGE, -1))
            scale = {"token_scale": torch.full((len(pages), PAGE), 2.0**-6)}
        options = {"scale": WIDTH**-0.5, "residual": rest, "path": path, **paged, **scale}
        return sparse_attn_fp8(q, q_scale, pages, idx, sinks, **options)[0]

    assert_read(op, pool, aligned() if form == "aligned" else records())


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_scores(pool, form):
    q = torch.randint(0, 120, (1, 1, H, 128), dtype=U8).view(torch.float8_e4m3fn)
    weights, limits = torch.rand(1, 1, H), torch.full((1, 1), 2 * PAGE, dtype=I32)
    scores = paged_index_logits if form == "fp8" else paged_index_logits_fp4

    def op(pages, far):
        return scores(q, pages, torch.tensor([[0, far]], dtype=I32), weights, limits, page_size=PAGE)

    assert_read(op, pool, index_keys(form))


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_index_keys(pool, form):
    x, weight, cos, sin = torch.randn(T, 128), torch.rand(128), torch.randn(T, 32), torch.randn(T, 32)

    def op(pages, far):
        at = torch.tensor([3, far * PAGE, far * PAGE + PAGE - 1])
        store_index_keys(x, weight, cos, sin, at, pages, eps=1e-6, page_size=PAGE, form=form)

    assert_written(op, pool, PAGE * ENTRY_BYTES[form])


@pytest.mark.parametrize("fused", [False, True], ids=["store", "norm_rope_store"])
@pytest.mark.parametrize("form", ["584", "aligned"])
def test_keys_and_values(pool, form, fused):
    kv = torch.randn(T, WIDTH).to(BF16)
    norm = (torch.rand(WIDTH), torch.randn(T, 32), torch.randn(T, 32)) if fused else ()
    options = {"eps": 1e-6} if fused else {}
    plain, turned = (
        (store, kv_norm_rope_store) if form == "584" else (store_aligned, kv_norm_rope_store_aligned)
    )

    def op(pages, far):
        at = torch.tensor([3, far * PAGE, far * PAGE + PAGE - 1])
        place = (pages,)
        if form == "aligned":
            place = (pages.unflatten(1, (PAGE, -1)), torch.zeros(len(pages), PAGE))
        (turned if fused else plain)(kv, *norm, *place, at, **options)

    assert_written(op, pool, RECORDS if form == "584" else ALIGNED)


def test_keys_and_values_in_nvfp4(pool):
    kv = torch.randn(T, WIDTH).to(BF16)

    def op(pages, far):
        store_nvfp4(kv, pages, torch.tensor([3, far * PAGE, far * PAGE + PAGE - 1]))

    assert_written(op, pool, NVFP4.page_bytes(PAGE))


@pytest.mark.parametrize("path", [None, "portable"])
def test_a_gathered_buffer_of_more_than_2_31_keys(path):
    keys, heads = 640, 16
    rows = LIMIT // (keys * WIDTH) + 2
    memory = torch.empty(rows, keys, WIDTH, dtype=BF16)
    near = torch.randn(1, keys, WIDTH).to(BF16)
    memory[-1] = near
    q, sinks = torch.randn(rows, heads, WIDTH).to(BF16), torch.randn(heads)
    idx = torch.arange(keys, dtype=I32).expand(rows, keys).contiguous()
    out = []
    for last, buffer in ((slice(None), memory), (slice(-1, None), near)):
        into = room(len(buffer), heads, keys, WIDTH, buffer.device, splits=1)
        got = sparse_attn_gathered(q[last], buffer, idx[last], sinks, scale=WIDTH**-0.5, path=path, into=into)
        out.append(got[0][-1].float().cpu())
    assert out[1].isfinite().all()
    assert_bitwise(*out)


@pytest.mark.skipif(
    GPU and torch.cuda.mem_get_info()[0] < 2 * FREE, reason="no GPU with 10 GB free: its parts lie 4 GB apart"
)
def test_a_part_past_2_31_values_joins_like_one_beside_the_first():
    """One program of a launch too large to make; where an offset wrapped at 32 bits lands, another part lies."""
    rows = LIMIT // WIDTH  # of a part
    near, lse, sink = torch.randn(3, WIDTH).to(BF16), torch.randn(2, 1), torch.zeros(1)
    far, far_lse = torch.empty(2 * LIMIT + WIDTH, dtype=BF16), torch.empty(rows + 1)
    far[LIMIT:][:WIDTH], far[2 * LIMIT :], far[:WIDTH] = near
    far_lse[0], far_lse[rows] = lse

    def joined(parts, lses, row_heads):
        out, out_lse = torch.empty(WIDTH, dtype=BF16), torch.empty(1)
        given = (parts, lses, sink, out, out_lse, 2, row_heads, 1)
        _combine_kernel[(1,)](*given, K=WIDTH, **sizes_for(2), PDL=False, num_warps=1)
        return out.float().cpu()

    want = joined(near[:2].contiguous(), lse, 1)
    assert_bitwise(joined(far[LIMIT:], far_lse, rows), want)
    assert_differs(joined(near[::2].contiguous(), lse, 1), want)
