"""Faults planted in the source of the NVFP4 quantiser's kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.formats import nvfp4_kernel
from kernels.nvfp4_quantise import kernel
from kernels.nvfp4_quantise import test_nvfp4_quantise_kernel as tests
from kernels.rmsnorm import row_kernel

ROWS = Seen(tests.test_every_number_of_rows, T=3, dtype=tests.BF16)
LONG = Seen(tests.test_a_row_longer_than_a_program_holds, D=32784, dtype=tests.BF16)
SPECIAL = Seen(tests.test_every_magnitude_and_special_value)
FAULTS = [
    Faults(
        kernel._nvfp4_quantise_kernel,
        ROWS,
        {
            "a gsa of the first rows for all": ("row * x_stride", "(row // 2) * x_stride"),
            "gsa of the row's sum": ("row_top(amax)", "tl.sum(amax, 0)"),
            "gsa of the last group": (
                "row_top(amax)",
                "tl.sum(tl.where(tl.arange(0, GROUPS) == 2, amax, 0.0), 0)",
            ),
        },
    ),
    Faults(
        kernel._nvfp4_quantise_long_kernel,
        LONG,
        {
            "gsa of the last part": (
                "max_nan(top, row_top(group_max(x, GROUPS)))",
                "row_top(group_max(x, GROUPS))",
            ),
            "a NaN of one part is lost": ("top = max_nan(top,", "top = tl.maximum(top,"),
            "each part in the first one's place": ("FIRST=part * GROUPS", "FIRST=0"),
            "each part under its own largest": (
                "store_nvfp4(x, amax, top, code_ptr",
                "store_nvfp4(x, amax, row_top(amax), code_ptr",
            ),
        },
    ),
    Faults(
        kernel.store_nvfp4,
        ROWS,
        {
            "the words of a group the other way round": (
                "+ tl.arange(0, 2)[None",
                "+ (1 - tl.arange(0, 2))[None",
            ),
            "the last scale not stored": ("scale, group < D // 16)", "scale, group < D // 16 - 1)"),
            "the last word not stored": ("at < D // 8)", "at < D // 8 - 1)"),
            "the group's largest for the row's": (
                "nvfp4_row(y, amax, top, GROUPS)",
                "nvfp4_row(y, top + 0 * amax, top, GROUPS)",
            ),
        },
    ),
    Faults(
        nvfp4_kernel.nvfp4_row,
        SPECIAL,
        {"an infinite row has a scale": ("nvfp4_gsa(finite(top))", "nvfp4_gsa(top)")},
    ),
    Faults(
        nvfp4_kernel.nvfp4_codes,
        SPECIAL,
        {"the short way for every gsa": ("if fits & by_steps(gsa):", "if fits:")},
    ),
    Faults(
        nvfp4_kernel.by_divisions,
        SPECIAL,
        {
            "codes under the unrounded scale": ("step = value * gsa", "step = ideal * gsa"),
            "nibbles swapped": ("low, high = c0 | (c1 << 4)", "low, high = c1 | (c0 << 4)"),
            "words swapped": ("low | (high << 16)", "high | (low << 16)"),
            "a NaN scale is a number": ("tl.where(ideal == ideal, byte, 0x7F)", "byte"),
        },
    ),
    Faults(
        row_kernel.group_max,
        ROWS,
        {
            "the signed largest": ("eighths(tl.abs(x), GROUPS, 2)", "eighths(x, GROUPS, 2)"),
            "half of a group": ("return max_nan(first, second)", "return first"),
        },
    ),
    Faults(
        row_kernel.row_top,
        SPECIAL,
        {
            "a NaN is passed over": (
                "tl.max(amax.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)",
                "tl.max(amax, 0)",
            )
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
