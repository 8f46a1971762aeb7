"""Faults planted in the source of the cache write: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.formats import device
from kernels.kv_store import kernel, nvfp4_kernel
from kernels.kv_store import test_kv_store_kernel as tests
from kernels.kv_store import test_kv_store_nvfp4_kernel as nvfp4_tests

ROWS = Seen(tests.test_every_number_of_rows, T=3, dtype=tests.F32)
SKIPPED = Seen(tests.test_negative_slots_are_skipped_and_strided_rows_and_pages_are_read)
NARROW = Seen(tests.test_every_width_and_page, nope=192, page=16)
SPECIAL = Seen(tests.test_special_values)
ALIGNED = Seen(tests.test_aligned_record, T=3)
MANY = Seen(tests.test_many_rows_hold_several_a_program)
NVFP4 = Seen(nvfp4_tests.test_every_number_of_rows, T=3, dtype=tests.F32)
NVFP4_SKIPPED = Seen(nvfp4_tests.test_negative_slots_are_skipped_and_strided_rows_and_pages_are_read)
FAULTS = [
    Faults(
        kernel._kv_store_kernel,
        SKIPPED,
        {
            "every row is the first": (
                "row.to(tl.int64)[:, None] * kv_stride",
                "row.to(tl.int64)[:, None] // 2 * kv_stride",
            ),
            "a skipped row goes to slot 0": (
                "        slot,\n        slot >= 0,",
                "        tl.maximum(slot, 0),\n        slot > -99,",
            ),
            "rope read a column early": (
                "col = NOPE + tl.arange(0, 64)",
                "col = NOPE - 1 + tl.arange(0, 64)",
            ),
        },
    ),
    Faults(
        kernel._kv_store_kernel,
        MANY,
        {"programs overlap": ("tl.program_id(0) * ROWS + tl", "tl.program_id(0) * (ROWS - 1) + tl")},
    ),
    Faults(
        kernel.store_record,
        ROWS,
        {
            "the scale of the group before": (
                "scales_at[:, None] + group[None, :]",
                "scales_at[:, None] + (group ^ 1)[None, :]",
            ),
            "scales before the data's end": (
                "PAGE * (NOPE + 128) + offset * SCALE_BYTES",
                "PAGE * (NOPE + 120) + offset * SCALE_BYTES",
            ),
            "scales of the token before": ("offset * SCALE_BYTES", "(offset ^ 1) * SCALE_BYTES"),
            "padding not zero": (
                "(group < NOPE // 64)[None, :], fmt.ue8m0_byte(scale), 0)",
                "(group < 64)[None, :], fmt.ue8m0_byte(scale), 0)",
            ),
            "rope truncated to BF16": (
                "fmt.bf16_bits(rope)",
                "(rope.to(tl.int32, bitcast=True) >> 16).to(tl.uint16)",
            ),
            "rope through FP8": ("bf16_bits(rope)", "bf16_bits(fmt.e4m3(rope).to(tl.float32))"),
            "a page as dense as its tokens": (
                "page * page_stride + offset * (NOPE + 128)",
                "slot * (NOPE + 128)",
            ),
            "the last nope value not stored": ("(col < NOPE))", "(col < NOPE - 1))"),
        },
    ),
    Faults(
        kernel.store_record,
        NARROW,
        {
            "the scales' padding left": (
                "held[:, None] & (rest >= COLS // 64)",
                "held[:, None] & (rest > COLS // 64)",
            )
        },
    ),
    Faults(
        kernel.store_record,
        ALIGNED,
        {
            "the first group's scale for the token's": (
                "fmt.abs_max(tl.where((group < NOPE // 64)[None, :], scale, 0.0), 1)",
                "fmt.abs_max(tl.where((group < 1)[None, :], scale, 0.0), 1)",
            ),
            "codes not shifted to the token's scale": (
                "fmt.e4m3(shifted)",
                "fmt.e4m3(fmt.e4m3_value(byte.to(tl.int32)))",
            ),
            "rope unscaled": (
                "rope.to(tl.bfloat16).to(tl.float32) * inverse[:, None]",
                "rope.to(tl.bfloat16).to(tl.float32)",
            ),
            "codes of the value, not of the code": (
                "fmt.e4m3_value(byte.to(tl.int32)) * tl.div_rn(scale, whole)",
                "tl.reshape(nope, (ROWS, COLS // 64, 64)) * tl.div_rn(scale * 0 + 1.0, whole)",
            ),
            "the scale of the page's first slot": (
                "page * scale_stride + offset, token",
                "page * scale_stride, token",
            ),
        },
    ),
    Faults(
        device.bf16_bits,
        SPECIAL,
        {"a NaN as an infinity": ("0x7FC0)", "0x7F80)")},
    ),
    Faults(
        nvfp4_kernel.kv_store_nvfp4_kernel,
        NVFP4,
        {
            "a larger maximum": ("row_top(amax)", "row_top(amax) * 1.01"),
            "pages a token short": ("slot % PAGE", "slot % (PAGE - 1)"),
            "records of scales without gsa": ("offset * (NOPE // 16 + 4)", "offset * (NOPE // 16)"),
            "words swapped": ("group[:, None] * 2 +", "group[:, None] * 2 + 1 -"),
            "rope through FP8": ("bf16_bits(rope)", "bf16_bits(rope.to(tl.float8e4nv).to(tl.float32))"),
            "gsa doubled": ("gsa.to(tl.int32, bitcast=True)", "(gsa * 2).to(tl.int32, bitcast=True)"),
        },
    ),
    Faults(
        nvfp4_kernel.kv_store_nvfp4_kernel,
        NVFP4_SKIPPED,
        {"rows are dense": ("kv_ptr + row * kv_stride", "kv_ptr + row * (NOPE + 64)")},
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
