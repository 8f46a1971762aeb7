"""Products of FP8 rows with FP8 and MXFP4 weights: exact sums within what accumulation can lose, faults outside."""

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import e2m1, fp8_block, mxfp4, ue8m0
from kernels.fp8_quantise.ref import Fp8Rows, quantise
from kernels.linear.fp8_kernel import fp8_grouped_linear, fp8_linear, fp8_stacked_linear
from kernels.linear.fp8_product_kernel import Fp8Weight, Mxfp4Weight
from kernels.linear.ref import Activation, Weight, plain_weight
from kernels.linear.test_linear_kernel import bound, exact, is_close

FORMATS = ("fp8", "mxfp4")
pytestmark = pytest.mark.usefixtures("poisoned")


def unit_of(form, K, device):
    """Of the sums' rounding, for :func:`bound`, which takes it ``K * 17 / 16 + 8`` times the mass.

    BF16 products are added in FP32, and so are the sums of FP8's blocks of 128. Inside a block Hopper's FP8 tensor
    cores cut 32 products and the sum so far at 13 bits below the largest, four times: of each of 33 terms at most
    2**-13 of the block's mass is lost. The blocks' masses add up to the row's, so that the loss does not grow with K.
    """
    cut = 0.0 if device == "cpu" or form == "mxfp4" else 4 * 33 * 2.0**-13
    return 2.0**-23 + cut / (K * 17 / 16 + 8)


def weight_of(form, *shape, seed=5, device="cpu"):
    """Stored bytes on a device, and the ref's."""
    matrix = draw(*shape, seed=seed, decades=1)
    if form == "fp8":
        codes, scales = fp8_block.quantise_weight(matrix)
        stored = Fp8Weight(codes.view(torch.float8_e4m3fn), scales)
        values = fp8_block.dequantise_weight(codes, scales)
    else:
        codes, scales = mxfp4.quantise(matrix)
        stored, values = Mxfp4Weight(e2m1.pack(codes), ue8m0.encode(scales)), mxfp4.dequantise(codes, scales)
    return type(stored)(*(part.to(device) for part in stored)), plain_weight(values, form)


def rows_of(T, K, device="cpu", bytes_=False):
    """Rows of very different sizes, one of them zero: packed and the ref's."""
    x = draw(T, K, seed=4, decades=1)
    if T > 2:
        x[1] = 0
    rows = quantise(x)
    activation = Activation(values=rows.values(), narrow=True)
    rows = rows._replace(scales=ue8m0.encode(rows.scales)) if bytes_ else rows
    return Fp8Rows(*(part.to(device) for part in rows)), activation


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("T", "N", "K", "bytes_"),
    [
        (0, 70, 384, False),
        (1, 200, 512, True),
        (3, 70, 384, False),
        (17, 200, 512, False),
        (127, 130, 128, True),
    ],
)
def test_is_the_exact_sum_within_the_bound(T, N, K, bytes_, dtype, form, accelerator):
    rows, x = rows_of(T, K, accelerator, bytes_)
    stored, weight = weight_of(form, N, K, device=accelerator)
    got = fp8_linear(rows, stored, dtype=dtype)
    assert (got.dtype, tuple(got.shape)) == (dtype, (T, N))
    slack = bound(x, weight, dtype, unit_of(form, K, accelerator))
    assert is_close(got, exact(x, weight), slack)
    if T > 2:
        assert got[1].abs().max() == 0
        if form == "mxfp4" or K > 128:
            turned = stored._replace(scales=stored.scales.roll(1, -1).contiguous())
            assert not is_close(fp8_linear(rows, turned, dtype=dtype), exact(x, weight), slack)


@pytest.mark.parametrize("form", FORMATS)
def test_columns_of_a_group_meet_its_matrix(form, accelerator):
    G, N, K, T = 3, 70, 256, 5
    rows, x = rows_of(T, G * K, accelerator)
    stored, weight = weight_of(form, G, N, K, device=accelerator)
    got = fp8_grouped_linear(rows, stored)
    for g in range(G):
        part = Activation(values=x.values[:, g * K : g * K + K], narrow=True)
        one = Weight(values=weight.values[g], scale=weight.scale[g], format=form)
        slack = bound(part, one, torch.bfloat16, unit_of(form, K, accelerator))
        assert is_close(got[:, g * N : g * N + N], exact(part, one), slack)
        assert not is_close(got[:, g * N : g * N + N].roll(1, 0), exact(part, one), slack)


@pytest.mark.parametrize("form", FORMATS)
def test_stacked_matrices_equal_one_by_one(form, accelerator):
    rows, _ = rows_of(3, 256, accelerator)
    stored, _ = weight_of(form, 2, 130, 256, device=accelerator)
    got = fp8_stacked_linear(rows, stored)
    for g in range(2):
        one = fp8_linear(rows, type(stored)(stored.codes[g], stored.scales[g]))
        assert_bitwise(got[:, 130 * g : 130 * g + 130].float().cpu(), one.float().cpu())


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_its_bits_in_any_batch_of_up_to_16_and_nan_stays_in_its_row(form, accelerator):
    rows, _ = rows_of(9, 512, accelerator)
    stored, _ = weight_of(form, 70, 512, device=accelerator)
    rows.scales[4, 1] = float("nan")
    whole = fp8_linear(rows, stored, dtype=torch.float32)
    assert whole.isnan().any(1).tolist() == [row == 4 for row in range(9)]
    for row in (0, 3, 8):
        alone = fp8_linear(Fp8Rows(*(part[row : row + 1] for part in rows)), stored, dtype=torch.float32)
        assert_bitwise(alone.cpu(), whole[row : row + 1].cpu())


def test_every_mxfp4_code_under_scales_of_every_size(accelerator):
    """One column of the activation is 1: a result is the weight itself, exact in FP32."""
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert {int(code) for code in e2m1.unpack(codes)[:, ::2].unique()} == set(range(16))  # low nibbles
    assert {int(code) for code in e2m1.unpack(codes)[:, 1::2].unique()} == set(range(16))
    scales = torch.tensor(
        [[127, 90, 150, 1 + 20], [100, 127, 127, 200], [21, 200, 90, 128], [230, 126, 30, 127]],
        dtype=torch.uint8,
    )
    want = mxfp4.dequantise(e2m1.unpack(codes), ue8m0.decode(scales))
    one = torch.eye(128)
    rows = Fp8Rows(one.to(torch.float8_e4m3fn).to(accelerator), torch.ones(128, 1, device=accelerator))
    got = fp8_linear(rows, Mxfp4Weight(codes.to(accelerator), scales.to(accelerator)), dtype=torch.float32)
    assert_bitwise(got.T.contiguous().cpu() + 0.0, want + 0.0)  # a sum has no -0


def test_misfits_are_refused_by_name():
    rows, _ = rows_of(3, 256)
    stored, _ = weight_of("fp8", 64, 256)
    with pytest.raises(TypeError, match=r"weight is torch\.uint8"):
        fp8_linear(rows, stored._replace(codes=stored.codes.view(torch.uint8)))
    with pytest.raises(ValueError, match="weight_scales is"):
        fp8_linear(rows, stored._replace(scales=stored.scales[:, :1].contiguous()))
    with pytest.raises(ValueError, match="codes is"):
        fp8_linear(rows_of(3, 384)[0], stored)
    with pytest.raises(ValueError, match="64 columns, no multiple of FP8's 128"):
        fp8_linear(Fp8Rows(rows.codes[:, :64], rows.scales[:, :0]), weight_of("mxfp4", 8, 64)[0])
