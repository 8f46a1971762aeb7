"""Faults planted in the source of the kernel with FP4 products, on a Blackwell alone: the op's test sees each."""

import pytest

from kernels._mutate import Faults, Seen, planted
from kernels.index_logits import fp4_kernel
from kernels.index_logits import test_index_logits_fp4_kernel as tests

NATIVE = Seen(tests.test_native_products_equal_the_ref, N=3, C=129, H=64, fill=True)
FAULTS = [
    Faults(
        fp4_kernel.native_kernel,
        NATIVE,
        {
            "the first query of a sequence": (
                "sequence * N + tl.program_id(0)",
                "sequence * N + tl.program_id(0) * 0",
            ),
            "the first group's scale": (
                "at_scale[:, None] + groups[None, :]",
                "at_scale[:, None] + 0 * groups[None, :]",
            ),
            "half of the weights": ("weighted_relu(dots, weights)", "weighted_relu(dots, 0.5 * weights)"),
            "tiles behind the limit left": (
                "tl.maximum(first, seen), first + tiles",
                "first + tiles, first + tiles",
            ),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS, pytest.mark.gpu, tests.on_blackwell)
