"""FP4 scores against the ref on the dequantised values: exact groups, FP32 sums; pages, limits, edges."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import e2m1, e4m3, mxfp4, ue8m0
from kernels.index_logits import ref
from kernels.index_logits.fp4_kernel import ENTRY_BYTES
from kernels.index_logits.kernel import paged_index_logits_fp4
from kernels.index_query.ref import folded

D = 128
POISON = 1e30
BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
on_blackwell = pytest.mark.skipif(not BLACKWELL, reason="no Blackwell GPU: FP4 products are not interpreted")


def case(B, N, C, H=8, seed=0, decades=0.0):
    """Folded query, its FP32 values, the keys' bytes and values, head weights before and after folding."""
    q_codes, q_scale = mxfp4.quantise(draw(B * N, H, D, seed=seed, decades=decades))
    k_codes, k_scale = mxfp4.quantise(draw(C, D, seed=seed + 1, decades=3 * decades))
    weights = draw(B * N, H, seed=seed + 2)
    codes, out_weights = folded(e2m1.pack(q_codes), ue8m0.encode(q_scale), weights)
    values = mxfp4.dequantise(q_codes, q_scale), mxfp4.dequantise(k_codes, k_scale)
    return codes, out_weights, e2m1.pack(k_codes), ue8m0.encode(k_scale), values, weights


def in_pages(codes, scales, page_size, pool, device, seed=0):
    """Pages of keys at shuffled places of a pool: (pages, page ids)."""
    count = -(-len(codes) // page_size)
    generator = torch.Generator().manual_seed(len(codes) + seed)
    ids = torch.randperm(pool, generator=generator)[:count].to(torch.int32)
    pages = torch.full((pool, page_size * ENTRY_BYTES), 0xFF, dtype=torch.uint8)
    for entry in range(len(codes)):
        page, inside = int(ids[entry // page_size]), entry % page_size
        pages[page, inside * 64 : (inside + 1) * 64] = codes[entry]
        at = page_size * 64 + 4 * inside
        pages[page, at : at + 4] = scales[entry]
    return pages.to(device), ids


def run(made, B, N, limits, device, *, page_size=64, fill=True):
    """Scores (B, N, width); each sequence has keys of its own: those of the one before, moved by 7."""
    codes, weights, k_codes, k_scales, _, _ = made
    pools = [
        in_pages(k_codes.roll(7 * b, 0), k_scales.roll(7 * b, 0), page_size, 24, device, b) for b in range(B)
    ]
    pages, ids = torch.cat([pool for pool, _ in pools]), torch.stack([own for _, own in pools])
    width, H = ids.shape[1] * page_size, codes.shape[1]
    out = torch.full((B, N, width), POISON, device=device)
    q = codes.view(torch.float8_e4m3fn).view(B, N, H, D).to(device)
    table = (ids + 24 * torch.arange(B, dtype=torch.int32)[:, None]).to(device)
    args = (q, pages, table, weights.view(B, N, H).to(device), limits.to(device))
    return paged_index_logits_fp4(*args, page_size=page_size, fill=fill, out=out).cpu()


def bound(values, weights):
    """Three sums of exact groups, H products and their sum: each FP32 operation half an ulp of what it holds."""
    q, k = (x.double().abs() for x in values)
    dots = torch.einsum("thd,sd->ths", q, k)
    return (dots * weights.double().abs()[..., None]).sum(1) * (4 + q.shape[1] + 3) * 2.0**-24


@pytest.mark.parametrize(
    ("N", "C", "H", "decades"), [(1, 1, 8, 0.0), (3, 129, 5, 0.0), (2, 300, 64, 0.7), (1, 127, 1, 0.0)]
)
def test_equals_the_ref(N, C, H, decades, accelerator):
    made = case(1, N, C, H, decades=decades)
    values, weights = made[4:]
    got = run(made, 1, N, torch.full((1, N), C, dtype=torch.int32), accelerator)[0, :, :C]
    want = ref.index_logits(*values, weights, narrow=True)
    assert bool(((got.double() - want.double()).abs() <= bound(values, weights)).all())


@pytest.mark.gpu
@on_blackwell
@pytest.mark.parametrize(("N", "C", "H"), [(1, 1, 16), (3, 129, 64)])
@pytest.mark.parametrize("fill", [True, False])
def test_native_products_equal_the_ref(N, C, H, fill):
    """Both operands as stored. Each of D products, cut as it is added, may lose 2^-23 of the sum of magnitudes."""
    _, _, k_codes, k_scales, values, weights = case(1, N, C, H)
    q_codes, q_scales = mxfp4.quantise(values[0])
    pages, ids = in_pages(k_codes, k_scales, 64, 24, "cuda")
    limits = torch.arange(C, C - N, -1, dtype=torch.int32).clamp_min(0)
    out = torch.full((1, N, 64 * len(ids)), POISON, device="cuda")
    got = paged_index_logits_fp4(
        e2m1.pack(q_codes)[None].cuda(),
        pages,
        ids[None].cuda(),
        weights[None].cuda(),
        limits[None].cuda(),
        page_size=64,
        q_scales=ue8m0.encode(q_scales)[None].cuda(),
        fill=fill,
        out=out,
    )[0].cpu()
    want, slack = ref.index_logits(*values, weights, narrow=True), bound(values, weights) * (2 * D + H) / H
    shown = torch.arange(C) < limits[:, None]
    assert bool(((got[:, :C].double() - want.double()).abs() <= slack)[shown].all())
    assert bool((got[:, :C][~shown] == (-math.inf if fill else POISON)).all())
    assert bool((got[:, C:] == (-math.inf if fill else POISON)).all())


def test_one_head_of_small_scales_is_exact(accelerator):
    """One head, one weight of 1, scales that differ by powers of two alone: nothing rounds but the sum of 4 groups."""
    made = case(1, 1, 60, 1, seed=3)
    codes, out_weights, *rest = made
    unit = out_weights / made[5]
    got = run((codes, unit, *rest), 1, 1, torch.tensor([[60]], dtype=torch.int32), accelerator)[0, :, :60]
    want = ref.index_logits(*made[4], torch.ones(1, 1), narrow=True)
    error = (got - want).abs() / bound(made[4], torch.ones(1, 1))
    assert float(error.max()) <= 3 / 12  # three sums of the twelve roundings that the bound allows


@pytest.mark.parametrize("page_size", [4, 64, 128])
@pytest.mark.parametrize("fill", [True, False])
def test_limits_and_pages(page_size, fill, accelerator):
    made = case(2, 2, 90 if page_size == 4 else 200, seed=5)
    limits = torch.tensor([[70, 71], [0, 90]], dtype=torch.int32)
    got = run(made, 2, 2, limits, accelerator, page_size=page_size, fill=fill)
    whole = run(made, 2, 2, torch.full((2, 2), len(made[2]), dtype=torch.int32), accelerator)[..., :90]
    values, weights = made[4:]
    want, slack = ref.index_logits(*values, weights, narrow=True).double(), bound(values, weights)
    for b, mine in enumerate(whole.double()):
        rows = slice(2 * b, 2 * b + 2)
        assert bool(
            ((mine - want[rows].roll(7 * b, 1)[:, :90]).abs() <= slack[rows].roll(7 * b, 1)[:, :90]).all()
        )
    hidden = torch.arange(90) >= limits[..., None]
    assert_bitwise(got[..., :90], whole.masked_fill(hidden, -math.inf if fill else POISON))
    assert bool((got[..., 90:] == (-math.inf if fill else POISON)).all())


def test_a_lost_key_is_nan_alone(accelerator):
    made = case(1, 2, 40, seed=7)
    limits = torch.full((1, 2), 40, dtype=torch.int32)
    clean = run(made, 1, 2, limits, accelerator)
    made[3][11, 2] = ue8m0.NAN_CODE
    got = run(made, 1, 2, limits, accelerator)
    assert bool(got[..., 11].isnan().all())
    keep = torch.arange(40) != 11
    assert_bitwise(got[..., :40][..., keep], clean[..., :40][..., keep])


def test_refuses(accelerator):
    codes, weights, *_ = case(1, 1, 4)
    pages = torch.zeros(2, 68 * 4, dtype=torch.uint8, device=accelerator)
    table = torch.zeros(1, 1, dtype=torch.int32, device=accelerator)
    q = codes.view(torch.float8_e4m3fn).view(1, 1, 8, D).to(accelerator)
    rest = (table, weights.view(1, 1, 8).to(accelerator), torch.ones_like(table))
    with pytest.raises(TypeError, match="q is"):
        paged_index_logits_fp4(q.view(torch.uint8), pages, *rest, page_size=4)
    packed = q.view(torch.uint8)[..., :64].contiguous()
    scales = torch.zeros(1, 1, 8, 4, dtype=torch.uint8, device=accelerator)
    with pytest.raises(ValueError, match="power of two from 16 on"):
        paged_index_logits_fp4(packed, pages, *rest, page_size=4, q_scales=scales)
    with pytest.raises(ValueError, match="do not hold page_size = 5"):
        paged_index_logits_fp4(q, pages, *rest, page_size=5)


def test_faults_would_show(accelerator):
    made = case(1, 3, 60, seed=9, decades=0.5)
    (q, k), weights = made[4:]
    got = run(made, 1, 3, torch.full((1, 3), 60, dtype=torch.int32), accelerator)[0, :, :60].double()
    slack = bound((q, k), weights)
    nibbles = k.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    groups = k.unflatten(-1, (4, 32)).roll(1, -2).flatten(-2)
    fp8 = e4m3.decode(made[0])
    for fault in (
        ref.index_logits(q, nibbles, weights, narrow=True),
        ref.index_logits(q, groups, weights, narrow=True),
        ref.index_logits(q, -k, weights, narrow=True),
        ref.index_logits(fp8, k, weights, narrow=True),  # the unit not folded into the weights
    ):
        assert bool(((got - fault.double()).abs() > slack).any())
