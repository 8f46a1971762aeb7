"""Faults planted in the source of the index key's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.index_key import kernel
from kernels.index_key import test_index_key_kernel as tests
from kernels.rmsnorm import kernel as norm_kernel

FP8 = Seen(tests.test_equals_the_norm_kernel_and_the_refs, form="fp8", E=3, decades=0.0)
FP4 = Seen(tests.test_equals_the_norm_kernel_and_the_refs, form="fp4", E=3, decades=0.0)
SPECIAL = Seen(tests.test_special_rows, form="fp8")
FAULTS = [
    Faults(
        kernel._key_kernel,
        FP8,
        {
            "scales a slot early": ("PAGE * D // 4 + inside, scale", "PAGE * D // 4 + inside // 2, scale"),
            "the first key's turn": ("tl.minimum(row, E - 1)[:, None]", "tl.minimum(row, 0)[:, None]"),
            "the weight twice": (
                "x = normalised(x, weight, D, eps, ROWS, D)\n    x = rotated(x, cos_ptr",
                "x = rotated(normalised(x, weight, D, eps, ROWS, D) * weight[None, :], cos_ptr",
            ),
            "not turned": ("x = rotated(x, cos_ptr,", "_ = rotated(x, cos_ptr,"),
            "no weight": (
                "load_weight(weight_ptr, dims, D, True)",
                "load_weight(weight_ptr, dims, D, False)",
            ),
            "-1 writes to slot 0": ("there = slot >= 0", "there = slot >= -1"),
            "a page for a token": (
                "slot // PAGE * page_stride, slot % PAGE",
                "slot * (page_stride // PAGE), slot * 0",
            ),
        },
    ),
    Faults(
        kernel._key_kernel,
        FP4,
        {
            "no Hadamard": ("fmt.mxfp4_block(hadamard(x, ROWS, D), ROWS, D)", "fmt.mxfp4_block(x, ROWS, D)"),
            "scales over the codes": (
                "at = start + PAGE * (D // 2) + inside * (D // 32)",
                "at = start + inside * (D // 32)",
            ),
            "scales of a group early": (
                "at[:, None] + group[None, :], scales",
                "at[:, None] + (group ^ 1)[None, :], scales",
            ),
        },
    ),
    Faults(kernel._key_kernel, SPECIAL, {"another eps": ("weight, D, eps, ROWS", "weight, D, 1e-5, ROWS")}),
    Faults(
        norm_kernel.normalised,
        FP8,
        {"the weight left out": ("x * weight[None, :] * inverse", "x * inverse")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
