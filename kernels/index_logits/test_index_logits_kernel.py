"""The scores' kernels against the ref, within a bound on FP32 (or FP8 accumulator) sums; limits, pages, edges."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, draw, on_gpu
from kernels.formats import e4m3, fp8_scaled
from kernels.index_logits import hopper_kernel, kernel, paged_kernel, ref

D = kernel.HEAD_DIM
POISON = 1e30


def case(T, C, H=8, seed=0, decades=0.0):
    """E4M3 query codes and head weights of both signs, E4M3 keys and their scales, as the model stores them."""
    q, q_scale = fp8_scaled.quantise(draw(T, H, D, seed=seed, decades=decades))
    k, k_scale = fp8_scaled.quantise(draw(C, D, seed=seed + 1, decades=decades))
    return q, k, k_scale.squeeze(-1), draw(T, H, seed=seed + 2) * q_scale.squeeze(-1)


def wanted(q, k, scale, weights):
    return ref.index_logits(e4m3.decode(q), e4m3.decode(k), weights, key_scale=scale, narrow=True)


def bound(q, k, scale, weights, device):
    """Largest error of a score: each dot's sum, then H products and their sum, each FP32 operation half an ulp.

    Tensor cores of Hopper and later cut every FP8 product, and the running sum, to 13 bits below the largest of each
    32: 33 addends in each of D / 32 steps. The interpreter sums in FP32.
    """
    q, k = e4m3.decode(q).double().abs(), e4m3.decode(k).double().abs()
    dots = torch.einsum("thd,sd->ths", q, k)
    per_dot = D * 2.0**-24 if device == "cpu" else (D // 32) * 33 * 2.0**-13
    heads = (dots * weights.double().abs()[..., None]).sum(1) * scale.double()
    return heads * (per_dot + (q.shape[1] + 3) * 2.0**-23)


def assert_close(got, want, slack):
    error = (got.double() - want.double()).abs()
    assert bool((error <= slack).all()), (
        f"worst {float((error / slack).nan_to_num(math.inf).max())} of the bound"
    )


def fp8(x, device):
    return x.view(torch.float8_e4m3fn).to(device)


def run(q, k, scale, weights, limits, device, **kwargs):
    args = (fp8(q, device), fp8(k, device), scale.to(device), weights.to(device), limits.to(device))
    return kernel.index_logits(*args, **kwargs).cpu()


def all_of(T, C):
    return torch.full((T,), C, dtype=torch.int32)


@pytest.mark.parametrize(
    ("T", "C", "H"),
    [
        pytest.param(1, 1, 64, id="one key"),
        pytest.param(3, 127, 64, id="under a tile"),
        pytest.param(2, 129, 5, id="over a tile, odd heads"),
        pytest.param(65, 40, 8, id="over a block of rows"),
        pytest.param(1, 300, 1, id="one head"),
    ],
)
@pytest.mark.parametrize("decades", [0.0, 2.0])
def test_prefill_equals_the_ref(T, C, H, decades, accelerator):
    q, k, scale, weights = case(T, C, H, decades=decades)
    got = run(q, k, scale, weights, all_of(T, C), accelerator)
    assert_close(got, wanted(q, k, scale, weights), bound(q, k, scale, weights, accelerator))


@pytest.mark.parametrize("fill", [True, False])
def test_a_row_stops_at_its_limit(fill, accelerator):
    T, C = 70, 200
    q, k, scale, weights = case(T, C, seed=3)
    limits = torch.arange(T, dtype=torch.int32) * 3 + 40
    limits[2], limits[5], limits[64:] = 0, C + 9, 0  # the last block of rows sees nothing
    out = torch.full((T, C + 8), POISON, device=accelerator)[:, :C]  # rows are strided
    got = run(q, k, scale, weights, limits, accelerator, fill=fill, out=out)
    whole = run(q, k, scale, weights, all_of(T, C), accelerator)
    hidden = torch.arange(C) >= limits[:, None]
    assert_bitwise(got, whole.masked_fill(hidden, -math.inf if fill else POISON))


def test_rows_and_entries_do_not_see_each_other(accelerator):
    q, k, scale, weights = case(67, 150, seed=5)
    whole = run(q, k, scale, weights, all_of(67, 150), accelerator)
    for row in (0, 63, 66):
        alone = run(q[row : row + 1], k, scale, weights[row : row + 1], all_of(1, 150), accelerator)
        assert_bitwise(alone, whole[row : row + 1])
    assert_bitwise(run(q, k[:130], scale[:130], weights, all_of(67, 130), accelerator), whole[:, :130])
    moved = torch.roll(torch.arange(150), 77)
    assert_bitwise(run(q, k[moved], scale[moved], weights, all_of(67, 150), accelerator), whole[:, moved])


def test_nan_stays_with_its_key_and_its_row(accelerator):
    q, k, scale, weights = case(6, 37, seed=7)
    clean = run(q, k, scale, weights, all_of(6, 37), accelerator)
    q[2, 1, 0], k[5, 3], weights[4, 0] = e4m3.NAN_CODE, e4m3.NAN_CODE, math.nan
    got = run(q, k, scale, weights, all_of(6, 37), accelerator)
    touched = torch.zeros(6, 37, dtype=torch.bool)
    touched[2], touched[4], touched[:, 5] = True, True, True
    assert bool(got[touched].isnan().all())  # ReLU does not hide it
    assert_bitwise(got[~touched], clean[~touched])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(
    ("T", "C"), [(1, 1), (3, 127), (4, 257), (64, 300), (65, 128), (130, 1000), (257, 600)]
)
def test_the_hopper_kernel_equals_the_ref_and_itself(T, C, fill):
    q, k, scale, weights = case(T, C, 64, seed=T)
    reason = hopper_kernel.why_not(fp8(q, "cuda"))
    if reason:
        pytest.skip(f"no Hopper kernel here: {reason}")
    limits = (torch.arange(T, dtype=torch.int32) * 7 + 1) % (C + 3)
    if T == 257:
        limits %= 200  # whole blocks of keys are hidden, and all from the last row
        limits[256] = 0
    outs = []
    for _ in range(3):
        out = torch.full((T, C + 8), POISON, device="cuda")[:, :C]
        outs.append(run(q, k, scale, weights, limits, "cuda", fill=fill, out=out, path="hopper"))
    assert_bitwise(outs[1], outs[0])
    assert_bitwise(outs[2], outs[0])
    hidden = torch.arange(C) >= limits[:, None]
    assert bool((outs[0][hidden] == (-math.inf if fill else POISON)).all())
    slack = bound(q, k, scale, weights, "cuda")
    assert_close(outs[0][~hidden], wanted(q, k, scale, weights)[~hidden], slack[~hidden])
    plain = run(q, k, scale, weights, limits, "cuda", path="portable")
    assert_close(outs[0][~hidden], plain[~hidden], slack[~hidden])


def test_a_path_that_cannot_run_is_refused(accelerator):
    q, k, scale, weights = case(2, 5)
    with pytest.raises(ValueError, match="no Hopper kernel for this call"):
        run(q, k, scale, weights, all_of(2, 5), accelerator, path="hopper")


def test_empty(accelerator):
    q, k, scale, weights = case(2, 5)
    assert run(q[:0], k, scale, weights[:0], all_of(0, 5), accelerator).shape == (0, 5)
    assert run(q, k[:0], scale[:0], weights, all_of(2, 0), accelerator).shape == (2, 0)


def test_zero_rows_score_zero(accelerator):
    q, k, scale, weights = case(2, 9)
    got = run(torch.zeros_like(q), k, scale, weights, all_of(2, 9), accelerator)
    assert_bitwise(got.abs(), torch.zeros(2, 9))


def paged(k, scale, page_size, pool, device, seed=0):
    """Pages of one sequence's keys at shuffled places of a pool: (pages, page ids)."""
    count = -(-len(k) // page_size)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(pool, generator=generator)[:count].to(torch.int32)
    pages = torch.full((pool, page_size * (D + 4)), 0xFF, dtype=torch.uint8)  # NaN codes, NaN scales
    for entry in range(len(k)):
        page, inside = int(ids[entry // page_size]), entry % page_size
        pages[page, inside * D : (inside + 1) * D] = k[entry]
        at = page_size * D + 4 * inside
        pages[page, at : at + 4] = scale[entry : entry + 1].view(torch.uint8)
    return pages.to(device), ids


@pytest.mark.parametrize("page_size", [4, 64, 128])
@pytest.mark.parametrize("fill", [True, False])
def test_paged_equals_prefill(page_size, fill, accelerator):
    B, N, H = 2, 3, 8
    lengths = torch.tensor([[130, 131, 200], [0, 1, 64]], dtype=torch.int32)
    q, k, scale, weights = case(B * N, 200, H, seed=11)
    # each sequence has keys of its own: the second one's are the first one's, moved
    pools = [paged(k.roll(7 * b, 0), scale.roll(7 * b), page_size, 64, accelerator, seed=b) for b in range(B)]
    pages, count = torch.cat([pool for pool, _ in pools]), len(pools[0][1])
    width = count * page_size
    table = torch.full((B, count + 3), -7, dtype=torch.int32)[:, :count]  # rows are strided
    for b, (_, ids) in enumerate(pools):
        table[b] = ids + 64 * b
    out = torch.full((B, N, width), POISON, device=accelerator)
    got = kernel.paged_index_logits(
        fp8(q.view(B, N, H, D), accelerator),
        pages,
        table.to(accelerator) if accelerator == "cuda" else table,
        weights.view(B, N, H).to(accelerator),
        lengths.to(accelerator),
        page_size=page_size,
        fill=fill,
        out=out,
    ).cpu()
    flat = run(q, k, scale, weights, all_of(6, 200), accelerator)
    moved = torch.stack([rows.roll(7 * b, 1) for b, rows in enumerate(flat.view(B, N, 200))])
    padded = torch.nn.functional.pad(moved, (0, width - 200))
    hidden = torch.arange(width) >= lengths[..., None]
    assert_bitwise(got, padded.masked_fill(hidden, -math.inf if fill else POISON))


def test_a_program_walks_many_tiles(accelerator, monkeypatch):
    q, k, scale, weights = case(1, 700, seed=13)
    pages, ids = paged(k, scale, 64, 16, accelerator)
    args = (fp8(q[None], accelerator), pages, ids[None].to(accelerator), weights[None].to(accelerator))
    limits = torch.tensor([[650]], dtype=torch.int32, device=accelerator)
    one = kernel.paged_index_logits(*args, limits, page_size=64)
    monkeypatch.setattr(paged_kernel, "tiles_a_program", lambda rows, width, keys, places: 4)
    assert_bitwise(kernel.paged_index_logits(*args, limits, page_size=64).cpu(), one.cpu())


def test_tiles_a_program():
    assert paged_kernel.tiles_a_program(1, 32768, 64, 792) == 1
    assert paged_kernel.tiles_a_program(64, 32768, 64, 792) == 43  # twelve programs a row: 768 of 792 places
    assert paged_kernel.tiles_a_program(256, 32768, 64, 792) == 171
    assert paged_kernel.tiles_a_program(1000, 32768, 64, 792) == 512
    assert paged_kernel.tiles_a_program(1, 1, 64, 792) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[..., :64]),
        ("k", lambda x: x.view(torch.uint8)),
        ("weights", lambda x: x.T.contiguous().T),
        ("limits", lambda x: x.long()),
    ],
)
def test_refuses_by_name(name, change, accelerator):
    q, k, scale, weights = case(2, 5)
    tensors = {"q": fp8(q, accelerator), "k": fp8(k, accelerator), "key_scale": scale.to(accelerator)}
    tensors |= {"weights": weights.to(accelerator), "limits": all_of(2, 5).to(accelerator)}
    with pytest.raises((TypeError, ValueError), match=f"index_logits: {name} is"):
        kernel.index_logits(**tensors | {name: change(tensors[name])})


def test_refuses_pages_that_are_too_short_or_unaligned(accelerator):
    q, k, scale, weights = case(1, 5)
    pages, ids = paged(k, scale, 64, 2, accelerator)
    limits = torch.tensor([[5]], dtype=torch.int32, device=accelerator)
    args = (ids[None].to(accelerator), weights[None].to(accelerator), limits)
    with pytest.raises(ValueError, match="do not hold page_size = 128"):
        kernel.paged_index_logits(fp8(q[None], accelerator), pages, *args, page_size=128)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernel.paged_index_logits(fp8(q[None], accelerator), pages[:, :-4].contiguous(), *args, page_size=4)


def test_faults_of_the_kernel_would_show(accelerator, monkeypatch):
    """The comparison rejects what a wrong kernel computes: here with the faults put into the ref."""
    q, k, scale, weights = case(5, 60, seed=17)
    got = run(q, k, scale, weights, all_of(5, 60), accelerator)
    slack = bound(q, k, scale, weights, accelerator)
    dots = torch.einsum("thd,sd->ths", e4m3.decode(q).double(), e4m3.decode(k).double())
    faults = {
        "no ReLU": (dots * weights[..., None]).sum(1) * scale,
        "ReLU after the weight": (dots * weights[..., None]).relu().sum(1) * scale,
        "key scale dropped": (dots.relu() * weights[..., None]).sum(1),
        "a head dropped": (dots.relu() * weights[..., None])[:, 1:].sum(1) * scale,
        "the neighbour's scale": (dots.relu() * weights[..., None]).sum(1) * scale.roll(1),
        "last step of the product dropped": (
            (dots - torch.einsum("thd,sd->ths", *(e4m3.decode(x)[..., 96:].double() for x in (q, k)))).relu()
            * weights[..., None]
        ).sum(1)
        * scale,
    }
    for name, fault in faults.items():
        assert bool(((got.double() - fault).abs() > slack).any()), name
