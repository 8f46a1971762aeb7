"""Faults planted in the source of RoPE's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.rope import kernel
from kernels.rope import test_rope_kernel as tests

ROWS = Seen(tests.test_every_number_of_rows, T=3, inverse=True)
FAULTS = [
    Faults(
        kernel._rope_kernel,
        ROWS,
        {
            "every head reads the first": ("(row % heads)", "(row % 1)"),
            "the first dims are not copied": ("(col < NOPE)", "(col < NOPE - 1)"),
            "turns the first dims": ("col = NOPE + tl.arange", "col = tl.arange"),
            "the last row is left out": ("held = row < num_rows", "held = row < num_rows - 1"),
        },
    ),
    Faults(
        kernel.rotated,
        ROWS,
        {
            "turns back": (
                "even * cos - odd * sin, odd * cos + even",
                "even * cos + odd * sin, odd * cos - even",
            ),
            "halves instead of neighbours": (
                "tl.reshape(x, (ROWS, PAIRS, 2))",
                "tl.permute(tl.reshape(x, (ROWS, 2, PAIRS)), (0, 2, 1))",
            ),
        },
    ),
    Faults(
        kernel.load_cos_sin,
        ROWS,
        {
            "another token's turn": ("token.to(tl.int64)[:, None]", "(token.to(tl.int64) // 2)[:, None]"),
            "never backwards": ("sin = -sin", "sin = sin"),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
