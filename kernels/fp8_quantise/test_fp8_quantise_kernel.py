"""The quantiser's kernel has the ref's bits, on every size, stride, decade and special value."""

import pytest
import torch

from kernels._check import SIZES, assert_same_fp8, draw
from kernels.fp8_quantise import kernel, ref
from kernels.fp8_quantise.ref import Fp8Rows

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("T", "dtype"), list(zip(SIZES, (BF16, F32, BF16, F32, BF16), strict=True)))
def test_every_number_of_rows(T, dtype, accelerator):
    x = draw(T, 128, seed=1, decades=2).to(dtype)
    assert_same_fp8(kernel.quantise(x.to(accelerator)), ref.quantise(x))


@pytest.mark.parametrize("D", [384, 1024, 1152, 4096, 7168, 65536])
def test_every_width(D, accelerator):
    x = draw(2, D, seed=2, decades=1).to(BF16)
    assert_same_fp8(kernel.quantise(x.to(accelerator)), ref.quantise(x))


def test_every_magnitude_and_special_value(accelerator):
    x = torch.cat([draw(1, 256, seed=99 + e) * 10.0**e for e in range(-44, 38, 2)] + [torch.zeros(9, 256)])
    x[-1] = -0.0
    x[-2, 3], x[-3, 200], x[-4, 0] = float("nan"), float("inf"), float("-inf")
    x[-5, 5], x[-6, ::7], x[-7, 1::5] = 1e-45, 3e38, 1.0
    x[-8, :128] = (
        448 * torch.tensor([1.0, 1.0000001])[torch.arange(128) // 127]
    )  # a maximum past its scale's edge
    assert_same_fp8(kernel.quantise(x.to(accelerator)), ref.quantise(x))


def test_ties_go_to_even(accelerator):
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat((grid, torch.tensor([448.0]), (grid[1:] + grid[:-1]) / 2, torch.tensor([448.0, 448.0])))
    x = torch.stack((x, -x))
    rows = kernel.quantise(x.to(accelerator))
    assert (rows.scales == 1).all()
    assert_same_fp8(rows, ref.quantise(x))


def test_rows_may_be_strided_and_do_not_see_their_batch(accelerator):
    x = draw(40, 300, seed=4, decades=1).to(accelerator)[::2, 40:296]
    whole = kernel.quantise(x)
    assert_same_fp8(whole, ref.quantise(x.cpu()))
    for row in (0, 7, 19):
        assert_same_fp8(kernel.quantise(x[row : row + 1]), [part[row : row + 1].cpu() for part in whole])


def test_out_is_written_and_returned(accelerator):
    x = draw(3, 128, seed=5).to(accelerator)
    out = Fp8Rows(*(torch.empty_like(part) for part in kernel.quantise(x)))
    assert kernel.quantise(x, out=out) is out
    assert_same_fp8(out, ref.quantise(x.cpu()))


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.zeros(3, 64), ValueError),
        (torch.zeros(3, 128, dtype=torch.float64), TypeError),
        (torch.zeros(128, 3).T, ValueError),
    ],
)
def test_a_misfit_is_refused(x, error):
    with pytest.raises(error, match="fp8_quantise: "):
        kernel.quantise(x)
