"""Faults planted in the source of the experts' Hopper kernels, on such a GPU alone: the op's tests see each."""

import pytest

from kernels._mutate import Faults, Seen, planted
from kernels.grouped_ffn import hopper_down_kernel, hopper_kernel
from kernels.grouped_ffn import test_hopper_kernel as tests
from kernels.grouped_ffn.test_hopper_kernel import hopper, wide  # noqa: F401 - the fixtures

SORTED = Seen(tests.test_both_products_are_exact_within_the_bound, T=5, most_alone=0)
ALONE = Seen(tests.test_both_products_are_exact_within_the_bound, T=3, most_alone=hopper_kernel.MOST_ALONE)
DOWN = Seen(tests.test_swiglu_in_the_down_product_has_the_bits_of_its_own_launch, T=3)
FAULTS = [
    Faults(
        hopper_kernel._grouped_hopper_kernel,
        SORTED,
        {
            "gsa of the first row": ("gsa_ptr + slot // SLOTS_PER_ROW", "gsa_ptr + slot * 0"),
            "the first expert's scale_2": ("scale_2_ptr + expert)", "scale_2_ptr)"),
            "the last slot of a block left out": (
                "held, kept = place < count,",
                "held, kept = place < count - 1,",
            ),
            "the expert before": ("expert.to(gl.int64) * N", "gl.maximum(expert - 1, 0).to(gl.int64) * N"),
        },
    ),
    Faults(
        hopper_kernel._grouped_hopper_kernel,
        ALONE,
        {"every slot has the first token": ("place * 0 + block // SLOTS_PER_ROW", "place * 0")},
    ),
    Faults(
        hopper_down_kernel._swiglu_down_kernel,
        DOWN,
        {
            "up before gate": ("swiglu_of(gate, up, limit)", "swiglu_of(up, gate, limit)"),
            "the store between left out": ("up, limit), gl.bfloat16)", "up, limit), gl.float32)"),
            "gsa left out": ("acc * gsa *", "acc *"),
            "another slot's row": ("slot.to(gl.int64), K, WARPS)", "slot.to(gl.int64) * 0, K, WARPS)"),
        },
    ),
    Faults(
        hopper_down_kernel._halves_of_row,
        DOWN,
        {"gate for up": ("row * K + K // 2 + at", "row * K + at")},
    ),
    Faults(
        hopper_down_kernel._quantised,
        DOWN,
        {"the groups' scales under one step": ("steps(amax, gsa)", "steps(amax * 0.5, gsa)")},
    ),
    Faults(
        hopper_down_kernel._staged_row,
        DOWN,
        {"the pair's second scale left out": ("byte << 8", "byte * 0")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS, pytest.mark.gpu)
