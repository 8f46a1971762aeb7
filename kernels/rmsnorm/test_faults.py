"""Faults planted in the source of RMSNorm's kernel and of what fused kernels take from it: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.rmsnorm import kernel, row_kernel
from kernels.rmsnorm import test_rmsnorm_kernel as tests

WIDTH = Seen(tests.test_every_width, D=1000)  # the mean square is about eps
PAIRS = Seen(tests.test_every_number_of_rows, T=3, dtype=tests.BF16)
ORDER = Seen(tests.test_the_sum_is_chains_of_eight_in_pairs_then_halves_onto_halves)
IN_ROWS = Seen(tests.test_a_norm_inside_a_kernel_of_several_rows_has_the_same_bits)
FAULTS = [
    Faults(
        kernel._rmsnorm_kernel,
        WIDTH,
        {
            "the weight left out": ("x * weight *", "x *"),
            "the weight squared": ("x * weight *", "x * weight * weight *"),
            "eps left out": ("(x, D, eps, GROUPS)", "(x, D, 0.0, GROUPS)"),
            "the mean over a power of two": ("(x, D, eps, GROUPS)", "(x, GROUPS * 16, eps, GROUPS)"),
            "the last value not stored": ("col < D)", "col < D - 1)"),
            "the root's reciprocal twice": (
                "y = x * weight * inverse_rms_of_row(x, D, eps, GROUPS)[:, None, None]",
                "y = x * weight\n    y = y * inverse_rms_of_row(y, D, eps, GROUPS)[:, None, None]",
            ),
        },
    ),
    Faults(
        row_kernel.inverse_root,
        WIDTH,
        {
            "eps after the root": ("size * 1.0) + eps)", "size * 1.0)) + eps"),
            "no root": ("tl.sqrt_rn(", "("),
            "no mean": ("tl.div_rn(total, size * 1.0)", "total"),
        },
    ),
    Faults(
        row_kernel.squares,
        WIDTH,
        {
            "a value of eight left out": ("total = tl.fma(x3, x3, total)", "total = total"),
            "a neighbour instead of a square": ("tl.fma(x3, x3, total)", "tl.fma(x3, x2, total)"),
        },
    ),
    Faults(
        row_kernel.squares,
        ORDER,
        {
            "products rounded before the sum": (
                "total = tl.fma(x2, x2, total)\n    total = tl.fma(x3, x3, total)",
                "total = total + x2 * x2\n    total = total + x3 * x3",
            ),
        },
    ),
    Faults(
        row_kernel.onto_halves,
        ORDER,
        {"neighbours instead of halves": ("(ROWS, 2, COLS // 2)), 1)", "(ROWS, COLS // 2, 2)), 2)")},
    ),
    Faults(
        row_kernel.widened,
        PAIRS,
        {
            "the pair's first twice": ("raw & -65536", "raw << 16"),
            "the pair the other way round": ("tl.join(low, high)", "tl.join(high, low)"),
            "the high value keeps the low one's bits": ("(raw & -65536)", "raw"),
        },
    ),
    Faults(
        row_kernel.raw_row,
        PAIRS,
        {"the last pair left out": ("at < D // 2, other=0)", "at < D // 2 - 1, other=0)")},
    ),
    Faults(
        kernel.inverse_rms,
        IN_ROWS,
        {"groups added in another order": ("(ROWS, COLS // 16, 2)), 2)", "(ROWS, 2, COLS // 16)), 1)")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
