"""The packed rows are the format's codes, scales and factor, one row a row."""

import numpy as np
import pytest

from kernels._check import SIZES, assert_bitwise, assert_differs, assert_rows_alone, draw, to_nvfp4
from kernels.formats import nvfp4
from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise


@pytest.mark.parametrize("T", SIZES)
def test_bytes_stand_for_the_format_s_values(T):
    x = draw(T, 64, seed=1, decades=2)
    rows = quantise(x)
    assert [tuple(part.shape) for part in rows] == [(T, 32), (T, 4), (T,)]
    assert_bitwise(rows.values(), nvfp4.round(x))


def test_equals_ml_dtypes():
    x = draw(40, 128, seed=2, decades=1)
    values, gsa = to_nvfp4(x.numpy())
    assert_bitwise(quantise(x).gsa, gsa[:, 0])
    assert_bitwise(quantise(x).values(), (values * gsa).astype(np.float32))


def test_the_even_index_is_the_low_nibble():
    x = draw(3, 16, seed=3)
    rows = quantise(x)
    codes = nvfp4.quantise(x)[0]
    assert_bitwise(rows.codes & 15, codes[:, ::2])
    assert_bitwise(rows.codes >> 4, codes[:, 1::2])
    swapped = Nvfp4Rows((rows.codes >> 4) | (rows.codes << 4), rows.scales, rows.gsa)
    assert_differs(swapped.values(), rows.values())


def test_a_row_does_not_see_its_batch():
    assert_rows_alone(lambda rows: quantise(rows["x"]).values(), {"x": draw(129, 48, seed=4, decades=2)})
