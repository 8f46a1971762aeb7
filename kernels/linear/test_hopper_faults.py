"""Faults planted in the source of the linears' Hopper kernel, on such a GPU alone: the op's tests see each."""

import pytest

from kernels._mutate import Faults, Seen, planted
from kernels.linear import hopper_kernel, hopper_product_kernel
from kernels.linear import test_hopper_kernel as tests
from kernels.linear.test_hopper_kernel import hopper  # noqa: F401 - the fixture

ROWS = Seen(tests.test_the_sum_is_exact_within_the_bound_and_the_same_alone, T=8, N=384, K=1024)
PARTS = Seen(tests.test_the_sum_is_exact_within_the_bound_and_the_same_alone, T=2, N=256, K=4096)
GROUPS = Seen(tests.test_groups_take_their_own_columns_or_the_same_ones, T=8)
FAULTS = [
    Faults(
        hopper_kernel._linear_hopper_kernel,
        ROWS,
        {
            "gsa left out": ("acc * gsa[None, :] *", "acc *"),
            "the first row's gsa": ("gsa_ptr + t, mask", "gsa_ptr + t * 0, mask"),
            "scale_2 left out": (" * gl.load(scale_2_ptr + group * scale_2_stride)", ""),
            "the last row left out": ("row < T,", "row < T - 1,"),
        },
    ),
    Faults(
        hopper_kernel._linear_hopper_kernel,
        PARTS,
        {"every part with the first columns of x": ("x_first = part * COLS +", "x_first = part * 0 +")},
    ),
    Faults(
        hopper_kernel._linear_hopper_kernel,
        GROUPS,
        {
            "the first group's columns": ("group * (X_AHEAD // 8)", "group * 0"),
            "the first matrix's scale_2": ("group * scale_2_stride", "group * 0"),
        },
    ),
    Faults(
        hopper_product_kernel.load_step,
        ROWS,
        {"the first words twice": ("step * 32 + word_at + 4,", "step * 32 + word_at,")},
    ),
    Faults(
        hopper_product_kernel._multiply_step,
        ROWS,
        {"the first half's scales twice": ("2 * step + 1, True,", "2 * step + 1, False,")},
    ),
    Faults(
        hopper_product_kernel._product,
        ROWS,
        {
            "one sum of two": ("(sums[0] + sums[1]) * UNDO", "sums[0] * UNDO"),
            "2^28 left out": ("(sums[0] + sums[1]) * UNDO", "sums[0] + sums[1]"),
        },
    ),
    Faults(
        hopper_product_kernel.stage_rows,
        ROWS,
        {"the scales of another group": ("((first + col) // 4)", "((first + col) // 8)")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS, pytest.mark.gpu)
