"""Faults planted in the source of the choice's kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.index_topk import select_kernel
from kernels.index_topk import test_index_topk_kernel as tests

TIES = Seen(tests.test_equals_the_ref_on_ties, T=5, C=300, k=8)
FEW = Seen(tests.test_equals_the_ref_on_ties, T=4, C=300, k=40)
HIDDEN = Seen(tests.test_hidden_scores_and_strides_have_no_effect)
LURED = Seen(tests.test_a_hidden_score_wins_no_place_for_its_run)
ORDER = Seen(tests.test_zeros_are_one_value_and_negative_scores_rank_in_order)
ALL_EQUAL = Seen(tests.test_all_equal_scores_keep_the_first_entries)
NANS = Seen(tests.test_every_nan_is_one_value)
DISTINCT = Seen(tests.test_equals_the_ref_on_distinct_scores, C=1023, k=512)
SEGMENTS = Seen(tests.test_rows_of_several_segments, k=10)
RUNS = Seen(tests.test_runs_and_runs_of_runs, kind="ties", C=1100, k=40, levels=1)
CUT_IN_TIES = Seen(tests.test_runs_and_runs_of_runs, kind="cut in ties", C=1100, k=40, levels=1)
OF_RUNS = Seen(tests.test_runs_and_runs_of_runs, kind="cut in ties", C=3000, k=40, levels=2)
WALK = Seen(tests.test_runs_and_runs_of_runs, kind="walk", C=3000, k=40, levels=2)
FAULTS = [
    Faults(
        select_kernel.select_kernel,
        HIDDEN,
        {
            "a limit one too far": (
                "tl.minimum(tl.load(visible_ptr + row).to(tl.int32), C)",
                "tl.minimum(tl.load(visible_ptr + row).to(tl.int32) + 1, C)",
            ),
        },
    ),
    Faults(
        select_kernel.select_kernel,
        TIES,
        {
            "another row's set": ("value_ptr += row * value_stride", "value_ptr += row // 2 * value_stride"),
        },
    ),
    Faults(
        select_kernel.select_kernel,
        FEW,
        {
            "places that are left hold 0": (
                "tl.full((BLOCK_K,), -1, tl.int32)",
                "tl.full((BLOCK_K,), 0, tl.int32)",
            )
        },
    ),
    Faults(
        select_kernel.select_kernel,
        SEGMENTS,
        {
            "an index within its segment": ("entries += first", "entries += 0"),
            "the index of a candidate, not of an entry": (
                "if MERGE:\n        index",
                "if MERGE and C < 0:\n        index",
            ),
            "segments in one place": (
                "row * out_stride + segment * k\n    place",
                "row * out_stride\n    place",
            ),
            "no keys of empty places": (
                "tl.zeros((BLOCK_K,), tl.int32), empty",
                "tl.full((BLOCK_K,), -1, tl.int32), empty",
            ),
        },
    ),
    Faults(
        select_kernel.select_kernel,
        RUNS,
        {
            "another row's limit": ("visible_ptr + row", "visible_ptr + row * 0"),
            "runs from 8 beyond the limit": (
                "runs * RUN < limit, True)\n            else",
                "runs * RUN + 8 < limit, True)\n            else",
            ),
            "entries of a run beyond the limit": ("there & (entries < limit), MERGE", "there, MERGE"),
        },
    ),
    Faults(
        select_kernel.select_kernel,
        OF_RUNS,
        {
            "runs of runs beyond the limit": (
                "coarse * (RUN * RUN) < limit",
                "coarse * (RUN * RUN) + 64 < limit",
            ),
            "a smaller cut": ("best >= least, best, 0", "best > least, best, 0"),
        },
    ),
    Faults(
        select_kernel._keys,
        NANS,
        {"a NaN by its bits": ("tl.where(score == score, key, 0xFFFFFFFF)", "key")},
    ),
    Faults(
        select_kernel._keys,
        ORDER,
        {
            "-0 below 0": ("(score + 0.0).to", "score.to"),
            "negative scores by magnitude": ("((bits >> 31) | -0x80000000)", "-0x80000000"),
        },
    ),
    Faults(
        select_kernel._keys,
        RUNS,
        {"a hidden score counts": ("tl.where(present, key, 0)", "tl.where(present, key, key)")},
    ),
    Faults(
        select_kernel._cut,
        DISTINCT,
        {
            "one key too few": ("fits = many <= k", "fits = many < k"),
        },
    ),
    Faults(
        select_kernel._cut,
        ALL_EQUAL,
        {"one tie fewer": ("tl.where(done, 0, k - above)", "tl.where(done, 0, k - above - 1)")},
    ),
    Faults(
        select_kernel._cut,
        FEW,
        {
            "absent keys count": (
                "present = tl.sum((keys != 0).to(tl.int32))",
                "present = tl.sum((keys == keys).to(tl.int32))",
            )
        },
    ),
    Faults(
        select_kernel._choose,
        TIES,
        {
            "ties to the larger index": ("ties <= ties_wanted)", "ties > tl.max(ties, 0) - ties_wanted)"),
            "all ties": ("over | (tie & (ties <= ties_wanted))", "over | (tie & (ties < 9999))"),
            "one place late": ("tl.minimum(ties, ties_wanted) - 1", "tl.minimum(ties, ties_wanted)"),
        },
    ),
    Faults(
        select_kernel._choose,
        CUT_IN_TIES,
        {
            "the cut one up": (
                "least = tl.where(ties_wanted > 0, low, top + 1)",
                "least = tl.where(ties_wanted > 0, low + 1, top + 2)",
            )
        },
    ),
    Faults(
        select_kernel._members,
        RUNS,
        {
            "a run's first entries": ("tl.arange(0, RUN)[None, :]", "(tl.arange(0, RUN) // 2)[None, :]"),
            "the last run left out": ("(slot < found)[:, None]", "(slot < found - 1)[:, None]"),
        },
    ),
    Faults(
        select_kernel.maxima_kernel,
        RUNS,
        {
            "a run's smallest": ("best = tl.max(_keys", "best = tl.min(_keys"),
            "the first row's scores": ("score_ptr + row * stride", "score_ptr + row // 2 * stride"),
            "runs a place early": ("best_ptr + row * runs + run,", "best_ptr + row * runs + run // 2,"),
        },
    ),
    Faults(
        select_kernel.maxima_kernel,
        LURED,
        {"an entry beyond the limit counts": ("at < limit, False)", "at < C, False)")},
    ),
    Faults(
        select_kernel.maxima_kernel,
        WALK,
        {
            "a run of runs by its first": (
                "tl.max(tl.reshape(best, (RUNS // RUN, RUN)), 1)",
                "tl.min(tl.reshape(best, (RUNS // RUN, RUN)), 1)",
            ),
            "the second block's runs of runs in the first's place": (
                "tl.program_id(1) * (RUNS // RUN)",
                "tl.program_id(1) * 0",
            ),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
