"""Linear kernels against the ref's exact sums, within what FP32 accumulation can lose, and each planted fault outside.

Worst case of a sum of K products, whatever the order: (17/16 K + 8) * u * sum |a| |b|. Tensor cores cut 16 products
and the sum so far to a common exponent, so 17 terms lose up to u = 2^-23 each; 8 for the parts and the epilogue's
roundings. The products themselves are exact (six bits by six, eight by eight), FP32's are rounded once each. Then
half an ulp of the store.
"""

import math

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import bf16, e2m1, nvfp4
from kernels.linear import kernel as nvfp4_module
from kernels.linear.kernel import Nvfp4Weight, grouped_linear, nvfp4_linear, stacked_linear
from kernels.linear.ref import Activation, Weight, linear, quantise_activation
from kernels.linear.ref import grouped_linear as grouped_ref
from kernels.linear.tiles import parts_of, tile_for
from kernels.linear.wide_kernel import bf16_linear, fp32_linear
from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise

HALF_ULP = {
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
}  # of the largest value of a binade: twice of some
SIZES = (0, 1, 3, 8, 9, 17, 127)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that no kernel wrote is NaN."""
    empty = torch.empty

    def filled(*size, **options):
        memory = empty(*size, **options)
        return memory.view(torch.uint8).fill_(0xFF).view(memory.dtype)

    monkeypatch.setattr(torch, "empty", filled)


def weight_of(*shape, seed=0, device="cpu"):
    """Packed NVFP4 weight and the ref's: a scale a matrix."""
    matrix = draw(*shape, seed=seed, decades=0.5)
    flat = matrix.reshape(-1, *shape[-2:])
    scale_2 = flat.abs().amax((1, 2)) / 2688
    codes, scales, _ = nvfp4.quantise(flat, scale_2[:, None, None])
    values = nvfp4.scaled_values(codes, scales).double().transpose(1, 2)
    lead = shape[:-2]
    ref = Weight(
        values=values.reshape(*lead, *values.shape[1:]),
        scale=scale_2.double().reshape(lead),
        format="nvfp4",
    )
    packed = Nvfp4Weight(e2m1.pack(codes).reshape(*shape[:-1], -1), scales.reshape(*shape[:-1], -1), scale_2)
    return Nvfp4Weight(*(part.to(device) for part in packed)), ref


def rows_of(T, K, seed=1, device="cpu"):
    """Rows of very different sizes, one of them zero: packed and the ref's."""
    x = draw(T, K, seed=seed) * 10.0 ** draw(T, 1, seed=seed + 1).clamp(-3, 3)
    if T > 2:
        x[1] = 0
    return Nvfp4Rows(*(part.to(device) for part in quantise(x))), quantise_activation(x, "nvfp4")


def bound(x: Activation, weight: Weight, dtype, unit=2.0**-23):
    """Most that a correct kernel may be off, (T, N) FP64."""
    size = Activation(values=x.values.abs(), row_scale=x.row_scale, narrow=x.narrow)
    mass = linear(size, Weight(values=weight.values.abs(), scale=weight.scale, format=weight.format)).double()
    return (
        (len(weight.values) * 17 / 16 + 8) * unit * mass
        + mass * 2.0**-23
        + HALF_ULP[dtype] * exact(x, weight).abs()
    )


def exact(x: Activation, weight: Weight):
    return linear(x, weight).double()


def is_close(got, want, slack):
    return bool(((got.cpu().double() - want).abs() <= slack).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("T", "N", "K"),
    # parts with 8 and 127 rows are as with 3 and 17, in tiles of more rows, which K = 272 has
    [(T, 70, 272) for T in SIZES] + [(T, 64, 2048) for T in SIZES if T not in (8, 127)],
)
def test_nvfp4_linear_is_the_exact_sum_within_the_bound(accelerator, T, N, K, dtype):
    assert parts_of(1, N, K, tile_for(1, False).bk) == (4 if K == 2048 else 1)
    rows, x = rows_of(T, K, device=accelerator)
    packed, weight = weight_of(N, K, device=accelerator)
    got = nvfp4_linear(rows, packed, dtype=dtype)
    assert (got.dtype, tuple(got.shape)) == (dtype, (T, N))
    slack = bound(x, weight, dtype)
    assert is_close(got, exact(x, weight), slack)
    if T > 2:
        assert got[1].abs().max() == 0
        if dtype == torch.float32:
            error = (got.cpu().double() - exact(x, weight)).abs()
            assert error.mean() <= slack.mean() / 20  # the bound is far from what happens


def test_planted_faults_leave_the_bound(accelerator):
    rows, x = rows_of(9, 272, device=accelerator)
    packed, weight = weight_of(70, 272, device=accelerator)
    want, slack = exact(x, weight), bound(x, weight, torch.bfloat16)
    swapped = ((packed.codes >> 4) | (packed.codes << 4)).contiguous()
    flipped, cut, other = packed.codes.clone(), rows.codes.clone(), packed.scales.clone()
    flipped[3, 77] ^= 0x80
    cut[:, -8:] = 0
    other[69, 16] = other[69, 15] + 8  # twice the scale of one block
    faults = {
        "nibbles swapped": (rows, packed._replace(codes=swapped)),
        "one sign": (rows, packed._replace(codes=flipped)),
        "last group left out": (rows._replace(codes=cut), packed),
        "scale of the next block": (rows, packed._replace(scales=packed.scales.roll(1, 1).contiguous())),
        "one scale": (rows, packed._replace(scales=other)),
        "gsa of the next row": (rows._replace(gsa=rows.gsa.roll(1)), packed),
        "scale_2 dropped": (rows, packed._replace(scale_2=torch.ones_like(packed.scale_2))),
    }
    assert is_close(nvfp4_linear(rows, packed), want, slack)
    for name, (bad_rows, bad_weight) in faults.items():
        assert not is_close(nvfp4_linear(bad_rows, bad_weight), want, slack), name


@pytest.mark.parametrize("fault", ["tile", "part"])
def test_a_tile_or_a_part_that_is_skipped_shows(accelerator, monkeypatch, fault):
    rows, x = rows_of(3, 2048, device=accelerator)
    packed, weight = weight_of(70, 2048, device=accelerator)
    if fault == "part":
        monkeypatch.setattr(nvfp4_module, "finish", lambda parts, out: out.copy_(parts[:-1].sum(0)))
    else:
        monkeypatch.setattr(nvfp4_module.triton, "cdiv", lambda a, b: max(a // b, 1))
    got = nvfp4_linear(rows, packed)
    assert not is_close(got, exact(x, weight), bound(x, weight, torch.bfloat16))


def test_rows_do_not_see_their_batch_up_to_eight_and_strides_do_not_matter(accelerator):
    rows, _ = rows_of(8, 2048, device=accelerator)
    packed, _ = weight_of(16, 2048, device=accelerator)
    whole = nvfp4_linear(rows, packed, dtype=torch.float32)
    for row in (0, 3, 7):
        alone = nvfp4_linear(Nvfp4Rows(*(part[row : row + 1] for part in rows)), packed, dtype=torch.float32)
        assert_bitwise(alone.cpu(), whole[row : row + 1].cpu())
    wide = Nvfp4Rows(
        torch.cat([rows.codes] * 2, 1)[:, :1024], torch.cat([rows.scales] * 2, 1)[:, :128], rows.gsa
    )
    assert not wide.codes.is_contiguous()
    assert_bitwise(nvfp4_linear(wide, packed, dtype=torch.float32).cpu(), whole.cpu())
    out = torch.empty(8, 16, dtype=torch.float32, device=accelerator)
    assert nvfp4_linear(rows, packed, dtype=torch.float32, out=out) is out
    assert_bitwise(out.cpu(), whole.cpu())


@pytest.mark.gpu
def test_sixteen_rows_have_the_bits_of_one(accelerator):
    if accelerator == "cpu":
        pytest.skip("no GPU: the interpreter's matrix product is BLAS, whose order follows the shape")
    rows, _ = rows_of(16, 2048, device=accelerator)
    packed, _ = weight_of(640, 2048, device=accelerator)
    whole = nvfp4_linear(rows, packed, dtype=torch.float32)
    for row in range(16):
        alone = nvfp4_linear(Nvfp4Rows(*(part[row : row + 1] for part in rows)), packed, dtype=torch.float32)
        assert_bitwise(alone.cpu(), whole[row : row + 1].cpu())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_row_is_nan_alone(accelerator, bad):
    x = draw(5, 272, seed=3)
    x[3, 100] = bad
    packed, _ = weight_of(70, 272, device=accelerator)
    rows = Nvfp4Rows(*(part.to(accelerator) for part in quantise(x)))
    got = nvfp4_linear(rows, packed)
    assert got[3].isnan().all()
    assert got[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("T", [0, 1, 9, 17])
def test_groups_meet_their_own_matrix(accelerator, T, one_scale):
    G, N, K = 3, 70, 256
    rows, x = rows_of(T, G * K, device=accelerator)
    packed, weight = weight_of(G, N, K, device=accelerator)
    if one_scale:
        packed = packed._replace(scale_2=packed.scale_2[:1].clone())
        weight = Weight(values=weight.values, scale=weight.scale[:1], format="nvfp4")
    got = grouped_linear(rows, packed)
    assert got.shape == (T, G * N)
    want = grouped_ref(x, weight).double()
    for g in range(G):
        part = Activation(values=x.values[:, g * K : g * K + K], row_scale=x.row_scale, narrow=True)
        one = Weight(values=weight.values[g], scale=weight.scale[0 if one_scale else g], format="nvfp4")
        columns = slice(g * N, g * N + N)
        assert is_close(got[:, columns], want[:, columns], bound(part, one, torch.bfloat16))
    if T > 2 and not one_scale:
        turned = grouped_linear(rows, Nvfp4Weight(*(part.roll(1, 0) for part in packed)))
        assert not is_close(turned, want, want.abs() / 2)


def test_stacked_matrices_equal_one_by_one(accelerator):
    rows, _ = rows_of(3, 256, device=accelerator)
    packed, _ = weight_of(2, 128, 256, device=accelerator)
    got = stacked_linear(rows, packed)
    for g in range(2):
        one = nvfp4_linear(rows, Nvfp4Weight(packed.codes[g], packed.scales[g], packed.scale_2[g : g + 1]))
        assert_bitwise(got[:, 128 * g : 128 * g + 128].float().cpu(), one.float().cpu())


def refusals():
    rows, _ = rows_of(3, 256)
    packed, _ = weight_of(64, 256)
    yield TypeError, "weight is torch.bfloat16", rows, packed._replace(codes=torch.zeros(64, 128).bfloat16())
    yield TypeError, "weight_scales is torch.float32", rows, packed._replace(scales=torch.zeros(64, 16))
    yield ValueError, "weight_scales is", rows, packed._replace(scales=packed.scales[:, :8].contiguous())
    yield ValueError, "weight is .* all axes", rows, packed._replace(codes=packed.codes.T.contiguous().T)
    yield ValueError, "gsa is", rows._replace(gsa=rows.gsa[:2]), packed
    yield TypeError, "codes is torch.int8", rows._replace(codes=rows.codes.view(torch.int8)), packed


@pytest.mark.parametrize("case", range(6))
def test_another_stored_format_is_refused_by_name(case):
    error, message, rows, packed = list(refusals())[case]
    with pytest.raises(error, match=message):
        nvfp4_linear(rows, packed)
    with pytest.raises((TypeError, ValueError), match=r"dtype|float16"):
        nvfp4_linear(*next((r, w) for _, _, r, w in refusals()), dtype=torch.float16)


@pytest.mark.parametrize(("N", "K"), [(70, 200), (64, 1024)])
@pytest.mark.parametrize("T", [0, 1, 3, 17])
def test_bf16_and_fp32_linear(accelerator, T, N, K):
    x, matrix = draw(T, 2 * K, seed=6, decades=1)[:, :K], draw(N, K, seed=7, decades=1)
    for kind, run in (("bf16", bf16_linear), ("fp32", fp32_linear)):
        narrow = kind == "bf16"
        stored, kept = (bf16.round(x), bf16.round(matrix)) if narrow else (x, matrix)
        element = torch.bfloat16 if narrow else torch.float32
        activation = Activation(values=stored, narrow=narrow)
        weight = Weight(
            values=kept.double().T.contiguous(), scale=torch.ones((), dtype=torch.float64), format=kind
        )
        strided = torch.cat([stored, stored], 1).to(element).to(accelerator)[:, :K]
        got = run(strided, kept.to(element).to(accelerator))
        assert got.dtype == element
        assert is_close(got, exact(activation, weight), bound(activation, weight, element))
        if T:
            cut = strided.clone()
            cut[:, -1] = 0
            off = run(cut, kept.to(element).to(accelerator)).float()
            assert not is_close(off, exact(activation, weight), bound(activation, weight, torch.float32))
    with pytest.raises(TypeError, match=r"weight is torch\.float32"):
        bf16_linear(strided.bfloat16(), matrix.to(accelerator))
