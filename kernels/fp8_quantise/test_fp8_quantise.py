"""The rows are the format's codes and scales, one row a row."""

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_rows_alone, draw, to_fp8
from kernels.formats import fp8_block
from kernels.fp8_quantise.ref import quantise


@pytest.mark.parametrize("T", SIZES)
def test_bytes_stand_for_the_format_s_values(T):
    x = draw(T, 256, seed=1, decades=2)
    rows = quantise(x)
    assert [tuple(part.shape) for part in rows] == [(T, 256), (T, 2)]
    assert rows.codes.dtype == torch.float8_e4m3fn
    assert_bitwise(rows.values(), fp8_block.round(x, 128))
    assert_bitwise(rows.values(), to_fp8(x.numpy(), 128))


def test_a_row_does_not_see_its_batch():
    assert_rows_alone(lambda rows: quantise(rows["x"]).values(), {"x": draw(129, 128, seed=4, decades=2)})
