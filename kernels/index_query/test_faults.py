"""Faults planted in the source of the index query's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.index_query import kernel
from kernels.index_query import test_index_query_kernel as tests

FP8 = Seen(tests.test_equals_the_ref, form="fp8", T=3, H=5, decades=2.0)
FP4 = Seen(tests.test_equals_the_ref, form="fp4", T=3, H=5, decades=2.0)
FOLDED = Seen(tests.test_equals_the_ref, form="fp4_folded", T=3, H=5, decades=2.0)
SPECIAL = Seen(tests.test_special_rows, form="fp4_folded")
FAULTS = [
    Faults(
        kernel._query_kernel,
        FP8,
        {
            "the rotated query not stored as BF16": ("x = x.to(tl.bfloat16).to(tl.float32)", "x = x"),
            "the query's scale not in the weights": ("weights *= scale", "weights *= 1.0"),
            "the weights' scale left out": ("weights.to(tl.float64) * SCALE", "weights.to(tl.float64)"),
            "the weights' scale in FP32": (
                "(weights.to(tl.float64) * SCALE).to(tl.float32)",
                "weights.to(tl.float32) * SCALE * 1.0000001",
            ),
            "the first token's turn": ("sin_ptr, token, D", "sin_ptr, token * 0, D"),
            "every head is the first": ("heads[:, None] * D + dims", "heads[:, None] * 0 + dims"),
            "another token's weights": (
                "token * weight_stride + heads",
                "token // 2 * weight_stride + heads",
            ),
        },
    ),
    Faults(
        kernel._query_kernel,
        FP4,
        {
            "no Hadamard": ("fmt.mxfp4_block(hadamard(x, ROWS, D), ROWS, D)", "fmt.mxfp4_block(x, ROWS, D)"),
            "scales of a group early": (
                "(D // 32) + group[None, :], scales",
                "(D // 32) + (group ^ 1)[None, :], scales",
            ),
        },
    ),
    Faults(
        kernel._query_kernel, FOLDED, {"the unit not in the weights": ("weights *= unit", "weights *= 1.0")}
    ),
    Faults(
        kernel.rotated,
        FP8,
        {
            "the sine's sign": ("wide_even * cos - wide_odd * sin", "wide_even * cos + wide_odd * sin"),
            "the first dims turned": (
                "tl.arange(0, D // 2) - (D // 2 - PAIRS)",
                "(tl.arange(0, D // 2) + PAIRS) % (D // 2) - (D // 2 - PAIRS)",
            ),
            "halves instead of neighbours": (
                "tl.split(tl.reshape(x, (ROWS, D // 2, 2)))",
                "tl.split(tl.permute(tl.reshape(x, (ROWS, 2, D // 2)), (0, 2, 1)))",
            ),
        },
    ),
    Faults(
        kernel.hadamard,
        FP4,
        {
            "not normalised": ("y * D**-0.5", "y * 0.125"),
            "the inner part alone": (
                "inner[:, :, None, :] * _signs(OUTER)[None, :, :, None]",
                "inner[:, :, None, :] * tl.abs(_signs(OUTER))[None, :, :, None]",
            ),
        },
    ),
    Faults(
        kernel._signs, FP4, {"a parity of two bits of four": ("common ^= common >> 2", "common = common")}
    ),
    Faults(
        kernel._folded,
        FOLDED,
        {
            "the other nibble first": (
                "fmt.e2m1_value(wide & 15), fmt.e2m1_value(wide >> 4)",
                "fmt.e2m1_value(wide >> 4), fmt.e2m1_value(wide & 15)",
            ),
            "the smallest group's unit": ("tl.max(scale, 1))", "tl.min(scale, 1))"),
            "no group's scale": ("values * share[:, :, None]", "values * 64.0"),
        },
    ),
    Faults(
        kernel._folded,
        SPECIAL,
        {
            "a lost group keeps a unit": (
                'tl.where(lost, float("nan"), tl.max(scale, 1))',
                "tl.max(tl.where(scale == scale, scale, 0.0), 1)",
            )
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
