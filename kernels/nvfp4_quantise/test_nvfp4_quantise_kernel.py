"""The quantiser's kernel has the ref's bits, on every size, stride, decade and special value."""

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_fault_seen, assert_same_rows, draw
from kernels.formats import nvfp4
from kernels.nvfp4_quantise import kernel, ref
from kernels.nvfp4_quantise.ref import Nvfp4Rows

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("T", SIZES)
def test_every_number_of_rows(T, dtype, accelerator):
    x = draw(T, 48, seed=1, decades=2).to(dtype)
    assert_same_rows(kernel.quantise(x.to(accelerator)), ref.quantise(x))


@pytest.mark.parametrize("D", [16, 96, 1536, 4096, 7168])
def test_every_width(D, accelerator):
    x = draw(2, D, seed=2, decades=1).to(BF16)
    assert_same_rows(kernel.quantise(x.to(accelerator)), ref.quantise(x))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("D", [32784, 65536])
def test_a_row_longer_than_a_program_holds(D, dtype, accelerator):
    """The largest, or a NaN, of either part is the row's."""
    x = draw(4, D, seed=6, decades=1).to(dtype)
    x[0, D - 3], x[1, 5], x[2, D - 1] = 3e4, -3e4, float("nan")
    assert_same_rows(kernel.quantise(x.to(accelerator)), ref.quantise(x))


def test_every_magnitude_and_special_value(accelerator):
    x = torch.cat(
        [draw(1, 64, seed=99 + exponent) * 10.0**exponent for exponent in range(-44, 38, 2)]
        + [torch.zeros(8, 64)]
    )
    x[-1] = -0.0
    x[-2, 3], x[-3, 60], x[-4, 0] = float("nan"), float("inf"), float("-inf")
    x[-5, 5], x[-6, ::7], x[-7, 1::5] = 1e-45, 3e38, 1.0
    assert_same_rows(kernel.quantise(x.to(accelerator)), ref.quantise(x))


def test_rows_may_be_strided_and_do_not_see_their_batch(accelerator):
    x = draw(40, 200, seed=4, decades=1).to(accelerator)[::2, 40:136]
    whole = kernel.quantise(x)
    assert_same_rows(whole, ref.quantise(x.cpu()))
    for row in (0, 7, 19):
        alone = kernel.quantise(x[row : row + 1])
        assert_same_rows(alone, [part[row : row + 1] for part in whole])


def test_out_is_written_and_returned(accelerator):
    x = draw(3, 32, seed=5).to(accelerator)
    out = Nvfp4Rows(*(torch.empty_like(part) for part in kernel.quantise(x)))
    assert kernel.quantise(x, out=out) is out
    assert_same_rows(out, ref.quantise(x.cpu()))


@pytest.mark.parametrize("fault", ["ties away", "gsa of the launch", "unrounded scale", "swapped nibbles"])
def test_a_planted_fault_is_seen(fault, accelerator):
    x = draw(3, 96, seed=6).to(BF16)
    if fault == "ties away":
        x[0, :4] = torch.tensor([6.0, 2.5, 1.25, 0.25])  # a block whose step is a power of two
        x[0, 4:] *= 0.01
        x[0, 4:16] = 0
    got = kernel.quantise(x.to(accelerator))
    codes, scales, gsa = ref.quantise(x)
    if fault == "ties away":
        codes = codes.clone()
        codes[0, 0] += 1 << 4
    elif fault == "gsa of the launch":
        made = nvfp4.quantise(x, nvfp4.row_gsa(x).amax())
        codes, scales, gsa = ref.e2m1.pack(made[0]), made[1], made[2].squeeze(-1)
    elif fault == "unrounded scale":
        scales = scales + 1
    else:
        codes = (codes >> 4) | (codes << 4)
    assert_fault_seen(lambda: assert_same_rows(got, (codes, scales, gsa)))


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.zeros(3, 24), ValueError),
        (torch.zeros(3, 32, dtype=torch.float64), TypeError),
        (torch.zeros(32, 3).T, ValueError),
        (torch.zeros(3, 131088), ValueError),
    ],
)
def test_a_misfit_is_refused(x, error):
    with pytest.raises(error, match="nvfp4_quantise: "):
        kernel.quantise(x)


def test_an_out_that_does_not_fit_is_refused():
    out = Nvfp4Rows(*(torch.zeros(3, n, dtype=torch.uint8) for n in (16, 2)), torch.zeros(4))
    with pytest.raises(ValueError, match=r"gsa is torch\.float32 of shape"):
        kernel.quantise(torch.zeros(3, 32), out=out)


def test_memory_is_poisoned():
    assert (torch.empty(3, dtype=torch.uint8) == 0xAA).all()
    assert_bitwise(torch.empty(2), torch.full((2,), float("nan")))
