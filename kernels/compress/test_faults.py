"""Faults planted in the source of the compressor's kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.compress import kernel, pool_kernel, step_kernel
from kernels.compress import test_compress_kernel as tests
from kernels.compress import test_step_kernel as step_tests

CSA = Seen(tests.test_equals_the_ref, ratio=4, overlap=True, count=3, D=100, spread=20.0)
ODD = Seen(tests.test_equals_the_ref, ratio=3, overlap=False, count=5, D=17, spread=0.1)
LARGE = Seen(tests.test_gates_far_from_zero, shift=200.0)
STEP = Seen(step_tests.test_closed_windows_have_the_bits_of_whole_ones, ratio=4, overlap=True, D=96)
FAULTS = [
    Faults(
        kernel._compress_kernel,
        CSA,
        {
            "no position bias": ('other=float("-inf")) + bias', 'other=float("-inf"))'),
            "the bias of the token after": ("(slot % RATIO)[:, None]", "((slot + 1) % RATIO)[:, None]"),
            "windows a token late": ("entry * RATIO + slot", "entry * RATIO + tl.maximum(slot, 1)"),
            "the first window twice": ("(entry * RATIO + slot)", "(entry // 2 * RATIO + slot)"),
            "the last channel left out": ("channel < D)", "channel < D - 1)"),
        },
    ),
    Faults(
        kernel._compress_kernel,
        ODD,
        {"a slot that is not there counts": ('other=float("-inf"))', "other=0.0)")},
    ),
    Faults(
        pool_kernel.window_columns,
        CSA,
        {
            "the window before left out": ("slot < (2 * RATIO if OVERLAP else RATIO)", "slot >= RATIO"),
            "one series for both windows": (
                "(slot >= RATIO).to(tl.int32)[:, None] * D",
                "(slot >= RATIO).to(tl.int32)[:, None] * 0",
            ),
            "the series swapped": ("(slot >= RATIO).to", "(slot < RATIO).to"),
        },
    ),
    Faults(
        pool_kernel.pooled,
        CSA,
        {
            "not normalised": ("tl.div_rn(tl.sum(power * kv, 0), tl.sum(power, 0))", "tl.sum(power * kv, 0)"),
            "a mean": (
                "tl.sum(power * kv, 0), tl.sum(power, 0)",
                "tl.sum(kv, 0), tl.sum(power * 0 + 1.0, 0)",
            ),
            "powers of two": ("tl.exp(", "tl.exp2("),
        },
    ),
    Faults(
        pool_kernel.pooled,
        LARGE,
        {"the gate's maximum not taken off": ("tl.exp(gate - tl.max(gate, 0)[None, :])", "tl.exp(gate)")},
    ),
    Faults(
        step_kernel._compress_step_kernel,
        STEP,
        {
            "the new token not pooled": (
                "kv = tl.where(new, tl.load(kv_ptr + row",
                "kv = tl.where(new & (slot[:, None] < 0), tl.load(kv_ptr + row",
            ),
            "the new token in the window before": (
                "slot == BEFORE + position - start",
                "slot == position - start",
            ),
            "the ring a token late": (
                "place = (row * SIZE + position % SIZE)",
                "place = (row * SIZE + (position + 1) % SIZE)",
            ),
            "the gate stored for kv": (
                "tl.load(gate_ptr + row * gate_stride + some, channel < D),",
                "tl.load(kv_ptr + row * kv_stride + some, channel < D),",
            ),
            "the bias of the token after": (
                "(slot % RATIO)[:, None] * width + column",
                "((slot + 1) % RATIO)[:, None] * width + column",
            ),
            "an open window is an entry": ("(position + 1) % RATIO == 0", "(position + 1) % RATIO <= 1"),
            "the entry's first token one late": (
                "tl.store(start_ptr + row, start)",
                "tl.store(start_ptr + row, start + 1)",
            ),
            "another sequence's ring": ("at = (row * SIZE", "at = (row * 0"),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
