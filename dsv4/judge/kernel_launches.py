"""Whether the kernels that a plan names ran: launches of one decode step, counted and expected.

A dump of a variant on kernels holds its launches, counted where they were made. Here is, from the plan alone, what
they must be: a path that fell back to another, or one that a rung should have left, shows as a wrong number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsv4.judge.launches import Sizes


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Launches of some kernels in one decode step.

    Attributes
    ----------
    kernels : ``op.function``, as dumps count them; their sum is meant.
    least, most : how many.
    tap : what they write, to say where.
    """

    kernels: tuple[str, ...]
    least: int
    most: int
    tap: str


MHC_FUSED = "mhc_rmsnorm_quantise_nvfp4._mhc_rmsnorm_quantise_kernel"
NORM_FUSED = "rmsnorm_quantise_nvfp4._rmsnorm_quantise_kernel"
QUANTISE = "nvfp4_quantise._nvfp4_quantise_kernel"
QUANTISE_FP8 = "fp8_quantise._fp8_quantise_kernel"  # inputs of matrices in FP8 and MXFP4
QUANTISE_LONG = "nvfp4_quantise._nvfp4_quantise_long_kernel"  # attention's output of more than 64 heads
Q_BF16, Q_FP8 = (
    f"q_norm_rope_quantise.{name}" for name in ("_norm_rope_kernel", "_norm_rope_quantise_kernel")
)
KV_FUSED = "kv_norm_rope_store._kv_norm_rope_store_kernel"
KV_STORE = {"fp8": "kv_store._kv_store_kernel", "nvfp4": "kv_store.kv_store_nvfp4_kernel"}
GATHER = {"fp8": "gather_dequantise._gather_kernel", "nvfp4": "gather_dequantise.gather_nvfp4_kernel"}
BF16_ATTENTION = ("sparse_attn.attend_bf16_kernel", "sparse_attn.attend_gathered_hopper_kernel")
Q_AND_ATTENTION = "sparse_attn.attend_product_hopper_kernel"  # many heads at once on Hopper
FP8_ATTENTION = ("sparse_attn.attend_fp8_kernel", "sparse_attn.attend_hopper_kernel", Q_AND_ATTENTION)
FP8_SCORES = ("index_logits.paged_kernel",)
FP4_SCORES = ("index_logits.folded_kernel", "index_logits.native_kernel")
EXPERTS = tuple(
    f"grouped_ffn.{name}"
    for name in ("_grouped_product", "_grouped_fp8_product", "_grouped_hopper_kernel", "_swiglu_down_kernel")
)
PROJECTIONS = 2  # quantised inputs of a layer that no norm makes: o_a's and o_b's


def expected(plan: Mapping[str, str], sizes: Sizes, requantised: int = 0) -> Iterator[Expected]:
    """Launches of one decode step under a flattened plan, sequences of a batch together.

    ``requantised``: inputs whose second reader asks for another format than the first, each quantised once more.
    Under one gsa a launch torch makes them, in no launch of ours.
    """
    layers = len(sizes.compress_ratios)
    csa = sum(ratio == 4 for ratio in sizes.compress_ratios)
    compressed = sum(ratio > 0 for ratio in sizes.compress_ratios)

    def of(tap: str, count: int, *kernels: str, more: int = 0) -> Expected:
        return Expected(kernels=kernels, least=count, most=count + more, tap=tap)

    mhc, q_a = plan["mhc_quant"] == "fused", plan["q_a_norm"] == "fused"
    norm = plan["norm_quant"] in ("fused", "fused_scalar_gsa") and not mhc
    apart = plan["norm_quant"] == "unfused"  # one gsa a launch is made by the format's own functions
    yield of("attn_in", 2 * layers * mhc, MHC_FUSED)
    yield of("attn_in", 2 * layers * norm + layers * q_a, NORM_FUSED)
    alone = layers * (PROJECTIONS + 2 * apart + (not q_a))
    again = requantised * (plan["norm_quant"] != "fused_launch_gsa")
    yield of("attn_in_q", alone + again, QUANTISE, QUANTISE_FP8, QUANTISE_LONG)
    yield of("attn_in", 2 * layers * (not mhc) + 1, "hc.collapse_kernel")  # and the head's
    narrow, form = plan["q_format"] != "bf16", plan["kv_format"]
    yield of("q", layers * (not narrow), Q_BF16)
    yield of("q", layers * narrow, Q_FP8, Q_AND_ATTENTION)
    yield of("kv", layers * (plan["kv_norm"] == "fused"), KV_FUSED)
    stores = layers * (plan["kv_norm"] == "unfused")
    yield of("kv_store", stores, KV_STORE[form], more=compressed)  # windows that the step closes
    yield of("attn_out", layers * (plan["kv_read"] == "gather_bf16"), GATHER[form])
    yield of("attn_out", layers * (not narrow), *BF16_ATTENTION)
    yield of("attn_out", layers * narrow, *FP8_ATTENTION)
    yield of("index_q", csa * (plan["index_score"] != "einsum_fp32"), "index_query._query_kernel")
    yield of("index_scores", csa * (plan["index_score"] == "fp8"), *FP8_SCORES)
    yield of("index_scores", csa * (plan["index_score"] == "fp4"), *FP4_SCORES)
    yield of("routed", 2 * layers, *EXPERTS)


def wrong(
    plan: Mapping[str, str], sizes: Sizes, counted: Mapping[str, int], requantised: int = 0
) -> Iterator[tuple[Expected, int]]:
    """What was not launched as often as the plan asks, and how often it was."""
    for one in expected(plan, sizes, requantised):
        seen = sum(counted.get(kernel, 0) for kernel in one.kernels)
        if not one.least <= seen <= one.most:
            yield one, seen


def words(one: Expected, seen: int) -> str:
    """The sentence of a wrong count."""
    wanted = str(one.least) if one.least == one.most else f"{one.least} to {one.most}"
    return (
        f"{' or '.join(one.kernels)} ran {seen} times in a decode step, where the plan asks for {wanted}:"
        f" {'the new path did not run' if seen < one.least else 'a path that the plan leaves still runs'}"
    )
