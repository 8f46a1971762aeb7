"""Faults planted in the source of mHC's Hopper kernel, on such a GPU alone: the op's tests see each."""

import pytest

from kernels._check import on_gpu
from kernels._mutate import Faults, Seen, planted
from kernels.hc import columns_hopper_kernel, hopper_kernel
from kernels.hc import test_hc_kernel as tests

ORDER = Seen(tests.test_the_hopper_kernel_has_one_order_of_sums, T=67, D=1300)
TILES = Seen(tests.test_the_hopper_kernel_has_one_order_of_sums, T=300, D=4096)
FAULTS = [
    Faults(
        hopper_kernel.partial_hopper_kernel,
        ORDER,
        {
            "two splits of the same columns": (
                "gl.program_id(1) * steps * 64",
                "gl.program_id(1) // 2 * steps * 64",
            ),
        },
    ),
    Faults(
        hopper_kernel.store_sums,
        ORDER,
        {
            "a gain of 1.001": (
                "gl.store(part_ptr + place, total,",
                "gl.store(part_ptr + place, total * 1.001,",
            ),
        },
    ),
    Faults(
        hopper_kernel.store_terms,
        ORDER,
        {
            "the middle term left out": (".store(_upper(middle))", ".store(_upper(middle * 0.0))"),
            "the last term is the middle one": ("_upper(rest - middle)", "_upper(middle)"),
        },
    ),
    Faults(
        hopper_kernel.row_squares,
        ORDER,
        {"no squares": ("gl.sum(wide * wide, 1)", "gl.sum(gl.abs(wide), 1)")},
    ),
    Faults(
        hopper_kernel._chains,
        ORDER,
        {
            "a segment for the chain": ("chain += done", "chain = done"),
            "a chain of squares lost": ("pair_square += chain_square", "pair_square = chain_square"),
        },
    ),
    Faults(
        columns_hopper_kernel.partial_columns_kernel,
        ORDER,
        {
            "two splits of the same columns": (
                "first = gl.program_id(1) * (STEPS * 64)",
                "first = gl.program_id(1) // 2 * (STEPS * 64)",
            ),
            "a segment for the chain": ("total += part", "total = part"),
            "squares of a segment alone": ("total_square += square", "total_square = square"),
        },
    ),
    Faults(
        columns_hopper_kernel._cut_weights,
        ORDER,
        {"weights of the first step": ("first + step * 64 + column", "first + column")},
    ),
    Faults(
        columns_hopper_kernel._fill,
        TILES,
        {"streams of the first tile": ("first_row + (number // STEPS) * BLOCK_T", "first_row")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS, pytest.mark.gpu, on_gpu)
