"""Faults planted in the source of the experts' kernels: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.grouped_ffn import fp8_kernel, group_kernel, kernel
from kernels.grouped_ffn import test_fp8_kernel as fp8_tests
from kernels.grouped_ffn import test_grouped_ffn_kernel as tests

SORTED = Seen(
    tests.test_slots_are_sorted_by_expert_and_cut_into_blocks,
    T=40,
    k=2,
    experts=2,
    bt=8,
    dtype=tests.torch.int32,
)
FEW = Seen(
    tests.test_slots_are_sorted_by_expert_and_cut_into_blocks,
    T=3,
    k=2,
    experts=5,
    bt=8,
    dtype=tests.torch.int32,
)
FFN = Seen(tests.test_both_products_and_the_weighted_sum, T=2)
ALONE = Seen(tests.test_both_products_and_the_weighted_sum, T=1)
FP8 = Seen(
    fp8_tests.test_products_are_exact_sums_and_the_whole_is_the_refs, T=3, batch=False, forms=("fp8", "fp8")
)
FAULTS = [
    Faults(
        group_kernel._group,
        SORTED,
        {
            "slots descend": ("tl.cumsum(mine, 0) - 1", "tl.sum(mine) - tl.cumsum(mine, 0)"),
            "a block counts all of its expert": ("tl.minimum(count - block * BT, BT)", "count"),
            "every block from the expert's first slot": (
                "first + block * BT, mask",
                "first + block * 0, mask",
            ),
            "blocks one place late": (
                "before = tl.sum(tl.where(bins < expert, blocks, 0))",
                "before = tl.sum(tl.where(bins < expert, blocks, 0)) // 2",
            ),
        },
    ),
    Faults(
        group_kernel._group,
        FEW,
        {
            "blocks rounded down": ("(counts + BT - 1) // BT", "counts // BT"),
            "blocks that are not needed are the first expert's": (
                "tl.full((CHUNK,), -1, tl.int32)",
                "tl.full((CHUNK,), 0, tl.int32)",
            ),
            "every block the first expert's": (
                "tl.zeros((CHUNK,), tl.int32) + expert",
                "tl.zeros((CHUNK,), tl.int32)",
            ),
        },
    ),
    Faults(
        kernel._grouped_product,
        FFN,
        {
            "the expert before": ("expert.to(tl.int64) * N", "tl.maximum(expert - 1, 0).to(tl.int64) * N"),
            "the first expert's scale_2": ("scale_2_ptr + expert", "scale_2_ptr"),
            "gsa left out": ("acc * tl.load(gsa_ptr + x_row)[None, :] *", "acc *"),
            "another token": ("(slot // SLOTS_PER_ROW)", "(slot // SLOTS_PER_ROW // 2)"),
        },
    ),
    *(
        Faults(
            group_kernel.own_slots,
            by,
            {
                "the last slot of a block left out": (
                    "place < tl.load(count_ptr + block)",
                    "place < tl.load(count_ptr + block) - 1",
                )
            },
        )
        for by in (FFN, FP8)
    ),
    Faults(
        group_kernel.store_slots,
        FFN,
        {"the last column left out": ("mask=(n < N)", "mask=(n < N - 1)")},
    ),
    Faults(
        group_kernel.store_slots,
        FP8,
        {"two slots swapped": ("slot[None, :].to(tl.int64) * N", "(slot ^ 1)[None, :].to(tl.int64) * N")},
    ),
    Faults(
        group_kernel.own_slots,
        ALONE,
        {"one slot of all": ("slot = tl.where(held, block, 0)", "slot = tl.where(held, 0 * block, 0)")},
    ),
    Faults(
        group_kernel._combine,
        FFN,
        {
            "no weights": (" * tl.load(weight_ptr + token * SLOTS + place)", ""),
            "the last expert left out": ("tl.static_range(SLOTS)", "tl.static_range(SLOTS - 1)"),
            "the first expert's weight": ("token * SLOTS + place)\n    tl", "token * SLOTS)\n    tl"),
            "another token's weights": ("weight_ptr + token * SLOTS", "weight_ptr + token // 2 * SLOTS"),
        },
    ),
    Faults(
        fp8_kernel._grouped_fp8_product,
        FP8,
        {"the first token for all": ("slot // SLOTS_PER_ROW", "slot * 0")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
