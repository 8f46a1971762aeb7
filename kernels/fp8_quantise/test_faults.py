"""Faults planted in the source of the FP8 quantiser: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.fp8_quantise import kernel
from kernels.fp8_quantise import test_fp8_quantise_kernel as tests

WIDE = Seen(tests.test_every_width, D=4096 + 128)
SPECIAL = Seen(tests.test_every_magnitude_and_special_value)
FAULTS = [
    Faults(
        kernel._fp8_quantise_kernel,
        WIDE,
        {
            "scales half a chunk late": ("chunk * (GROUPS // 8)", "chunk * (GROUPS // 16)"),
            "every chunk the first": ("chunk * run, left", "chunk * 0, left"),
            "the first row's scales": ("scale_ptr + row * (D // 128)", "scale_ptr + row // 2 * (D // 128)"),
            "the last value left out": (
                "left = D - chunk * GROUPS * 16",
                "left = D - 1 - chunk * GROUPS * 16",
            ),
        },
    ),
    Faults(
        kernel.store_fp8,
        SPECIAL,
        {
            "the scale doubled": ("fmt.power_of_two_scale(", "2 * fmt.power_of_two_scale("),
            "another floor": ("fmt.floored(top, fmt.AMAX_FLOOR)", "fmt.floored(top, 1e-3)"),
            "the first group's maximum for the block's": (
                "fmt.abs_max(tl.reshape(amax, (blocks, 8)), 1)",
                "fmt.abs_max(tl.where(tl.arange(0, 8)[None, :] < 1, tl.reshape(amax, (blocks, 8)), 0.0), 1)",
            ),
            "rounded to another format first": (
                "fmt.e4m3(scaled)",
                "fmt.e4m3(scaled.to(tl.bfloat16).to(tl.float32))",
            ),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
