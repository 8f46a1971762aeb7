"""Faults planted in the source of the page tables' kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.page_slots import kernel, test_page_slots
from kernels.page_slots.test_page_slots import torch

ROWS = Seen(test_page_slots.test_row_slots_equal_the_ref, T=129, dtype=torch.int64)
WINDOW = Seen(test_page_slots.test_key_slots_equal_the_ref, T=3, kind="window")
CSA = Seen(test_page_slots.test_key_slots_equal_the_ref, T=3, kind="csa")
HCA = Seen(test_page_slots.test_key_slots_equal_the_ref, T=3, kind="hca")
WIDE = Seen(test_page_slots.test_a_list_wider_than_a_program)
FAULTS = [
    Faults(
        kernel._row_slots_kernel,
        ROWS,
        {
            "every row is of the first sequence": (
                "tl.load(sequence_ptr + at, at < T, other=0)",
                "tl.load(sequence_ptr + at * 0, at < T, other=0)",
            ),
            "the last row not stored": ("PAGE), at < T)", "PAGE), at < T - 1)"),
        },
    ),
    Faults(
        kernel.paged_slot,
        ROWS,
        {
            "the page number for the page": ("page * PAGE + row % PAGE", "row // PAGE * PAGE + row % PAGE"),
            "row 0 is none": ("held = row >= 0", "held = row > 0"),
            "the first slot of a page": ("page * PAGE + row % PAGE", "page * PAGE"),
            "none is slot 0": ("row % PAGE, -1)", "row % PAGE, 0)"),
        },
    ),
    Faults(
        kernel._key_slots_kernel,
        WINDOW,
        {
            "a window one short": (
                "column < window, position - window + 1 + column",
                "column < window - 1, position - window + 1 + column",
            ),
            "a window one late": ("position - window + 1 + column", "position - window + column"),
            "every token at the first one's position": (
                "tl.load(position_ptr + token)",
                "tl.load(position_ptr)",
            ),
            "another sequence's pages": ("tl.load(sequence_ptr + token)", "tl.load(sequence_ptr)"),
        },
    ),
    Faults(
        kernel._key_slots_kernel,
        CSA,
        {
            "another token's choice": ("chosen_ptr + token * chosen_stride", "chosen_ptr + token * 0"),
            "absolute instead of chosen entries": (
                "entry = tl.load(chosen_ptr",
                "seen = seen & (entry > 99)\n            entry = tl.load(chosen_ptr",
            ),
            "entries in the window's pages": (
                "paged_slot(entry_ptr + sequence * entry_stride, entry",
                "paged_slot(window_ptr + sequence * window_stride, entry % 8",
            ),
        },
    ),
    Faults(
        kernel._key_slots_kernel,
        HCA,
        {
            "an entry of an open window": (
                "entry < (position + 1) // ratio",
                "entry <= (position + 1) // ratio",
            ),
            "an entry one token late": ("(position + 1) // ratio", "position // ratio"),
        },
    ),
    Faults(
        kernel._key_slots_kernel,
        WIDE,
        {"a column between programs": ("tl.program_id(1) * BLOCK", "tl.program_id(1) * (BLOCK + 1)")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
