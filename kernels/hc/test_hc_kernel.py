"""mHC's kernels against the refs: how far FP32 sums may be off, and what must be the same bit for bit."""

from dataclasses import replace

import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, assert_fault_seen, draw, on_gpu
from kernels.hc import hopper_kernel, kernel, ref
from kernels.hc import weights_kernel as weights
from kernels.hc.mix_kernel import partial_kernel

BF16, F32 = torch.bfloat16, torch.float32
HC = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 20}
HEAD = {"norm_eps": 1e-6, "hc_eps": 1e-6}
pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(T, D, dtype=BF16, outputs=24, spread=1.0):
    """Streams, fn, base and scale, with logits of about ``spread``."""
    streams = draw(T, 4, D, seed=1).to(dtype)
    fn = draw(outputs, 4 * D, seed=2) * spread / (4 * D) ** 0.5
    scales = 3 if outputs == 24 else 1
    return streams, fn, draw(outputs, seed=3), torch.tensor([0.5, 0.7, 0.9])[:scales]


def tolerance(streams, fn, scale):
    """Largest error of a row's logits: FP32 sums of K products, 2^-24 of their magnitudes for each of few levels.

    A sum runs over 16 segments and the groups' tree in FP32, a segment on tensor cores, which keep at least 2^-22 of
    the largest product where they align; 64 is that, with room for the segment's own 16 to 48 steps.
    """
    flat = streams.flatten(1).double()
    size = flat.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    return (flat.abs() * size) @ fn.double().abs().T * scale.abs().max() * 64 * 2.0**-24


def assert_near(got, want, off):
    """Gates move by at most twice their logit; 39 normalisations of comb by at most four times its row's largest."""
    pre, post, comb = off[:, :4], off[:, 4:8], off[:, 8:].amax(1)[:, None, None]
    for part, wanted, moved in zip(got, want, (pre, 2 * post, 4 * comb), strict=True):
        bound = moved + 64 * 2.0**-24
        assert part.dtype == F32
        assert ((part.double().cpu() - wanted.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("T", "D"), [(0, 64), (1, 4096), (3, 64), (5, 1000), (70, 96)])
def test_mix(T, D, dtype, accelerator):
    streams, fn, base, scale = inputs(T, D, dtype)
    got = kernel.mix(*(t.to(accelerator) for t in (streams, fn, base, scale)), **HC)
    want = ref.mix(streams.float(), fn, base, scale, **HC)
    assert [tuple(part.shape) for part in got] == [(T, 4), (T, 4), (T, 4, 4)]
    if T:
        assert_near(got, want, tolerance(streams, fn, scale))


def test_what_tf32_would_lose_is_seen(accelerator):
    """A weight cut to 11 bits is off by 2^-12 of its magnitude: with few, aligned terms that shows."""
    streams, fn, base, scale = inputs(3, 64, spread=20.0)
    got = kernel.mix(*(t.to(accelerator) for t in (streams, fn, base, scale)), **HC)
    cut = (fn.view(torch.int32) & ~0x1FFF).view(F32)
    fault = ref.mix(streams.float(), cut, base, scale, **HC)
    want = ref.mix(streams.float(), fn, base, scale, **HC)
    error = (got.pre.double().cpu() - want.pre.double()).abs().max()
    assert error < (fault.pre.double() - want.pre.double()).abs().max() / 50


@pytest.mark.parametrize(
    "fault", ["comb transposed", "one iteration less", "pre eps", "flat eps", "a segment missing"]
)
def test_a_planted_fault_is_seen(fault, accelerator):
    streams, fn, base, scale = inputs(5, 200, spread=4.0)
    streams = streams * 1e-3  # the mean square is about eps
    want = ref.mix(streams.float(), fn, base, scale, **HC)
    off = tolerance(streams, fn, scale)
    options = {
        "one iteration less": HC | {"iterations": 1},
        "pre eps": HC | {"hc_eps": 1e-3},
        "flat eps": HC | {"norm_eps": 2e-6},
    }
    if fault == "a segment missing":
        streams[:, 1, 56:] = 0
        streams[:, 2, :112] = 0
    got = kernel.mix(*(t.to(accelerator) for t in (streams, fn, base, scale)), **options.get(fault, HC))
    if fault == "comb transposed":
        got = got._replace(comb=got.comb.mT)
    assert_fault_seen(lambda: assert_near(got, want, off))


EXACT_LOGITS = 8 * 2.0**-24  # an exponential's 2 ulp, and a rounding or two of values up to 2


@pytest.mark.parametrize("fault", [None, {"iterations": 19}, {"hc_eps": 0.0}, {"hc_eps": 2e-6}], ids=str)
def test_gates_and_sinkhorn_of_exact_logits(fault, accelerator):
    """Without weights the logits are the base: what is left is small, and every epsilon and pass shows."""
    streams, fn, base, scale = inputs(8, 64)
    args = streams, 0 * fn, 4 * base, scale
    got = kernel.mix(*(t.to(accelerator) for t in args), **HC | (fault or {}))
    want = ref.mix(streams.float(), *args[1:], **HC)
    off = max(
        float((part.cpu().double() - one.double()).abs().max()) for part, one in zip(got, want, strict=True)
    )
    assert (off > EXACT_LOGITS) == bool(fault)


def test_columns_sum_to_one_and_rows_nearly(accelerator):
    got = kernel.mix(*(t.to(accelerator) for t in inputs(9, 64, spread=3.0)), **HC)
    assert ((got.comb.sum(1) - 1).abs() < 2e-6).all()
    assert ((got.comb.sum(2) - 1).abs() < 1e-2).all()  # what 20 passes leave at this spread


@pytest.mark.parametrize("T", [3, 66])
def test_few_and_many_rows_have_the_same_bits(T, accelerator, monkeypatch):
    """A program a segment, a four, a sixteen: the order of the sum is one."""
    args = [t.to(accelerator) for t in inputs(T, 1300)]  # 21 segments, the last one short: two sixteens
    few, tiles = kernel.mix(*args, **HC, path="portable"), weights.tiles
    for rows in (512, 2048):
        tile_as(monkeypatch, tiles, rows, T, 4 * 1300)
        for one, other in zip(few, kernel.mix(*args, **HC, path="portable"), strict=True):
            assert_bitwise(one.cpu(), other.cpu())


def tile_as(monkeypatch, tiles, rows, T, K):
    """T rows are launched as so many ``rows`` would be."""
    chosen = tiles(rows, K)
    chosen = replace(chosen, rows=-(-T // chosen.first["BLOCK_T"]))
    monkeypatch.setattr(weights, tiles.__name__, lambda *_: chosen)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("D", [64, 1300, 4096, 7168])
@pytest.mark.parametrize("T", [1, 67, 300])
def test_the_hopper_kernel_has_one_order_of_sums(T, D, monkeypatch):
    streams, fn, base, scale = inputs(T, D)
    args = [t.to("cuda") for t in (streams, fn, base, scale)]
    if reason := hopper_kernel.why_not(*args[:2]):
        pytest.skip(f"no Hopper kernel here: {reason}")
    few = kernel.mix(*args, **HC, path="hopper")
    assert_near(few, ref.mix(streams.float(), fn, base, scale, **HC), tolerance(streams, fn, scale))
    tiles = weights.hopper_tiles
    for rows in (1, 512, 1500, 4096):
        tile_as(monkeypatch, tiles, rows, T, 4 * D)
        for _ in range(3):
            for one, other in zip(few, kernel.mix(*args, **HC, path="hopper"), strict=True):
                assert_bitwise(one.cpu(), other.cpu())


def test_a_path_that_cannot_run_is_refused(accelerator):
    args = [t.to(accelerator) for t in inputs(2, 64, F32)]
    with pytest.raises(ValueError, match="no Hopper kernel for this call"):
        kernel.mix(*args, **HC, path="hopper")


def test_a_row_does_not_see_its_batch(accelerator):
    streams, *weights = (t.to(accelerator) for t in inputs(70, 96))
    whole = kernel.mix(streams, *weights, **HC)
    for row in (0, 63, 69):
        alone = kernel.mix(streams[row : row + 1], *weights, **HC)
        for part, wanted in zip(alone, whole, strict=True):
            assert_bitwise(part[0].cpu(), wanted[row].cpu())


def test_tokens_may_be_strided(accelerator):
    streams, *weights = (t.to(accelerator) for t in inputs(6, 64))
    one, other = kernel.mix(streams[::2], *weights, **HC), kernel.mix(streams[::2].clone(), *weights, **HC)
    assert_bitwise(one.comb.cpu(), other.comb.cpu())


def test_non_finite_rows_stay_alone(accelerator):
    streams, *weights = inputs(4, 64)
    clean = kernel.mix(streams.to(accelerator), *(t.to(accelerator) for t in weights), **HC)
    streams[1, 2, 3], streams[2, 0, 0] = float("nan"), float("inf")
    got = kernel.mix(streams.to(accelerator), *(t.to(accelerator) for t in weights), **HC)
    for part, wanted in zip(got, clean, strict=True):
        assert part[1].isnan().all()
        assert not part[2].isfinite().all()
        assert_bitwise(part[[0, 3]].cpu(), wanted[[0, 3]].cpu())


def one_product(accelerator):
    """Sums of one stream's value 1.5 with its 24 weights, and the weights: every other product is 0."""
    streams = torch.zeros(1, 4, 64, dtype=BF16)
    streams[0, 2, 5] = 1.5
    fn = draw(24, 256, seed=9)
    part = torch.empty(2, 1, 32, device=accelerator)
    args = streams.to(accelerator).view(torch.int16), fn.to(accelerator), part, 256, 1, 256
    partial_kernel[(1, 1)](*args, OUTPUTS=24, PDL=False, **weights.tiles(1, 256).first)
    sums = part[0, 0].cpu()
    return sums[:24], fn[:, 2 * 64 + 5], sums[24]


def assert_three_products(got, weight):
    """Three products and two sums: exact products, each sum cut at 2^-23 of it, however it is rounded.

    Tensor cores add in FP32 and cut what is below; the interpreter rounds. So two units of 2^-23 of the result, far
    below what a weight loses that keeps 16 bits (2^-16) or TF32's 11.
    """
    exact = weight.double() * 1.5
    assert ((got.double() - exact).abs() <= 2 * 2.0**-23 * exact.abs()).all()


def test_products_are_three_exact_ones(accelerator):
    got, weight, square = one_product(accelerator)
    assert_three_products(got, weight)
    assert_bitwise(square, torch.tensor(2.25))
    for kept in (8, 11, 16):
        cut = (weight.view(torch.int32) >> (24 - kept) << (24 - kept)).view(F32)
        assert_fault_seen(lambda cut=cut: assert_three_products(cut * 1.5, weight))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("T", "D"), [(0, 64), (1, 7168), (3, 1000), (33, 48)])
def test_collapse(T, D, dtype, accelerator):
    streams, pre = draw(T, 4, D, seed=4).to(dtype), draw(T, 4, seed=5)
    got = kernel.collapse(streams.to(accelerator), pre.to(accelerator), dtype=F32)
    want = ref.collapse(streams.float(), pre)
    bound = 4 * 2.0**-24 * (streams.double().abs() * pre.double().abs()[..., None]).sum(1)
    assert ((got.double().cpu() - want.double()).abs() <= bound).all()
    narrow = kernel.collapse(streams.to(accelerator), pre.to(accelerator))
    assert_bitwise(narrow.float().cpu(), got.to(BF16).float().cpu())
    if T:
        assert_fault_seen(lambda: _assert_within(got.roll(1, 1), want, bound))


def _assert_within(got, want, bound):
    assert ((got.double().cpu() - want.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("T", "D"), [(0, 64), (1, 7168), (3, 1000), (33, 48)])
def test_expand(T, D, dtype, accelerator):
    streams, y = draw(T, 4, D, seed=6).to(dtype), draw(T, D, seed=7).to(BF16)
    post, comb = draw(T, 4, seed=8), draw(T, 4, 4, seed=9)
    args = [t.to(accelerator) for t in (streams, y, post, comb)]
    got = kernel.expand(*args, dtype=F32)
    want = ref.expand(streams.float(), y.float(), post, comb)
    terms = ref.expand(streams.float().abs(), y.float().abs(), post.abs(), comb.abs()).double()
    _assert_within(got, want, 5 * 2.0**-24 * terms)
    assert_bitwise(kernel.expand(*args).float().cpu(), got.to(BF16).float().cpu())
    if T:
        transposed = kernel.expand(*args[:3], args[3].mT.contiguous(), dtype=F32)
        assert_fault_seen(lambda: _assert_within(transposed, want, 5 * 2.0**-24 * terms))


def test_expand_in_place(accelerator):
    streams, y = draw(3, 4, 1100, seed=6).to(BF16).to(accelerator), draw(6, 1100, seed=7).to(accelerator)[::2]
    post, comb = draw(3, 4, seed=8).to(accelerator), draw(3, 4, 4, seed=9).to(accelerator)
    want = kernel.expand(streams, y, post, comb)
    assert kernel.expand(streams, y, post, comb, out=streams) is streams
    assert_bitwise(streams.float().cpu(), want.float().cpu())


def test_head_collapse(accelerator):
    streams, fn, base, scale = inputs(5, 200, outputs=4)
    args = [t.to(accelerator) for t in (streams, fn, base, scale)]
    got = kernel.head_collapse(*args, **HEAD, dtype=F32)
    want = ref.head_collapse(streams.float(), fn, base, scale, **HEAD)
    off = tolerance(streams, fn, scale).amax() + 16 * 2.0**-24
    _assert_within(got, want, off * streams.double().abs().sum(1))
    assert_differs(got.cpu(), kernel.collapse(args[0], torch.ones(5, 4, device=accelerator), dtype=F32).cpu())


def test_misfits_are_refused():
    streams, fn, base, scale = inputs(3, 64)
    with pytest.raises(ValueError, match="hc_mix: fn"):
        kernel.mix(streams, fn[:, :-1], base, scale, **HC)
    with pytest.raises(ValueError, match="hc_mix: streams"):
        kernel.mix(streams[:, :3], fn, base, scale, **HC)
    with pytest.raises(ValueError, match="a token is not contiguous"):
        kernel.collapse(torch.zeros(3, 8, 64)[:, ::2], base[:12].view(3, 4))
    with pytest.raises(TypeError, match="hc_mix: fn"):
        kernel.mix(streams, fn.double(), base, scale, **HC)
    with pytest.raises(ValueError, match="iterations = 0"):
        kernel.mix(streams, fn, base, scale, **(HC | {"iterations": 0}))
    with pytest.raises(ValueError, match="hc_expand: comb"):
        kernel.expand(streams, torch.zeros(3, 64), torch.zeros(3, 4), torch.zeros(3, 16))
