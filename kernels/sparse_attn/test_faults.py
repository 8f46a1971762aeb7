"""Faults planted in the source of the portable attention kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.sparse_attn import bf16_kernel, combine_kernel, fp8_kernel, keys_kernel, test_combine_kernel
from kernels.sparse_attn import test_sparse_attn_kernel as tests


def within(path, splits=1, heads=3):
    """The test of the bound: two tiles of keys, in splits on demand."""
    shape = {"T": 1, "S": 127, "nope": 192} if splits > 1 else {"T": 3, "S": 70, "nope": 192}
    return Seen(
        tests.test_within_the_bound_of_its_roundings, path=path, H=heads, splits=splits, table=True, **shape
    )


B0, B1A, B1, B1_Q2, ALIGNED, ROPE_FP8, PV_FP8 = (
    within(path) for path in ("b0", "b1a", "b1", "b1_q2", "b1_aligned_q2", "b1_rope_fp8", "b1_pv_fp8")
)
SPLIT = within("b0", splits=2)
HEADS = Seen(
    tests.test_within_the_bound_of_its_roundings, path="b0", T=2, H=70, S=20, nope=192, splits=1, table=False
)
HIDDEN = Seen(tests.test_tiles_without_a_key_before_those_with_some, path="b0", splits=1)
AFTER = Seen(tests.test_tiles_without_a_key_after_those_with_some, path="b0")
RISING = Seen(tests.test_scores_that_rise_from_tile_to_tile, path="b0")
SMALL_P = Seen(tests.test_many_small_probabilities_are_kept)
SINK = Seen(tests.test_the_sink_joins_once_however_keys_are_split, path="b0", splits=1)
SINK_OF_SPLITS = Seen(tests.test_the_sink_joins_once_however_keys_are_split, path="b0", splits=2)
NO_KEYS = Seen(tests.test_no_rows_and_no_keys, path="b0", T=2, S=0)
FAULTS = [
    Faults(
        bf16_kernel.attend_bf16_kernel,
        RISING,
        {
            "the sum not rescaled": ("total * shrink + tl.sum", "total + tl.sum"),
            "the values not rescaled": ("weighted * shrink[:, None])", "weighted)"),
            "the maximum not kept": ("peak = highest", "peak = peak"),
        },
    ),
    Faults(
        bf16_kernel.attend_bf16_kernel,
        B0,
        {
            "no key counts as logit 0": ('scores, float("-inf"))', "scores, 0.0)"),
            "the scale twice": ("(scale * LOG2E)", "(scale * LOG2E * LOG2E)"),
            "natural exponents": ("(scale * LOG2E)", "scale"),
            "one head for all": ("q_stride + head[:, None] * width", "q_stride + head[:, None] * 0"),
            "the first row's query": ("q_ptr + row * q_stride", "q_ptr + row // 2 * q_stride"),
            "rope left out of the scores": (
                "tl.dot(q, tl.trans(k)) *",
                "tl.dot(tl.where(column[None, :] < NOPE, q, 0.0).to(tl.bfloat16), tl.trans(k)) *",
            ),
            "the denominator twice": (
                "(weighted * inverse[:, None])",
                "(weighted * inverse[:, None] * inverse[:, None])",
            ),
        },
    ),
    Faults(
        keys_kernel.widened,
        B1A,
        {
            "rope from the data's start": ("(start + NOPE) // 2 + column", "start // 2 + column"),
            "rope left out": ("group < groups, values, rope", "group < groups, values, rope * 0"),
        },
    ),
    Faults(
        keys_kernel.own_keys,
        B0,
        {
            "the last tile left out": (
                "tiles // splits * BLOCK_S, num_keys)",
                "tiles // splits * BLOCK_S - BLOCK_S, num_keys)",
            )
        },
    ),
    Faults(
        keys_kernel.own_keys,
        SPLIT,
        {
            "every split from the first key": (
                "first = split * tiles // splits * BLOCK_S",
                "first = 0 * split",
            )
        },
    ),
    Faults(
        keys_kernel.own_rows,
        HEADS,
        {"the first tile of heads twice": ("tl.program_id(0) % head_tiles * BLOCK_H", "0 * BLOCK_H")},
    ),
    Faults(
        keys_kernel.own_rows,
        SPLIT,
        {"the parts in one place": ("(tl.program_id(1) * rows + row)", "(0 * rows + row)")},
    ),
    Faults(
        keys_kernel.running,
        HIDDEN,
        {
            "a tile without keys has no number": (
                'tl.where(highest == float("-inf"), 0.0, highest)',
                "highest",
            )
        },
    ),
    Faults(
        keys_kernel.running,
        AFTER,
        {
            "a tile's own maximum": (
                "tl.maximum(peak, tl.ceil(tl.max(scores, 1)))",
                "tl.ceil(tl.max(scores, 1))",
            )
        },
    ),
    Faults(
        keys_kernel.finish_row,
        SINK,
        {
            "the sink left out": ("tl.where(partial, 0.0, tl.exp2(sink - against))", "0.0"),
            "the sink to base 2": ("other=0.0) * LOG2E", "other=0.0)"),
            "the sink not against the maximum": ("tl.exp2(sink - against)", "tl.exp2(sink)"),
            "one sink for all heads": ("sinks_ptr + head,", "sinks_ptr + head * 0,"),
            "the sink in the LSE": ("log2_sum(peak, total)", "log2_sum(peak, denominator)"),
            "the LSE to base 2": ("tl.where(partial, 1.0, LN2)", "1.0"),
        },
    ),
    Faults(
        keys_kernel.finish_row,
        SPLIT,
        {
            "parts not normalised": (
                "1.0, tl.float32), denominator)",
                "1.0, tl.float32), 1.0 + 0.0 * total)",
            ),
            "the sink in every part": (
                "tl.where(partial, 0.0, tl.exp2(sink - against))",
                "tl.exp2(sink - against)",
            ),
            "a part's LSE natural": ("tl.where(partial, 1.0, LN2)", "LN2"),
        },
    ),
    Faults(
        keys_kernel.log2_sum,
        B0,
        {
            "the maximum left out of the LSE": ("peak + tl.log2(total)", "tl.log2(total)"),
            "a row without keys has a finite LSE": (
                'tl.where(total == 0, float("-inf"), peak',
                "tl.where(total == 0, -1e30, peak",
            ),
        },
    ),
    Faults(
        combine_kernel._add,
        SPLIT,
        {
            "parts weigh alike": ("factor = tl.exp2(lse - peak)", "factor = tl.where(held, 1.0, 0.0)"),
            "the last part left out": ("tl.static_range(COUNT)", "tl.static_range(COUNT - 1)"),
            "the first part twice": ("(part * row_heads + at) * K", "(part * 0 + at) * K"),
        },
    ),
    Faults(
        combine_kernel._combine_kernel,
        SPLIT,
        {
            "not normalised": ("(weighted * inverse).to", "weighted.to"),
            "the LSE to base 2": ("(peak + tl.log2(total)) * LN2", "(peak + tl.log2(total))"),
        },
    ),
    Faults(
        combine_kernel._combine_kernel,
        Seen(test_combine_kernel.test_every_part_joins_once, parts=combine_kernel.AT_ONCE + 1),
        {"one turn of parts alone": ("tl.range(0, num_parts, AT_ONCE)", "tl.range(0, 1, AT_ONCE)")},
    ),
    Faults(
        combine_kernel._combine_kernel,
        SINK_OF_SPLITS,
        {
            "the sink left out": ("total + tl.exp2(sink - peak)", "total"),
            "the sink once a split": ("tl.exp2(sink - peak)", "num_parts * tl.exp2(sink - peak)"),
            "one sink for all heads": ("at % heads", "at % 1"),
        },
    ),
    Faults(
        fp8_kernel.attend_fp8_kernel,
        B1,
        {
            "the sum not rescaled": ("total * shrink + tl.sum", "total + tl.sum"),
            "the values not rescaled": ("values, weighted * shrink[:, None])", "values, weighted)"),
            "the query's scale left out": (
                "scores * (q_unit * (scale * LOG2E))[:, None]",
                "scores * (scale * LOG2E)",
            ),
            "no key counts as logit 0": ('scores, float("-inf"))', "scores, 0.0)"),
            "the maximum not kept": ("peak = highest", "peak = peak"),
            "values without their scales": (
                "PAGE, NOPE, not aligned, not PV_FP8)",
                "PAGE, NOPE, aligned, not PV_FP8)",
            ),
        },
    ),
    Faults(
        fp8_kernel.attend_fp8_kernel,
        ALIGNED,
        {
            "the token's scale left out of the scores": (
                "scores = scores * k_unit[None, :]",
                "scores = scores",
            ),
            "the token's scale left out of the values": ("(p * k_unit[None, :])", "p"),
            "the first token's scale": ("token_scale_ptr + slot", "token_scale_ptr + slot // 16 * 16"),
        },
    ),
    Faults(
        fp8_kernel.attend_fp8_kernel,
        PV_FP8,
        {
            "p of rope through FP8 too": ("(p_rope * k_unit[None, :])", "(p * k_unit[None, :] + 0.0)"),
            "rope's values not rescaled": ("turned * shrink[:, None])", "turned)"),
            "p undone by 2^-7": ("* 0.00390625", "* 0.0078125"),
        },
    ),
    Faults(
        fp8_kernel.attend_fp8_kernel,
        SMALL_P,
        {
            "p in FP8 without its 256": (
                "e4m3(p * 256.0).to(tl.float32) * 0.00390625",
                "e4m3(p).to(tl.float32)",
            )
        },
    ),
    Faults(
        fp8_kernel.nope_dots,
        B1,
        {
            "the keys' scales left out": (
                "scores += tl.dot(q, k) * ue8m0_value(byte)[None, :]",
                "scores += tl.dot(q, k)",
            ),
            "the first group's scale for all": (
                "pages_ptr + scales + group, mask",
                "pages_ptr + scales, mask",
            ),
            "the last group left out": (
                "tl.static_range(NOPE // GROUP)",
                "tl.static_range(NOPE // GROUP - 1)",
            ),
            "the first group's query": (
                "q_ptr + q_start + at, mask",
                "q_ptr + q_start + column[None, :], mask",
            ),
        },
    ),
    Faults(
        fp8_kernel.nope_dots,
        B1_Q2,
        {
            "the second term left out": (
                "scores += tl.dot(low, k) * ue8m0_value(byte)[None, :]",
                "scores += 0.0",
            ),
            "the second term's sign": ("scores += tl.dot(low, k)", "scores -= tl.dot(low, k)"),
            "the second term unscaled": ("tl.dot(low, k) * ue8m0_value(byte)[None, :]", "tl.dot(low, k)"),
        },
    ),
    Faults(
        fp8_kernel.nope_dots,
        ALIGNED,
        {
            "the second term left out": ("scores = tl.dot(low, k, scores)", "scores = scores"),
            "a group's sum forgotten": ("scores = tl.dot(q, k, scores)", "scores = tl.dot(q, k)"),
        },
    ),
    Faults(
        fp8_kernel.rope_dots,
        B1,
        {
            "rope left out": (
                "return tl.dot(q_rope, tl.trans(k_rope))",
                "return tl.dot(q_rope, tl.trans(k_rope)) * 0.0",
            )
        },
    ),
    Faults(
        fp8_kernel.rope_dots,
        ROPE_FP8,
        {
            "the scales not undone": ("tl.dot(q8, tl.trans(k8)) * ratio", "tl.dot(q8, tl.trans(k8))"),
            "the keys' scale not undone": (" * tl.div_rn(k_scale, k_unit)[None, :]", ""),
        },
    ),
    Faults(
        fp8_kernel.rope_fp8,
        ROPE_FP8,
        {"half of the range": ("AMAX_FLOOR), 448.0)", "AMAX_FLOOR), 448.0) * 0.125")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
