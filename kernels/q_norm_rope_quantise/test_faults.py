"""Faults planted in the source of q's kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.q_norm_rope_quantise import kernel
from kernels.q_norm_rope_quantise import test_q_norm_rope_quantise_kernel as tests

BF16 = Seen(tests.test_bf16_is_the_norm_and_the_turn, T=3, H=5, K=256)
ONE = Seen(tests.test_the_record_is_the_ref_s_of_the_unfused_values, T=3, H=5, K=256, residual=False)
TWO = Seen(tests.test_the_record_is_the_ref_s_of_the_unfused_values, T=3, H=5, K=256, residual=True)
SPECIAL = Seen(tests.test_special_heads_are_their_own)
FAULTS = [
    Faults(
        kernel._norm_rope_kernel,
        BF16,
        {
            "nope and rope meet late": ("(col < NOPE))", "(col < NOPE - 1))"),
            "rope two columns early": ("at + NOPE + tl.arange", "at + NOPE - 2 + tl.arange"),
            "rope under a gain of 1.01": ("rope.to(tl.bfloat16)", "(rope * 1.01).to(tl.bfloat16)"),
        },
    ),
    Faults(
        kernel._load,
        BF16,
        {
            "another token's turn": ("sin_ptr, token, held, 32", "sin_ptr, row * 0, held, 32"),
            "turned back": ("32, False)", "32, True)"),
            "the norm of nope alone": (
                "inverse_rms(q, NOPE + 64,",
                "inverse_rms(tl.where(col < NOPE, q, 0.0), NOPE,",
            ),
            "rope not normalised": ("rotated(rope * inverse,", "rotated(rope,"),
            "rope turned before its norm, and stored": (
                "rotated(rope * inverse,",
                "rotated(stored(rope * inverse, tl.bfloat16),",
            ),
            "every head is the first": ("(row % heads)", "(row % 1)"),
        },
    ),
    Faults(
        kernel._norm_rope_quantise_kernel,
        ONE,
        {
            "a scale twice as large": ("fmt.AMAX_FLOOR), 448.0)", "fmt.AMAX_FLOOR), 448.0) * 2.0"),
            "rope unscaled": ("bf16_bits(rope * inverse)", "bf16_bits(rope)"),
            "multiplied by the scale": ("scaled = nope * inverse", "scaled = nope * scale[:, None]"),
            "one head's scale for two": (
                "tl.store(scale_ptr + row, scale, held)",
                "tl.store(scale_ptr + row // 2 * 2, scale, held)",
            ),
            "codes two columns late": ("tl.store(at + col, byte, own)", "tl.store(at + 2 + col, byte, own)"),
        },
    ),
    Faults(
        kernel._norm_rope_quantise_kernel,
        TWO,
        {
            "the second term is the first": (
                "fmt.e4m3(scaled - fmt.e4m3_value(byte.to(tl.int32)))",
                "fmt.e4m3(scaled)",
            ),
            "the second term's sign": (
                "scaled - fmt.e4m3_value(byte.to(tl.int32))",
                "fmt.e4m3_value(byte.to(tl.int32)) - scaled",
            ),
            "the second term of another head": (
                "row.to(tl.int64)[:, None] * NOPE + col, rest",
                "(row.to(tl.int64) // 2)[:, None] * NOPE + col, rest",
            ),
        },
    ),
    Faults(
        kernel._norm_rope_quantise_kernel,
        SPECIAL,
        {
            "no floor": ("fmt.floored(fmt.abs_max(nope, 1), fmt.AMAX_FLOOR)", "fmt.abs_max(nope, 1)"),
            "the largest of nope and rope": (
                "fmt.abs_max(nope, 1)",
                "tl.maximum(fmt.abs_max(nope, 1), fmt.abs_max(rope, 1))",
            ),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
