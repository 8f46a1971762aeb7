"""Faults planted in the source of mHC's kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.hc import finish_kernel, mix_kernel, streams_kernel
from kernels.hc import test_hc_kernel as tests

MIX = Seen(tests.test_mix, T=3, D=64, dtype=tests.BF16)
WIDE = Seen(tests.test_mix, T=3, D=64, dtype=tests.F32)
SEGMENTS = Seen(tests.test_mix, T=2, D=300, dtype=tests.BF16)
PRODUCTS = Seen(tests.test_products_are_three_exact_ones)
EXACT = Seen(tests.test_gates_and_sinkhorn_of_exact_logits, fault=None)
ORDER = Seen(tests.test_few_and_many_rows_have_the_same_bits, T=3)
COLLAPSE = Seen(tests.test_collapse, T=3, D=48, dtype=tests.BF16)
EXPAND = Seen(tests.test_expand, T=3, D=48, dtype=tests.BF16)
FAULTS = [
    Faults(
        mix_kernel.partial_kernel,
        SEGMENTS,
        {
            "a segment twice": ("at = split * SIZE + step", "at = split // 2 * SIZE + step"),
            "the squares of one step": (
                "square = _add_squares(x.to(tl.float32), square, BLOCK_T, BLOCK_K // 8)\n        total = part",
                "square = _add_squares(x.to(tl.float32), square * 0, BLOCK_T, BLOCK_K // 8)\n        total = part",
            ),
            "the sum of squares a column early": ("tl.store(to + 24,", "tl.store(to + 23,"),
            "another row's streams": (
                "row.to(tl.int64)[:, None] * streams_stride",
                "(row // 2).to(tl.int64)[:, None] * streams_stride",
            ),
        },
    ),
    Faults(
        mix_kernel.partial_kernel,
        ORDER,
        {
            "fours not closed": ("(step + 1) % (4 * STEPS) == 0", "(step + 1) % (2 * STEPS) == 0"),
        },
    ),
    Faults(
        mix_kernel._product,
        PRODUCTS,
        {
            "the smallest term left out": ("total = tl.dot(x, tl.trans(low), total)", "total = total"),
            "the middle term left out": ("total = tl.dot(x, tl.trans(middle), total)", "total = total"),
        },
    ),
    Faults(
        mix_kernel._product,
        WIDE,
        {
            "the streams' lower bits left out": (
                "total = tl.dot(x_middle, tl.trans(high), total)",
                "total = total",
            )
        },
    ),
    Faults(
        mix_kernel._three_terms,
        PRODUCTS,
        {"the last term is the middle one": ("_upper(rest - middle)", "_upper(middle)")},
    ),
    Faults(
        mix_kernel._add_squares,
        MIX,
        {"two of eight left out": ("total = tl.fma(x3, x3, tl.fma(x2, x2, total))", "total = total")},
    ),
    Faults(
        mix_kernel._load,
        SEGMENTS,
        {
            "the last column left out": (
                "held[:, None] & (at < K)[None, :], other=0)",
                "held[:, None] & (at < K - 1)[None, :], other=0)",
            )
        },
    ),
    Faults(
        finish_kernel.finish_kernel,
        EXACT,
        {
            "hc_eps left out of pre": ("sigmoid + hc_eps, own", "sigmoid, own"),
            "post halved": ("2.0 * sigmoid, own", "sigmoid, own"),
            "post gets hc_eps": ("2.0 * sigmoid, own", "2.0 * sigmoid + hc_eps, own"),
            "the base of the column before": ("base_ptr + column, used", "base_ptr + column // 2, used"),
        },
    ),
    Faults(
        finish_kernel.finish_kernel,
        MIX,
        {
            "one scale for all": ("tl.minimum(column // 4, 2)", "column * 0"),
            "comb under a scale of its own rows": ("tl.minimum(column // 4, 2)", "column // 4 % 3"),
            "not normalised": (
                "inverse_root(square, K, norm_eps)[:, None]",
                "inverse_root(square * 0 + K, K, norm_eps)[:, None]",
            ),
            "the base under the scale": (
                "sums * (scale[None, :] * inverse_root(square, K, norm_eps)[:, None]) + base[None, :]",
                "(sums * inverse_root(square, K, norm_eps)[:, None] + base[None, :]) * scale[None, :]",
            ),
            "the sum of a quarter of the squares": (
                "inverse_root(square, K,",
                "inverse_root(square, K // 4,",
            ),
            "pre for post": (
                "tl.store(post_ptr + at - 4, 2.0 * sigmoid, own[:, None] & (column // 4 == 1)[None, :])",
                "tl.store(post_ptr + at, 2.0 * sigmoid, own[:, None] & (column < 4)[None, :])",
            ),
        },
    ),
    Faults(
        finish_kernel._sums,
        SEGMENTS,
        {
            "the last split left out": ("(split < num_splits)", "(split < num_splits - 1)"),
            "the first split twice": (
                "split.to(tl.int64) * num_rows",
                "tl.maximum(split - 1, 0).to(tl.int64) * num_rows",
            ),
        },
    ),
    Faults(
        finish_kernel._softmax,
        EXACT,
        {
            "hc_eps left out": ("shares + hc_eps", "shares"),
            "a row over its largest pair": ("tl.sum(twos, 2)", "tl.max(twos, 2)"),
        },
    ),
    Faults(
        finish_kernel._store_comb,
        EXACT,
        {
            "one Sinkhorn pass": ("range(ITERATIONS)", "range(1)"),
            "a pass fewer": ("range(ITERATIONS)", "range(ITERATIONS - 1)"),
            "comb transposed": (
                "p01 * u0 * v1, p02 * u0 * v2, p03 * u0 * v3, own)",
                "p10 * u1 * v0, p20 * u2 * v0, p30 * u3 * v0, own)",
            ),
            "a row's weight of another": ("p21 * u2 * v1", "p21 * u1 * v1"),
        },
    ),
    Faults(
        finish_kernel._weighted,
        EXACT,
        {
            "hc_eps left out": ("hc_eps * held", "0 * held"),
            "hc_eps against the wrong side": ("hc_eps * held", "hc_eps"),
            "a term left out": ("tl.fma(d, wd, c * wc)", "c * wc"),
        },
    ),
    Faults(
        streams_kernel.collapse_kernel,
        COLLAPSE,
        {
            "the last column left out": (
                "total.to(x_ptr.dtype.element_ty), mask)",
                "total.to(x_ptr.dtype.element_ty), mask & (col < D - 1)[None, :])",
            ),
            "another row's place": (
                "x_ptr + row.to(tl.int64)[:, None] * D",
                "x_ptr + (row // 2).to(tl.int64)[:, None] * D",
            ),
        },
    ),
    Faults(
        streams_kernel.weighted_sum,
        COLLAPSE,
        {
            "the last stream left out": (
                "tl.static_range(1, NUM_STREAMS)",
                "tl.static_range(1, NUM_STREAMS - 1)",
            ),
            "one weight for all": ("row * NUM_STREAMS + j, row", "row * NUM_STREAMS, row"),
            "the first stream for all": ("at + j * D", "at"),
        },
    ),
    Faults(
        streams_kernel.expand_kernel,
        EXPAND,
        {
            "two rows of comb swapped": (
                "tl.load(comb), new)\n        new = tl.fma(x1, tl.load(comb + NUM_STREAMS), new)",
                "tl.load(comb + NUM_STREAMS), new)\n        new = tl.fma(x1, tl.load(comb), new)",
            ),
            "the first column of comb for all": (
                "(NUM_STREAMS * NUM_STREAMS) + k",
                "(NUM_STREAMS * NUM_STREAMS)",
            ),
            "one post for all": ("post_ptr + wide * NUM_STREAMS + k", "post_ptr + wide * NUM_STREAMS"),
            "y left out": ("new = y * tl.load", "new = 0 * y * tl.load"),
            "a stream left out": ("new = tl.fma(x3, tl.load(comb + 3 * NUM_STREAMS), new)", "new = new"),
            "another row's comb": ("comb_ptr + wide *", "comb_ptr + wide // 2 *"),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
