"""Faults planted in the source of the scores' kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.index_logits import fp4_kernel, fp8_kernel, paged_kernel
from kernels.index_logits import test_index_logits_fp4_kernel as fp4_tests
from kernels.index_logits import test_index_logits_kernel as tests

PREFILL = Seen(tests.test_prefill_equals_the_ref, T=2, C=129, H=5, decades=0.0)
LIMITS = Seen(tests.test_a_row_stops_at_its_limit, fill=True)
OPEN = Seen(tests.test_a_row_stops_at_its_limit, fill=False)
PAGED = Seen(tests.test_paged_equals_prefill, page_size=64, fill=True)
SMALL = Seen(tests.test_paged_equals_prefill, page_size=4, fill=False)
WALK = Seen(tests.test_a_program_walks_many_tiles)
NAN = Seen(tests.test_nan_stays_with_its_key_and_its_row)
FP4 = Seen(fp4_tests.test_equals_the_ref, N=3, C=129, H=5, decades=0.0)
FP4_PAGES = Seen(fp4_tests.test_limits_and_pages, page_size=64, fill=True)
FP4_LOST = Seen(fp4_tests.test_a_lost_key_is_nan_alone)
FAULTS = [
    Faults(
        fp8_kernel.prefill_kernel,
        PREFILL,
        {
            "the keys' scale left out": ("tl.trans(q)), weights) * scale", "tl.trans(q)), weights)"),
            "the scale inside the ReLU's sum twice": ("weights) * scale", "weights) * scale * scale"),
            "the scale of the key before": ("key_scale_ptr + entries", "key_scale_ptr + (entries ^ 1)"),
            "the first row's weights": ("weight_ptr + row * H", "weight_ptr + first_row * H"),
            "the first row's query": ("q_ptr + row * (H * D)", "q_ptr + first_row * (H * D)"),
            "the last row of a block left out": (
                "range(stop - first):\n            row",
                "range(stop - first - 1):\n            row",
            ),
        },
    ),
    Faults(
        fp8_kernel.prefill_kernel,
        LIMITS,
        {
            "a limit one too far": (
                "limit = tl.minimum(tl.load(limit_ptr + row), C)",
                "limit = tl.minimum(tl.load(limit_ptr + row) + 1, C)",
            ),
            "the first row's limit": ("limit_ptr + row), C)", "limit_ptr + first_row), C)"),
            "a tile that no row sees is left": ("    elif FILL:", "    elif FILL and T < 0:"),
        },
    ),
    Faults(
        fp8_kernel.load_query,
        PREFILL,
        {
            "the first head for all": (
                "heads[:, None] * D + dims[None, :]",
                "heads[:, None] * 0 + dims[None, :]",
            ),
            "the last head left out": ("(heads < H)", "(heads < H - 1)"),
        },
    ),
    Faults(
        paged_kernel.load_weights,
        PREFILL,
        {
            "the weight of the head before": (
                "tl.load(ptr + heads, heads < H, other=0.0)",
                "tl.load(ptr + heads // 2, heads < H, other=0.0)",
            )
        },
    ),
    Faults(
        paged_kernel.weighted_relu,
        PREFILL,
        {
            "no ReLU": ("tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)", "dots"),
            "ReLU after the weights": (
                "tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]",
                "tl.maximum(dots * weights[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)",
            ),
            "the largest head": (
                "weights[None, :], 1)",
                "weights[None, :], 1) * 0 + tl.max(dots * weights[None, :], 1)",
            ),
        },
    ),
    Faults(
        paged_kernel.weighted_relu,
        NAN,
        {"the ReLU hides a NaN": (", propagate_nan=tl.PropagateNan.ALL)", ")")},
    ),
    Faults(
        paged_kernel.store_scores,
        LIMITS,
        {"an entry too many": ("entries < limit, scores, float", "entries <= limit, scores, float")},
    ),
    Faults(
        paged_kernel.store_scores,
        OPEN,
        {"hidden entries written": ("scores, entries < limit)", "scores, entries < C)")},
    ),
    Faults(
        fp8_kernel.paged_kernel,
        PAGED,
        {
            "the keys' scale left out": ("weights) * scale", "weights) * 1.0"),
            "the first sequence's pages": (
                "table_ptr += sequence * table_stride",
                "table_ptr += sequence * 0",
            ),
            "the first query of a sequence": (
                "row = sequence * N + tl.program_id(0)",
                "row = sequence * N + tl.program_id(0) * 0",
            ),
            "tiles behind the limit left": (
                "tl.maximum(first, seen), first + tiles",
                "first + tiles, first + tiles",
            ),
        },
    ),
    Faults(
        fp8_kernel.paged_kernel,
        WALK,
        {
            "the scales of the tile before": ("scale = next_scale", "scale = scale"),
            "one page for all tiles": (
                "pages = page_ids(table_ptr, tile + 1, limit",
                "pages = page_ids(table_ptr, first, limit",
            ),
            "the last tile left out": ("range(first, seen)", "range(first, seen - 1)"),
        },
    ),
    Faults(
        fp8_kernel._page_keys,
        SMALL,
        {"a page's first key": ("(entries % PAGE) * D", "(entries % PAGE) // 2 * D")},
    ),
    Faults(
        fp8_kernel._page_scales,
        SMALL,
        {
            "scales as if keys had 132 bytes": (
                "(PAGE * D // 4) + entries % PAGE",
                "(entries % PAGE) * (D // 4)",
            ),
            "the page's first scale": ("+ entries % PAGE\n", "+ entries % PAGE // 2\n"),
        },
    ),
    Faults(
        paged_kernel.page_ids,
        SMALL,
        {
            "the tile's first page for all": (
                "entries += tl.arange(0, BLOCK_N)",
                "entries += tl.arange(0, BLOCK_N) // BLOCK_N",
            )
        },
    ),
    Faults(
        paged_kernel.scored_tiles,
        PAGED,
        {"the last tile left out": ("tl.cdiv(limit, BLOCK_N)", "limit // BLOCK_N")},
    ),
    Faults(
        paged_kernel.hide_tiles,
        PAGED,
        {"hidden entries are 0": ('float("-inf")', "0.0")},
    ),
    Faults(
        fp4_kernel.folded_kernel,
        FP4,
        {
            "a group left out": (
                "dots += _group_dots(page_ptr, at, at_scale, there, q2, 2, BLOCK_N)",
                "dots += 0.0",
            ),
            "a group of another's keys": ("there, q3, 3, BLOCK_N)", "there, q3, 2, BLOCK_N)"),
            "2^6 left out": ("weights) * 64.0", "weights)"),
            "the first query of a sequence": (
                "row = sequence * N + tl.program_id(0)",
                "row = sequence * N + tl.program_id(0) * 0",
            ),
        },
    ),
    Faults(
        fp4_kernel.folded_kernel,
        FP4_PAGES,
        {
            "tiles behind the limit left": (
                "tl.maximum(first, seen), first + tiles",
                "first + tiles, first + tiles",
            ),
            "the first sequence's weights": ("weight_ptr + row * H", "weight_ptr + row // 2 * H"),
        },
    ),
    Faults(
        fp4_kernel._group_dots,
        FP4,
        {
            "the other nibble first": ("tl.join(low, high)", "tl.join(high, low)"),
            "no sign": ("((packed & 7) << 2) | ((packed & 8) << 4)", "(packed & 7) << 2"),
            "the mantissa a bit up": ("((packed & 0x70) >> 2)", "((packed & 0x70) >> 1)"),
            "the scale left out": (" * scale[:, None]", ""),
            "the first group's scale": ("at_scale + group, there", "at_scale, there"),
        },
    ),
    Faults(
        fp4_kernel._group_dots,
        FP4_LOST,
        {
            "a lost key is a number": (
                "fmt.ue8m0_value(tl.load(page_ptr + at_scale + group, there, other=0))",
                "tl.exp2(tl.load(page_ptr + at_scale + group, there, other=0).to(tl.float32) - 191.0)",
            ),
        },
    ),
    Faults(
        fp4_kernel._places,
        FP4_PAGES,
        {
            "pages as dense as their entries": ("inside * (D // 2), start", "inside * (D // 2 - 1), start"),
            "scales of the first entry": ("inside * (D // 32)", "inside // 2 * (D // 32)"),
        },
    ),
    Faults(
        fp4_kernel._load_group,
        FP4,
        {"the first group for all": ("+ group * 32 +", "+ 0 * 32 +")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
