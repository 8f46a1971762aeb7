import pytest
import torch

from kernels.arguments import check

F32, U8 = torch.float32, torch.uint8


def test_letters_are_bound_over_all_tensors():
    x, codes = torch.zeros(3, 32), torch.zeros(3, 16, dtype=U8)
    assert check("op", x=(x, "T D", F32), codes=(codes, "T D/2", U8), absent=(None, "D", F32)) == {
        "T": 3,
        "D": 32,
    }


@pytest.mark.parametrize(
    ("tensor", "axes", "message"),
    [
        (torch.zeros(3, 5), "T D/2", r"op: y is torch.float32 of shape \(3, 5\) and strides \(5, 1\)"),
        (torch.zeros(4, 16), "T D/2", r"expected \[T D/2\] = \(3, 16\)"),
        (torch.zeros(16, 3).T, "T D/2", "the last axis contiguous"),
        (torch.zeros(3), "T D/2", r"of shape \(3,\)"),
        (torch.zeros(3, 16, device="meta"), "T D/2", "x on cpu, y on meta"),
    ],
)
def test_a_misfit_is_named_with_shape_dtype_and_strides(tensor, axes, message):
    with pytest.raises(ValueError, match=message):
        check("op", x=(torch.zeros(3, 32), "T D", F32), y=(tensor, axes, F32))


def test_a_wrong_dtype_is_named():
    with pytest.raises(TypeError, match=r"op: y is torch.float32 .* expected torch.uint8"):
        check("op", y=(torch.zeros(3), "T", U8))


def test_rows_may_be_strided_unless_dense_is_asked():
    rows = torch.zeros(6, 8)[::2]
    assert check("op", x=(rows, "T D", F32)) == {"T": 3, "D": 8}
    with pytest.raises(ValueError, match="all axes contiguous"):
        check("op", dense=["x"], x=(rows, "T D", F32))


def test_too_few_axes_are_named():
    with pytest.raises(ValueError, match=r"op: x is torch.float32 of shape \(8,\)"):
        check("op", x=(torch.zeros(8), "T D", F32))
