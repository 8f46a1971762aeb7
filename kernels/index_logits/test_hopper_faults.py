"""Faults planted in the source of prefill's Hopper kernel, on such a GPU alone: the op's tests see each."""

import pytest

from kernels._check import on_gpu
from kernels._mutate import Faults, Seen, planted
from kernels.index_logits import hopper_kernel
from kernels.index_logits import test_index_logits_kernel as tests

FILLED = Seen(tests.test_the_hopper_kernel_equals_the_ref_and_itself, T=257, C=600, fill=True)
OPEN = Seen(tests.test_the_hopper_kernel_equals_the_ref_and_itself, T=65, C=128, fill=False)
FAULTS = [
    Faults(
        hopper_kernel._prefill_hopper_kernel,
        FILLED,
        {
            "both groups of keys are the first": ("[start + group * TILE, 0]", "[start, 0]"),
            "hidden entries are a number": ('gl.full([2 * TILE], float("-inf")', "gl.full([2 * TILE], -1e30"),
        },
    ),
    Faults(
        hopper_kernel._store,
        FILLED,
        {
            "no ReLU": (
                "gl.maximum(dots, 0.0, propagate_nan=KEEP_NAN) * weights[None, :]",
                "dots * weights[None, :]",
            ),
            "ReLU after the weights": (
                "gl.maximum(dots, 0.0, propagate_nan=KEEP_NAN) * weights[None, :]",
                "gl.maximum(dots * weights[None, :], 0.0, propagate_nan=KEEP_NAN)",
            ),
            "the keys' scale left out": ("turned), 1) * scale", "turned), 1)"),
            "an entry too many": ("entries < limit, scores,", "entries <= limit, scores,"),
        },
    ),
    Faults(
        hopper_kernel._store,
        OPEN,
        {"hidden entries written": ("(entries < limit) & there", "(entries < C) & there")},
    ),
    Faults(
        hopper_kernel._score,
        OPEN,
        {
            "the odd row's weights are the even one's": (
                "_store(odd, odd_weights, scale,",
                "_store(odd, even_weights, scale,",
            )
        },
    ),
    Faults(
        hopper_kernel._copy,
        OPEN,
        {
            "the first row's weights": (
                "weight_ptr + row.to(gl.int64) * 64",
                "weight_ptr + row.to(gl.int64) * 0",
            )
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS, pytest.mark.gpu, on_gpu)
