"""Faults planted in the source of the router's kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.route import kernel
from kernels.route import test_route_kernel as tests
from kernels.route.test_route_kernel import torch

CHOICE = Seen(tests.test_choice_is_the_refs_with_ties_to_the_smaller_index, E=13, k=4, T=3)
SORT = Seen(tests.test_nan_signed_zeros_and_infinities_rank_as_in_a_sort)
TABLE = Seen(tests.test_a_table_gives_its_row_ascending, E=13, k=4, T=3, dtype=torch.int64)
EQUAL = Seen(tests.test_equal_ids_of_a_table_and_zero_scores_are_kept)
FAULTS = [
    Faults(
        kernel._route,
        CHOICE,
        {
            "no bias": ("score + tl.load(bias_ptr + expert, mask=inside, other=0.0)", "score + 0.0"),
            "ties to the larger index": ("+ (E_BLOCK - expert)", "+ expert"),
            "the weights are of score and bias": (
                "_store_weights(score, held",
                "_store_weights(score + tl.load(bias_ptr + expert, mask=inside, other=0.0), held",
            ),
            "one expert fewer": ("tl.static_range(PLACES)", "tl.static_range(PLACES - 1)"),
            "another token's scores": (
                "score_ptr + token * score_stride",
                "score_ptr + token // 2 * score_stride",
            ),
            "the smallest": ("ranked * 4294967296", "-ranked * 4294967296"),
        },
    ),
    Faults(
        kernel._order,
        SORT,
        {
            "-0 below 0": ("bits = (x + 0.0).to", "bits = x.to"),
            "a NaN ranks last": ("bits), 0x7FFFFFFF)", "bits), -0x7FFFFFFF)"),
        },
    ),
    Faults(
        kernel._order,
        Seen(tests.test_sums_below_zero_rank_in_order),
        {
            "negative sums rank by magnitude": (
                "tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)",
                "bits & 0x7FFFFFFF",
            )
        },
    ),
    Faults(
        kernel._store_weights,
        CHOICE,
        {
            "not normalised": ("wide / (tl.sum(wide) + 1e-20)", "wide"),
            "no scaling factor": (" * SCALING)", ")"),
            "normalised over all experts": (
                "wide = tl.where(held, score, 0.0).to(tl.float64)",
                "wide = score.to(tl.float64)",
            ),
            "FP32 sums": ("tl.where(held, score, 0.0).to(tl.float64)", "tl.where(held, score, 0.0)"),
        },
    ),
    Faults(
        kernel._store_weights, EQUAL, {"zero scores divide by zero": ("tl.sum(wide) + 1e-20", "tl.sum(wide)")}
    ),
    Faults(
        kernel._route_by_table,
        TABLE,
        {
            "in the table's order": ("tl.sum(earlier.to(tl.int32), 1)", "place"),
            "descending": (
                "(expert[None, :] < expert[:, None])",
                "((expert[None, :] > expert[:, None]) & held[None, :])",
            ),
            "the first token's row": ("tl.load(token_ptr + token)", "tl.load(token_ptr)"),
            "another token's scores": (
                "score_ptr + token * score_stride",
                "score_ptr + token // 2 * score_stride",
            ),
            "the score of a place, not of an expert": (
                "score_stride + expert, mask",
                "score_stride + place, mask",
            ),
        },
    ),
    Faults(
        kernel._route_by_table,
        EQUAL,
        {"equal ids share a place": ("(place[None, :] < place[:, None])", "(place[None, :] < 0)")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
