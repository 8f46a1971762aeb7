"""Faults planted in the source of the gather and of what it shares with attention: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.gather_dequantise import (
    kernel,
    nvfp4_kernel,
    row_kernel,
    test_gather_dequantise,
    test_gather_nvfp4_kernel,
)
from kernels.sparse_attn import keys_kernel

TABLE = Seen(test_gather_dequantise.test_the_kernel_is_the_ref_with_a_page_table_and_with_slots, T=3)
WIDE = Seen(test_gather_dequantise.test_the_kernel_at_head_dim_512, S=33)
NVFP4 = Seen(test_gather_nvfp4_kernel.test_a_page_table_and_slots, T=3)
FAULTS = [
    Faults(
        kernel._gather_kernel,
        TABLE,
        {
            "rope at the data's start": ("(start + NOPE) // 2", "start // 2"),
            "keys of another row": ("(row * num_keys + key) * width", "(row // 2 * num_keys + key) * width"),
        },
    ),
    Faults(
        row_kernel.copy_rope,
        TABLE,
        {
            "rope of no key is not zero": (
                "mask=(slot >= 0)[:, None], other=0.0,",
                "mask=(slot >= -1)[:, None], other=0.0,",
            ),
            "rope not stored for the first keys": (
                "rope, mask=here[:, None]",
                "rope, mask=(here & (tl.arange(0, slot.shape[0]) > 0))[:, None]",
            ),
        },
    ),
    Faults(
        row_kernel.own_slots,
        WIDE,
        {"the first keys of every program": ("tl.program_id(1) * KEYS", "tl.program_id(1) * 0")},
    ),
    Faults(
        kernel._gather_kernel,
        WIDE,
        {"the last key left out": ("here = key < num_keys", "here = key < num_keys - 1")},
    ),
    Faults(
        keys_kernel.widened_nope,
        TABLE,
        {
            "the scale of the group before": (
                ", data)[:, None, None] + group\n",
                ", data)[:, None, None] + (group + 1) % groups\n",
            ),
            "no scales": ("if SCALED:", "if SCALED and NOPE > 9999:"),
            "the scale added": ("values * ue8m0_value", "values + ue8m0_value"),
        },
    ),
    Faults(
        keys_kernel.scale_offset,
        TABLE,
        {
            "the scales of the token before": (
                "held % PAGE * SCALE_BYTES",
                "(held % PAGE ^ 1) * SCALE_BYTES",
            ),
            "scales of the first token": ("+ held % PAGE * SCALE_BYTES", ""),
            "seven bytes a token": ("* SCALE_BYTES", "* 7"),
        },
    ),
    Faults(
        keys_kernel.data_offset,
        TABLE,
        {
            "pages as dense as their tokens": (
                "held // PAGE * page_stride + held % PAGE * DATA",
                "held * DATA",
            )
        },
    ),
    Faults(
        keys_kernel.key_slots,
        TABLE,
        {
            "the first sequence's pages": ("tl.load(sequence_ptr + row)", "tl.load(sequence_ptr)"),
            "another row's list": ("row * num_keys + key, mask", "row * 0 + key, mask"),
        },
    ),
    Faults(
        nvfp4_kernel.gather_nvfp4_kernel,
        NVFP4,
        {
            "the scale of another group": ("eight // 2", "eight // 4"),
            "codes of a word reversed": ("(4 * lane)", "(28 - 4 * lane)"),
            "gsa left out": (" * gsa[:, None, None]", ""),
            "records of scales without gsa": (
                "held % PAGE * (NOPE // 16 + 4)",
                "held % PAGE * (NOPE // 16)",
            ),
            "rope at another column": ("start // 2 + NOPE // 4", "start // 2 + NOPE // 2"),
            "a gain": ("values.to(tl.bfloat16)", "(values * 1.01).to(tl.bfloat16)"),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
