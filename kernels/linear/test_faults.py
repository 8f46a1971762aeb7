"""Faults planted in the source of the linears' kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.linear import finish_kernel, fp8_kernel, fp8_product_kernel, kernel, nvfp4_kernel, wide_kernel
from kernels.linear import test_fp8_kernel as fp8_tests
from kernels.linear import test_linear_kernel as tests
from kernels.linear import test_nvfp4_kernel as nvfp4_tests
from kernels.route import test_route_kernel as route_tests

BF16, F32 = tests.torch.bfloat16, tests.torch.float32
NVFP4 = Seen(tests.test_nvfp4_linear_is_the_exact_sum_within_the_bound, T=3, N=70, K=272, dtype=BF16)
PARTS = Seen(tests.test_nvfp4_linear_is_the_exact_sum_within_the_bound, T=3, N=64, K=2048, dtype=F32)
GROUPS = Seen(tests.test_groups_meet_their_own_matrix, T=1, one_scale=False)
UNPACKED = Seen(nvfp4_tests.test_every_code_meets_every_scale_exactly)
WIDE = Seen(tests.test_bf16_and_fp32_linear, T=3, N=70, K=200)
WIDE_PARTS = Seen(tests.test_bf16_and_fp32_linear, T=3, N=64, K=1024)
FP8 = Seen(
    fp8_tests.test_is_the_exact_sum_within_the_bound, T=3, N=200, K=512, bytes_=False, dtype=BF16, form="fp8"
)
FP8_BYTES = Seen(
    fp8_tests.test_is_the_exact_sum_within_the_bound, T=1, N=200, K=512, bytes_=True, dtype=BF16, form="fp8"
)
MXFP4 = Seen(fp8_tests.test_every_mxfp4_code_under_scales_of_every_size)
SCORES = Seen(route_tests.test_scores_are_the_refs_within_fp32_sums, T=3, E=13, D=67)
SCORES_OF_PARTS = Seen(route_tests.test_scores_are_the_refs_within_fp32_sums, T=3, E=48, D=2048)
ENDS = Seen(route_tests.test_scores_hold_at_the_ends)
FAULTS = [
    Faults(
        kernel._nvfp4_linear,
        NVFP4,
        {
            "gsa left out": ("acc * tl.load(gsa_ptr + x_row)[None, :] *", "acc *"),
            "the first row's gsa": ("gsa_ptr + x_row", "gsa_ptr + x_row * 0"),
            "scale_2 left out": (" * tl.load(scale_2_ptr + group * scale_2_stride)", ""),
            "the last row of the weight left out": ("inside = (n < N)", "inside = (n < N - 1)"),
            "another row": ("x_row = tl.where(t < T, t, 0)", "x_row = tl.where(t < T, t // 2, 0)"),
        },
    ),
    Faults(
        kernel._nvfp4_linear,
        PARTS,
        {
            "every part from the first column": ("part * steps,", "part * 0,"),
            "two parts in one place": ("(part * T + t[None", "(part // 2 * T + t[None"),
        },
    ),
    Faults(
        kernel._nvfp4_linear,
        GROUPS,
        {
            "the first matrix's scale_2": ("group * scale_2_stride", "group * 0"),
            "the first group's columns": ("0 if SHARED else group", "0"),
            "the first matrix": ("(group.to(tl.int64) * N)", "(group.to(tl.int64) * 0)"),
        },
    ),
    Faults(
        nvfp4_kernel.nvfp4_product,
        NVFP4,
        {
            "the last columns left out": ("tl.range(0, steps,", "tl.range(0, steps - 1,"),
            "one code of eight left out": ("acc = tl.dot(w2, tl.trans(x2), acc)", "acc = acc"),
            "a code meets its neighbour": ("tl.dot(w2, tl.trans(x2), acc)", "tl.dot(w2, tl.trans(x3), acc)"),
            "2^12 left out": ("acc * UNDO", "acc"),
            "the first step's scales": ("w_scale_at + step * GROUPS, mask", "w_scale_at, mask"),
        },
    ),
    Faults(
        nvfp4_kernel._plain,
        UNPACKED,
        {"nibbles swapped": ("(4 * CODE)", "(4 * (CODE ^ 1))")},
    ),
    Faults(
        nvfp4_kernel.unpack,
        UNPACKED,
        {
            "2^-6 left out": ("half.to(tl.float32) * 0.015625", "half.to(tl.float32)"),
            "the scale's byte read as a number": ("scales.to(tl.float8e4nv, bitcast=True).to", "scales.to"),
            "two codes swapped": (
                "_plain(words, scale, 2), _plain(words, scale, 3)",
                "_plain(words, scale, 3), _plain(words, scale, 2)",
            ),
        },
    ),
    Faults(
        finish_kernel._finish,
        PARTS,
        {
            "the last part left out": ("tl.static_range(1, PARTS)", "tl.static_range(1, PARTS - 1)"),
            "the first part twice": ("part_ptr + part * size", "part_ptr + (part - 1) * size"),
        },
    ),
    Faults(
        finish_kernel._finish,
        SCORES_OF_PARTS,
        {
            "sums for scores": ("if SCORES:", "if SCORES and size < 0:"),
            "scores of each part": (
                "total += tl.load(part_ptr + part * size + at, mask=inside, other=0.0)",
                "total = tl.load(part_ptr + part * size + at, mask=inside, other=0.0)",
            ),
        },
    ),
    Faults(
        finish_kernel.sqrt_softplus,
        SCORES,
        {
            "no root": ("tl.sqrt(tl.maximum", "(tl.maximum"),
            "a sigmoid's logarithm": (
                "root = tl.sqrt(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)",
                "root = tl.sqrt(log1p)",
            ),
        },
    ),
    Faults(
        finish_kernel.sqrt_softplus,
        ENDS,
        {
            "the exponential of the logit itself": ("tl.exp(-tl.abs(x))", "tl.exp(x)"),
        },
    ),
    Faults(
        wide_kernel._wide_linear,
        WIDE,
        {
            "the last column left out": ("< K)[None, :]", "< K - 1)[None, :]"),
            "another row": ("x_row[:, None] * x_stride", "x_row[:, None] // 2 * x_stride"),
            "the last row of the weight left out": ("(n < N)[:, None] & (t", "(n < N - 1)[:, None] & (t"),
        },
    ),
    Faults(
        wide_kernel._wide_linear,
        WIDE_PARTS,
        {
            "every part from the first column": ("first = part * steps * BK", "first = part * 0"),
            "two parts in one place": ("(part * T + t[None", "(part // 2 * T + t[None"),
        },
    ),
    Faults(
        fp8_kernel._fp8_linear,
        FP8,
        {
            "the first row for all": ("tl.where(t < T, t, 0)", "tl.where(t < T, t // 2, 0)"),
            "the second part left out": ("part * steps,", "part * 0,"),
        },
    ),
    Faults(
        fp8_product_kernel.fp8_product,
        FP8,
        {
            "the row's scale left out": (
                "(tl.load(w_scale_at + step)[:, None] * x_scale[None, :])",
                "tl.load(w_scale_at + step)[:, None]",
            ),
            "the weight's scale left out": (
                "(tl.load(w_scale_at + step)[:, None] * x_scale[None, :])",
                "x_scale[None, :]",
            ),
            "the first block's scale": ("tl.load(x_scale_at + step)", "tl.load(x_scale_at)"),
            "the first rows' square": ("row // SQUARE", "row // (2 * SQUARE)"),
            "the last block alone": ("acc += tl.dot(w, tl.trans(x)) *", "acc = tl.dot(w, tl.trans(x)) *"),
        },
    ),
    Faults(
        fp8_product_kernel.fp8_product,
        FP8_BYTES,
        {
            "the scale's byte read as a number": (
                "x_scale = fmt.ue8m0_value(x_scale)",
                "x_scale = x_scale.to(tl.float32)",
            )
        },
    ),
    Faults(
        fp8_product_kernel.fp8_product,
        MXFP4,
        {
            "the scale of another group": ("+ pair // 16", "+ pair // 32"),
            "the odd column's code is the even's": ("byte >> 4", "byte & 15"),
            "an even column's code has its low bits set": (
                "e2m1_value(byte & 15)",
                "e2m1_value(byte & 15 | 3)",
            ),
            "the scale of even columns left out": (
                "fmt.e2m1_value(byte & 15) * scale",
                "fmt.e2m1_value(byte & 15)",
            ),
        },
    ),
    Faults(
        wide_kernel._wide_linear,
        SCORES,
        {"sums for scores": ("if SCORES:", "if SCORES and T < 0:")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
