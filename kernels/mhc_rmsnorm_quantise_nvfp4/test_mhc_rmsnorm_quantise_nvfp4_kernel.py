"""P5's kernel has the bits of its three kernels, and the plan's figures hold at T = 1, 8 and 128."""

import pytest
import torch

from kernels._check import assert_bitwise, assert_fault_seen, assert_same_fp8, assert_same_rows, draw
from kernels.formats import bf16
from kernels.fp8_quantise.kernel import quantise as quantise_fp8
from kernels.hc.kernel import collapse
from kernels.mhc_rmsnorm_quantise_nvfp4 import kernel, ref
from kernels.nvfp4_quantise.kernel import quantise
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rmsnorm_quantise_nvfp4.figures import changed, cosines_and_gains, figures

EPS = 1e-6
BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(T, D, device, dtype=BF16):
    streams = draw(T, 4, D, seed=1).to(dtype)
    pre = torch.sigmoid(draw(T, 4, seed=2)) + EPS
    return streams.to(device), pre.to(device), draw(D, seed=3).abs().to(BF16).to(device)


def unfused(streams, pre, weight, dtype):
    x = collapse(streams, pre, dtype=dtype)
    return quantise(rmsnorm(x, weight, eps=EPS, dtype=dtype))


def one_launch(streams, pre, weight, **options):
    return kernel.mhc_rmsnorm_quantise(streams, pre, weight, eps=EPS, **options)


@pytest.mark.parametrize("between", [BF16, F32], ids=["through bf16", "in registers"])
@pytest.mark.parametrize(
    ("T", "D", "dtype"),
    [(0, 64, BF16), (1, 4096, BF16), (1, 7168, F32), (3, 1536, F32), (17, 48, BF16)],
)
def test_has_the_bits_of_three_kernels(T, D, dtype, between, accelerator):
    streams, pre, weight = inputs(T, D, accelerator, dtype)
    got = one_launch(streams, pre, weight, between=between, copy=between)
    assert_same_rows(got.rows, unfused(streams, pre, weight, between))
    x = collapse(streams, pre, dtype=between)
    assert_bitwise(got.copy.float().cpu(), rmsnorm(x, weight, eps=EPS, dtype=between).float().cpu())


@pytest.mark.parametrize("between", [BF16, F32], ids=["through bf16", "in registers"])
@pytest.mark.parametrize(("T", "D", "dtype"), [(0, 128, BF16), (1, 4096, BF16), (7, 384, F32)])
def test_in_fp8_it_has_the_bits_of_three_kernels(T, D, dtype, between, accelerator, monkeypatch):
    streams, pre, weight = inputs(T, D, accelerator, dtype)
    norm = rmsnorm(collapse(streams, pre, dtype=between), weight, eps=EPS, dtype=between)
    got = one_launch(streams, pre, weight, form="fp8", between=between, copy=between)
    assert_same_fp8(got.rows, quantise_fp8(norm))
    assert_bitwise(got.copy.float().cpu(), norm.float().cpu())
    monkeypatch.setattr(kernel, "RESIDENT", 3)  # programs loop over rows
    assert_same_fp8(one_launch(streams, pre, weight, form="fp8", between=between).rows, got.rows)
    if T:
        other = quantise_fp8(norm.float() + norm.float().abs().amax() / 50)
        assert_fault_seen(lambda: assert_same_fp8(got.rows, other))


def test_a_program_that_loops_has_the_bits_of_one_a_row(accelerator, monkeypatch):
    streams, pre, weight = inputs(7, 96, accelerator)
    want = one_launch(streams, pre, weight).rows
    monkeypatch.setattr(kernel, "RESIDENT", 3)
    assert kernel._loops(7, 96, copy=False)
    assert_same_rows(one_launch(streams, pre, weight).rows, want)


def assert_figures(got, old, ideal, ideal_old, true):
    """The plan's claims, and what a cosine cannot see: the gain of a row, and the share that was stored otherwise.

    ``got`` against ``old``, the unfused kernels with BF16 between; both against the refs ``ideal`` and ``ideal_old``;
    and against ``true``, which was never quantised. BF16 between moves a few rows far (a gsa that rounds moves every
    threshold of its row: row cosines down to 0.997, gains by 1%), so that of rows it is asked that they are where
    the refs have them: an FP32 error moves a code in thousands, which is 2e-4 of a row's cosine.
    """
    found = figures(got, old, true)
    assert found.meet_the_plan()
    assert found.row_cos_off <= 1e-4
    assert found.gain_off <= 1e-4
    made, before = got.values().cpu(), old.values().cpu()
    cosine, gain = cosines_and_gains(made, before)
    ideal_cosine, ideal_gain = cosines_and_gains(ideal.values(), ideal_old.values())
    assert (cosine - ideal_cosine).abs().max() <= 5e-4
    assert (gain - ideal_gain).abs().max() <= 1e-3
    for differs, expected in zip(changed(got, old), changed(ideal, ideal_old), strict=True):
        assert abs(int(differs.sum()) - int(expected.sum())) <= 1 + differs.numel() / 500
    assert cosines_and_gains(made, true)[0].min() >= 0.99


def references(streams, pre, weight):
    """The refs' rows in one launch and in three, and the values that neither stored."""
    wide = streams.cpu().float(), pre.cpu(), weight.cpu()
    fused = ref.mhc_rmsnorm_quantise(*wide, eps=EPS)
    stores = {"collapsed": bf16.round, "between": bf16.round}
    return fused.rows, ref.mhc_rmsnorm_quantise(*wide, eps=EPS, **stores).rows, fused.copy


@pytest.mark.parametrize("T", [1, 8, 128])
def test_the_plan_s_figures(T, accelerator):
    streams, pre, weight = inputs(T, 512, accelerator)
    old = unfused(streams, pre, weight, BF16)
    assert_figures(one_launch(streams, pre, weight).rows, old, *references(streams, pre, weight))


@pytest.mark.parametrize("fault", ["gain", "scalar gsa", "a stream twice", "eps"])
def test_a_fault_fails_the_figures(fault, accelerator):
    """Among them the plan's own: codes by the row's gsa, undone with the launch's."""
    streams, pre, weight = inputs(8, 512, accelerator)
    old, expected = unfused(streams, pre, weight, BF16), references(streams, pre, weight)
    if fault == "a stream twice":
        streams = streams.clone()
        streams[:, 3] = streams[:, 2]
    got = kernel.mhc_rmsnorm_quantise(streams, pre, weight, eps=0.01 if fault == "eps" else EPS).rows
    if fault == "gain":
        got = got._replace(gsa=got.gsa * 1.00001)
    elif fault == "scalar gsa":
        got = got._replace(gsa=got.gsa.amax().expand(8).contiguous())
    assert_fault_seen(lambda: assert_figures(got, old, *expected))


def test_tokens_may_be_strided_and_do_not_see_their_batch(accelerator):
    wide = draw(40, 4, 48, seed=4).to(BF16).to(accelerator)
    streams, pre = wide[::2], draw(20, 4, seed=5).to(accelerator)
    whole = one_launch(streams, pre, None)
    assert_same_rows(whole.rows, unfused(streams.contiguous(), pre, None, F32))
    for row in (0, 7, 19):
        alone = one_launch(streams[row : row + 1], pre[row : row + 1], None)
        assert_same_rows(alone.rows, [part[row : row + 1] for part in whole.rows])


def test_special_rows_are_their_own(accelerator):
    streams, pre, weight = inputs(5, 64, accelerator, F32)
    streams[1], streams[2, 3, 5], pre[3, 2] = 0.0, float("nan"), float("nan")
    got = one_launch(streams, pre, weight).rows
    assert_same_rows(got, unfused(streams, pre, weight, F32))
    assert got.gsa.isnan().tolist() == [False, False, True, True, False]


def test_the_ref_s_gsa_within_its_bound(accelerator):
    streams, pre, weight = inputs(8, 512, accelerator)
    got, want = (f.mhc_rmsnorm_quantise(streams, pre, weight, eps=EPS).rows.gsa.cpu() for f in (kernel, ref))
    assert ((got - want).abs() <= 2e-6 * want).all()


def test_a_misfit_is_refused():
    good = torch.zeros(3, 4, 32)
    for streams, pre, name in (
        (good[:, :3], torch.zeros(3, 4), "streams"),
        (torch.zeros(3, 8, 32)[:, ::2], torch.zeros(3, 4), "streams"),
        (good, torch.zeros(3, 3), "pre"),
        (good, torch.zeros(4, 3).T, "pre"),
    ):
        with pytest.raises(ValueError, match=f"mhc_rmsnorm_quantise_nvfp4: {name}"):
            kernel.mhc_rmsnorm_quantise(streams, pre, None, eps=EPS)
