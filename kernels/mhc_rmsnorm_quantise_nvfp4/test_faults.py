"""Faults planted in the source of P5's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.mhc_rmsnorm_quantise_nvfp4 import kernel
from kernels.mhc_rmsnorm_quantise_nvfp4 import test_mhc_rmsnorm_quantise_nvfp4_kernel as tests

BITS = Seen(tests.test_has_the_bits_of_three_kernels, T=4, D=96, dtype=tests.BF16, between=tests.F32)
STORED = Seen(tests.test_has_the_bits_of_three_kernels, T=4, D=96, dtype=tests.BF16, between=tests.BF16)
LOOPS = Seen(tests.test_a_program_that_loops_has_the_bits_of_one_a_row)
FAULTS = [
    Faults(
        kernel._mhc_rmsnorm_quantise_kernel,
        BITS,
        {
            "the first token's streams": (
                "streams_ptr + row * streams_stride",
                "streams_ptr + (row // 2) * streams_stride",
            ),
            "the first token's pre": ("pre_ptr + row * NUM_STREAMS", "pre_ptr + row // 2 * NUM_STREAMS"),
            "another eps": ("row, D, eps, BETWEEN", "row, D, 0.01, BETWEEN"),
        },
    ),
    Faults(
        kernel._mhc_rmsnorm_quantise_kernel,
        STORED,
        {
            "the sum's store left out": (
                "stored(_weighted_sum(at, pre_at, stream_stride, D, GROUPS), BETWEEN)",
                "_weighted_sum(at, pre_at, stream_stride, D, GROUPS)",
            ),
        },
    ),
    Faults(
        kernel._mhc_rmsnorm_quantise_kernel,
        LOOPS,
        {
            "every turn of the loop takes the first row's pre": (
                "wide * NUM_STREAMS",
                "tl.program_id(0) * NUM_STREAMS",
            ),
            "the last row left out": ("num_rows, tl.num_programs(0)", "num_rows - 1, tl.num_programs(0)"),
        },
    ),
    Faults(
        kernel._weighted_sum,
        BITS,
        {
            "a stream left out": (
                "total = tl.fma(widened(x2, GROUPS), tl.load(pre_ptr + 2), total)",
                "total = total",
            ),
            "a stream twice": ("raw_row(at + 3 * stream_stride", "raw_row(at + 2 * stream_stride"),
            "two streams' weights swapped": (
                "tl.load(pre_ptr + 1), total)\n    total = tl.fma(widened(x2, GROUPS), tl.load(pre_ptr + 2)",
                "tl.load(pre_ptr + 2), total)\n    total = tl.fma(widened(x2, GROUPS), tl.load(pre_ptr + 1)",
            ),
            "products rounded before the sum": (
                "return tl.fma(widened(x3, GROUPS), tl.load(pre_ptr + 3), total)",
                "return widened(x3, GROUPS) * tl.load(pre_ptr + 3) + total",
            ),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
