"""Faults planted in the source of P4's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.rmsnorm import row_kernel
from kernels.rmsnorm_quantise_nvfp4 import kernel
from kernels.rmsnorm_quantise_nvfp4 import test_rmsnorm_quantise_nvfp4_kernel as tests

BITS = Seen(tests.test_has_the_bits_of_two_kernels, T=9, D=96, between=tests.F32)
STORED = Seen(tests.test_has_the_bits_of_two_kernels, T=3, D=1536, between=tests.BF16)
GSA = Seen(tests.test_gsa_is_the_ref_s_within_its_bound)
ORDER = Seen(tests.test_the_sum_has_the_norm_s_order, D=2048, step=1)
WARPS = Seen(tests.test_the_sum_has_the_norm_s_order, D=8192, step=32)
FAULTS = [
    Faults(
        kernel._rmsnorm_quantise_kernel,
        BITS,
        {
            "another row": ("x_ptr + row * x_stride", "x_ptr + (row // 2) * x_stride"),
            "eps left out": ("D, eps, BETWEEN", "D, 0.1, BETWEEN"),
            "the weight of its neighbours": (
                "(weight_ptr, D, GROUPS, WEIGHTED)",
                "(weight_ptr, D - 2, GROUPS, WEIGHTED)",
            ),
        },
    ),
    Faults(
        kernel.store_normed,
        BITS,
        {
            "the copy without the last value": ("col < D)", "col < D - 1)"),
            "quantised before the norm": ("store_rows(y, amax, top,", "store_rows(x, amax, top,"),
            "the weight twice": ("norm_row(x, weight, D", "norm_row(x * weight, weight, D"),
        },
    ),
    Faults(
        row_kernel.norm_row,
        BITS,
        {
            "gsa before the norm": ("_stored(top * inverse, BETWEEN)", "_stored(top, BETWEEN)"),
            "the groups' largest before the norm": (
                "_stored(amax * inverse, BETWEEN)",
                "_stored(amax, BETWEEN)",
            ),
            "the largest of x, not of x and weight": ("group_max(x_weight, GROUPS)", "group_max(x, GROUPS)"),
            "the squares of x and weight": ("squares(x, GROUPS, 2)", "squares(x_weight, GROUPS, 2)"),
            "the mean over a power of two": (
                "inverse_root(total, D, eps)",
                "inverse_root(total, GROUPS * 16, eps)",
            ),
        },
    ),
    Faults(
        row_kernel.norm_row,
        GSA,
        {"one gain of 1.00001": ("inverse_root(total, D, eps)", "inverse_root(total, D, eps) * 1.00001")},
    ),
    Faults(
        row_kernel.norm_row,
        STORED,
        {
            "the store between left out": ("_stored(x_weight * inverse, BETWEEN)", "x_weight * inverse"),
            "the largest not stored": ("_stored(amax * inverse, BETWEEN)", "amax * inverse"),
        },
    ),
    Faults(
        row_kernel._sum_and_max,
        BITS,
        {
            "the larger sum": ("sum0 + sum1", "max_nan(sum0, sum1)"),
            "the sum of both maxima": ("max_nan(max0, max1)", "max0 + max1"),
        },
    ),
    Faults(
        row_kernel._halved,
        ORDER,
        {
            "neighbours instead of halves": (
                "(tl.reshape(total, (2, SIZE // 2)), tl.reshape(top, (2, SIZE // 2))), 0,",
                "(tl.reshape(total, (SIZE // 2, 2)), tl.reshape(top, (SIZE // 2, 2))), 1,",
            )
        },
    ),
    Faults(
        row_kernel._over_warps,
        WARPS,
        {
            "neighbours instead of halves": (
                "(32, 2, WARPS // 2, 2)), (0, 2, 3, 1)",
                "(32, WARPS // 2, 2, 2)), (0, 1, 3, 2)",
            ),
        },
    ),
    Faults(
        row_kernel._over_warps,
        STORED,
        {"the upper half left out": ("tl.join(sum0 + sum1, max_nan", "tl.join(sum0, max_nan")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
