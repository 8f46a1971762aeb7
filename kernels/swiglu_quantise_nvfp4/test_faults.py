"""Faults planted in the source of the SwiGLU quantiser's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.swiglu_quantise_nvfp4 import kernel
from kernels.swiglu_quantise_nvfp4 import test_swiglu_quantise_nvfp4_kernel as tests

BITS = Seen(tests.test_has_the_bits_of_two_kernels, T=3, between=tests.BF16)
FAULTS = [
    Faults(
        kernel._swiglu_quantise_kernel,
        BITS,
        {
            "up before gate": (
                "swiglu_of(load_row(at, F, GROUPS), load_row(at + half, F, GROUPS), limit)",
                "swiglu_of(load_row(at + half, F, GROUPS), load_row(at, F, GROUPS), limit)",
            ),
            "the store between left out": (", limit), BETWEEN)", ", limit), tl.float32)"),
            "gate for up": ("load_row(at + half, F", "load_row(at, F"),
            "the limit twice": ("GROUPS), limit)", "GROUPS), 2 * limit)"),
            "gsa of the row's sum": ("row_top(amax)", "tl.sum(amax, 0)"),
            "another row": ("x_ptr + row * x_stride", "x_ptr + (row // 2) * x_stride"),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
