"""Faults planted in the source of the Hopper attention kernels, on such a GPU alone: the op's tests see each."""

import pytest

from kernels._mutate import Faults, Seen, planted
from kernels.sparse_attn import (
    gathered_hopper_kernel,
    hopper_kernel,
    hopper_producer_kernel,
    hopper_query_kernel,
    hopper_scores_kernel,
    hopper_softmax_kernel,
    hopper_values_kernel,
)
from kernels.sparse_attn import test_hopper_kernel as tests
from kernels.sparse_attn import test_product as product


def within(path, splits=1):
    """The test of the bound, two steps and the start of a third."""
    return Seen(tests.test_within_the_bound_of_its_roundings, path=path, T=3, H=40, S=130, splits=splits)


B0, B1, B1_Q2, ALIGNED = (within(path) for path in ("b0", "b1", "b1_q2", "b1_aligned"))
SPLIT = within("b1", splits=2)
PRODUCT = Seen(product.test_one_launch_gives_the_bits_of_two, aligned=False, T=3, H=40, S=65, splits=2)
MANY = Seen(product.test_one_launch_gives_the_bits_of_two, aligned=False, T=130, H=64, S=640, splits=1)
SINK = Seen(tests.test_planted_faults_leave_the_bound, path="b1")
RISING_B0, RISING_B1, RISING_ALIGNED = (
    Seen(tests.test_scores_that_rise_from_tile_to_tile, path=path, splits=1)
    for path in ("b0", "b1", "b1_aligned")
)
FAULTS = [
    Faults(
        gathered_hopper_kernel.attend_gathered_hopper_kernel,
        B0,
        {
            "the first row's list": ("idx_ptr + row * num_keys + low", "idx_ptr + row * 0 + low"),
            "the first row's query": ("q_ptr + row * q_stride", "q_ptr + row * 0"),
        },
    ),
    Faults(
        gathered_hopper_kernel._dots,
        B0,
        {"the last 128 values left out": ("gl.static_range(3)", "gl.static_range(2)")},
    ),
    Faults(
        gathered_hopper_kernel._scores,
        B0,
        {
            "no key counts as logit 0": (
                "dots = dots + column[None, :]",
                "dots = dots + column[None, :] * 0.0",
            )
        },
    ),
    Faults(
        gathered_hopper_kernel._values,
        RISING_B0,
        {"the values not rescaled": ("low = low * shrink[:, None]", "low = low")},
    ),
    Faults(
        hopper_kernel._attend,
        B1,
        {
            "the first row's list": ("idx = idx_ptr + row * num_keys + low", "idx = idx_ptr + row * 0 + low"),
            "the first row's query": (
                "first_head = row * heads + head_of_tile",
                "first_head = row * 0 + head_of_tile",
            ),
        },
    ),
    Faults(
        hopper_kernel._attend,
        PRODUCT,
        {
            "the first row's product": ("q_ptr + row * q_stride", "q_ptr + row * 0"),
            "the first token's angle": ("cos_ptr + row * 32", "cos_ptr + row * 0"),
        },
    ),
    Faults(
        hopper_query_kernel.make_q,
        PRODUCT,
        {
            "the heads before": ("q_ptr + (first + HEADS) * 512", "q_ptr + first * 512"),
        },
    ),
    Faults(
        hopper_query_kernel._put_heads,
        PRODUCT,
        {
            "128 values left out of the norm": ("_sixteens(x2))", "_sixteens(x0))"),
            "128 values left out of the largest": ("gl.maximum(_largest(x2), top_last)", "top_last"),
            "the last 64 values left out of the largest": (
                "_largest(x2), top_last",
                "_largest(x2), 0.0 * top_last",
            ),
            "the norm's eps": ("512, eps", "512, 2 * eps"),
            "rope not divided by the scale": ("(turned * shrink)", "turned"),
        },
    ),
    Faults(
        hopper_query_kernel._rotated,
        PRODUCT,
        {
            "turned backwards": (
                "_product(even, cos) - _product(odd, sin)",
                "_product(even, cos) + _product(odd, sin)",
            ),
        },
    ),
    Faults(
        hopper_query_kernel._rotated,
        MANY,
        {"products not rounded": ("_product(even, cos) - _product(odd, sin)", "even * cos - odd * sin")},
    ),
    Faults(
        hopper_kernel.attend_hopper_kernel,
        B1_Q2,
        {"the terms swapped": ("(q_ptr, residual_ptr, q_scale_ptr)", "(residual_ptr, q_ptr, q_scale_ptr)")},
    ),
    Faults(
        hopper_kernel.attend_product_hopper_kernel,
        PRODUCT,
        {"sine for cosine": ("(q_ptr, cos_ptr, sin_ptr, q_stride", "(q_ptr, sin_ptr, cos_ptr, q_stride")},
    ),
    Faults(
        hopper_query_kernel._stored,
        PRODUCT,
        {"the norm not stored in BF16": (".to(gl.bfloat16).to(gl.float32)", "")},
    ),
    Faults(
        hopper_scores_kernel.scores_group,
        B1,
        {
            "no key counts as logit 0": (
                "dots = dots + column[None, :]  # 0 or MASKED",
                "dots = dots + column[None, :] * 0.0",
            ),
            "the first head's scale": (
                "q_scale_ptr + first_head + head, mask",
                "q_scale_ptr + first_head + head * 0, mask",
            ),
        },
    ),
    Faults(
        hopper_scores_kernel.scores_group,
        ALIGNED,
        {
            "the token's scale left out of the values": (
                "weights = weights * column[None, :]",
                "weights = weights * SHIFT",
            )
        },
    ),
    Faults(
        hopper_scores_kernel._group_dots,
        B1,
        {"the keys' scales left out": ("part * scale[None, :]", "part")},
    ),
    Faults(
        hopper_scores_kernel._group_dots,
        B1_Q2,
        {"the second term left out": ("if TERMS == 2:", "if TERMS == 3:")},
    ),
    Faults(
        hopper_scores_kernel._nope_dots,
        ALIGNED,
        {"the last 64 values left out": ("gl.static_range(4)", "gl.static_range(3)")},
    ),
    Faults(
        hopper_softmax_kernel.step_sums,
        RISING_B1,
        {
            "the sum not rescaled": ("highest, kept +", "highest, total +"),
            "the first maximum kept": ("gl.where(highest > peak + LAZY, highest, peak)", "peak"),
        },
    ),
    Faults(
        hopper_softmax_kernel.end_sums,
        SINK,
        {
            "the sink left out": ("gl.where(partial, 0.0, gl.exp2(sink - peak))", "0.0"),
            "the sink to base 2": ("other=0.0) * LOG2E", "other=0.0)"),
            "the LSE to base 2": ("lse * gl.where(partial, 1.0, LN2)", "lse"),
        },
    ),
    Faults(
        hopper_softmax_kernel.end_sums,
        SPLIT,
        {
            "parts not normalised": ("sums.store(1.0 / (", "sums.store(1.0 / (1.0 + 0.0 * "),
            "the sink in every part": (
                "gl.where(partial, 0.0, gl.exp2(sink - peak))",
                "gl.exp2(sink - peak)",
            ),
            "a part's LSE natural": ("lse * gl.where(partial, 1.0, LN2)", "lse * LN2"),
        },
    ),
    Faults(
        hopper_softmax_kernel.block_of,
        SPLIT,
        {"the parts in one place": ("(split * (gl.num_programs(0)", "(0 * (gl.num_programs(0)")},
    ),
    Faults(
        hopper_values_kernel.values_group,
        RISING_B1,
        {"a group of values not rescaled": ("a1 = a1 * by", "a1 = a1")},
    ),
    Faults(
        hopper_values_kernel.values_group,
        RISING_ALIGNED,
        {
            "rope's 2^60 not undone": ("a3 * UNSHIFT * inverse", "a3 * inverse"),
            "rope not rescaled": ("a3 = a3 * by", "a3 = a3"),
        },
    ),
    Faults(
        hopper_producer_kernel.producer_group,
        B1,
        {
            "the values' scales half": ("gl.minimum(byte + 60, 254)", "gl.minimum(byte + 59, 254)"),
            "the first group's scale for the dots": (
                "((bytes8 >> (8 * group)) & 0xFF)",
                "((bytes8 >> (8 * (group // 2))) & 0xFF)",
            ),
        },
    ),
    Faults(
        hopper_producer_kernel._scale_bytes,
        B1,
        {"the page's first scales": ("PAGE * 72 + slot % PAGE", "PAGE * 72 + slot % PAGE // 2")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS, pytest.mark.gpu, tests.on_hopper)
