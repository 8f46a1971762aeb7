"""Faults planted in the source of B3's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.kv_norm_rope_store import kernel
from kernels.kv_norm_rope_store import test_kv_norm_rope_store_kernel as tests

BYTES = Seen(tests.test_has_the_bytes_of_three_kernels, T=3, width=256, dtype=tests.F32, between=tests.F32)
STORED = Seen(tests.test_has_the_bytes_of_three_kernels, T=3, width=256, dtype=tests.F32, between=tests.BF16)
PADDED = Seen(tests.test_padding_strides_and_rows_alone)
SPECIAL = Seen(tests.test_special_rows_are_their_own)
FAULTS = [
    Faults(
        kernel._kv_norm_rope_store_kernel,
        BYTES,
        {
            "another token's turn": (
                "load_cos_sin(cos_ptr, sin_ptr, row, held",
                "load_cos_sin(cos_ptr, sin_ptr, row // 2, held",
            ),
            "turned back": ("held, 32, False)", "held, 32, True)"),
            "rope without its weight": (" * tl.load(weight_ptr + tail).to(tl.float32)[None, :]", ""),
            "nope without its weight": ("kv * weight[None, :] * inverse", "kv * inverse"),
            "rope not normalised": ("[None, :] * inverse, BETWEEN)\n    cos", "[None, :], BETWEEN)\n    cos"),
            "the norm of nope alone": (
                "inverse_rms(kv, NOPE + 64,",
                "inverse_rms(tl.where((col < NOPE)[None, :], kv, 0.0), NOPE,",
            ),
            "the mean over a power of two": ("inverse_rms(kv, NOPE + 64,", "inverse_rms(kv, 2 * COLS,"),
            "rope not turned": ("rope = stored(rotated(rope, cos, sin, ROWS, 32), BETWEEN)", "rope = rope"),
            "every row is the first": (
                "row.to(tl.int64)[:, None] * kv_stride",
                "row.to(tl.int64)[:, None] // 2 * kv_stride",
            ),
        },
    ),
    Faults(
        kernel._kv_norm_rope_store_kernel,
        STORED,
        {
            "the norm's store left out": (
                "nope = stored(kv * weight[None, :] * inverse, BETWEEN)",
                "nope = kv * weight[None, :] * inverse",
            ),
            "the store before the turn left out": (
                "* inverse, BETWEEN)\n    cos",
                "* inverse, tl.float32)\n    cos",
            ),
        },
    ),
    Faults(
        kernel._kv_norm_rope_store_kernel,
        PADDED,
        {
            "a row without a slot goes to slot 0": (
                "        slot,\n        held,",
                "        tl.maximum(slot, 0),\n        held | (slot < 0),",
            )
        },
    ),
    Faults(
        kernel._kv_norm_rope_store_kernel,
        SPECIAL,
        {"eps left out": ("NOPE + 64, eps, ROWS", "NOPE + 64, 0.0, ROWS")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
