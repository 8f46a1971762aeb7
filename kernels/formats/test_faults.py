"""Faults planted in the source of the formats' device functions: the tests against the formats in torch see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.formats import device, nvfp4_kernel
from kernels.formats import test_device as tests
from kernels.formats import test_nvfp4_kernel as nvfp4_tests
from kernels.formats.test_device import rows  # noqa: F401 - the fixture

FP8 = Seen(tests.test_fp8_block, group=64)
SCALED = Seen(tests.test_fp8_scaled)
MXFP4 = Seen(tests.test_mxfp4)
E2M1 = Seen(tests.test_e2m1_codes)
E2M1_VALUES = Seen(tests.test_e2m1_values)
E4M3_VALUES = Seen(tests.test_e4m3_values)
NVFP4 = Seen(nvfp4_tests.test_rows)
THRESHOLDS = Seen(nvfp4_tests.test_next_to_every_threshold)
SUBNORMAL = Seen(nvfp4_tests.test_every_quotient_of_a_subnormal_scale)
SCALES = Seen(nvfp4_tests.test_every_tie_of_a_scale)
GIVEN = Seen(nvfp4_tests.test_under_a_gsa_that_does_not_fit, gsa=1e-4)
NO_FIT = Seen(nvfp4_tests.test_under_a_gsa_that_does_not_fit, gsa=1e-45)
FAULTS = [
    Faults(
        device.e4m3,
        FP8,
        {
            "a NaN becomes the least code": (
                "tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)",
                "tl.maximum(x, -448.0)",
            ),
        },
    ),
    Faults(
        device.e4m3_value,
        E4M3_VALUES,
        {
            "the bias of fnuz": ("1.329227995784916e36", "6.64613997892458e35"),
            "a NaN is 480": ('tl.where((byte & 0x7F) == 0x7F, float("nan"), value)', "value"),
            "no sign": ("| ((byte & 0x80) << 24)", ""),
        },
    ),
    Faults(
        device._e2m1_sum,
        E2M1,
        {
            "ties up": ("tl.fma(_unit(half), 4.0, 8388612.0)", "tl.fma(_unit(half), 4.000001, 8388612.0)"),
            "one grid up to 6": (
                "sum = tl.fma(_unit(half - 1.0), 2.0, sum)\n    sum += _unit(half - 2.0)",
                "sum += 2 * _unit((half - 1.0) / 2)",
            ),
            "the sign turned": ("tl.fma(sign, -4.0, sum)", "tl.fma(sign, 4.0, sum)"),
            "at most 4": ("sum += _unit(half - 2.0)", "sum += 0 * half"),
        },
    ),
    Faults(
        device.e2m1_code,
        E2M1,
        {"a negative NaN keeps its sign": ("_sign_if(x == x)", "_sign_if(x == 0 * 0)")},
    ),
    Faults(
        device.e2m1_value,
        E2M1_VALUES,
        {
            "the code 1 is 0": (
                "return bits.to(tl.float32, bitcast=True)",
                "return tl.where((code & 6) == 0, 0, bits).to(tl.float32, bitcast=True)",
            ),
            "no sign": ("| ((code & 8) << 28)", ""),
        },
    ),
    Faults(
        device.e2m1_pairs,
        MXFP4,
        {"nibbles swapped": ("low, high = tl.split", "high, low = tl.split")},
    ),
    Faults(
        device.power_of_two_scale,
        FP8,
        {
            "the scale rounded down": ("+ ((bits & 0x7FFFFF) > over).to(tl.int32)", ""),
            "an exact edge counts as over": ("(bits & 0x7FFFFF) > over", "(bits & 0x7FFFFF) >= over"),
            "an infinite block has a scale": (
                "== 0x7F800000, 0x7FC00000, scale)",
                "== 0x7F800000, scale, scale)",
            ),
        },
    ),
    Faults(
        device.power_of_two_scale,
        MXFP4,
        {"448 for 6": ("0x600000 if LIMIT == 448.0 else 0x400000", "0x600000")},
    ),
    Faults(
        device.ue8m0_byte,
        MXFP4,
        {
            "a byte one up": (">> 23) & 0xFF", ">> 23) + 1 & 0xFF"),
            "NaN as the largest scale": ("& 0xFF, 0xFF)", "& 0xFF, 0xFE)"),
        },
    ),
    Faults(
        device.ue8m0_value,
        FP8,
        {
            "a scale one power up": ("wide << 23)", "(wide + 1) << 23)"),
            "NaN as a number": ("tl.where(wide == 0xFF, 0x7FC00000, bits)", "bits"),
        },
    ),
    Faults(
        device.abs_max,
        FP8,
        {
            "the signed largest": (
                "tl.max(\n        x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis\n    )",
                "tl.max(x.to(tl.int32, bitcast=True), axis)",
            ),
        },
    ),
    Faults(
        device.no_infinity,
        SCALED,
        {"an infinite row has a scale": ("bits >= 0x7F800000", "bits > 0x7F800000")},
    ),
    Faults(
        device.floored,
        FP8,
        {
            "no floor": ("tl.maximum(amax, FLOOR,", "tl.maximum(amax, amax,"),
            "a NaN becomes the floor": (", propagate_nan=tl.PropagateNan.ALL)", ")"),
        },
    ),
    Faults(
        device.fp8_block,
        FP8,
        {
            "the floor left out": ("floored(abs_max(groups, 2), AMAX_FLOOR)", "abs_max(groups, 2)"),
            "multiplied by the scale": ("groups * inverse[:, :, None]", "groups * scale[:, :, None]"),
            "one scale for the row": (
                "return e4m3(groups * inverse[:, :, None]), scale",
                "return e4m3(groups * tl.min(inverse, 1)[:, None, None]), scale",
            ),
            "the largest of 448 rounded down": ("AMAX_FLOOR), 448.0)", "AMAX_FLOOR) * 0.999, 448.0)"),
        },
    ),
    Faults(
        device.fp8_scaled,
        SCALED,
        {
            "a quotient, not a product with the reciprocal": (
                "x * tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)[:, None]",
                "tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))",
            ),
            "the scale rounded to a power of two": (
                "scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))",
                "scale = power_of_two_scale(amax, 448.0)",
            ),
            "no floor": ("floored(abs_max(x, 1), AMAX_FLOOR)", "abs_max(x, 1)"),
        },
    ),
    Faults(
        device.mxfp4_block,
        MXFP4,
        {
            "the floor of FP8": ("MXFP4_FLOOR", "AMAX_FLOOR"),
            "a lost block keeps its signs": (
                "_sign_if(scale == scale)[:, :, None]",
                "_sign_if(scale == 0 * 0)[:, :, None]",
            ),
            "multiplied by the scale": (
                "tl.div_rn(groups, tl.broadcast_to(scale[:, :, None], groups.shape))",
                "groups * scale[:, :, None]",
            ),
        },
    ),
    Faults(
        nvfp4_kernel.eighths,
        NVFP4,
        {"values 1 and 5 swapped": ("x1, x5 = tl.split(odd0)", "x5, x1 = tl.split(odd0)")},
    ),
    Faults(
        nvfp4_kernel.steps,
        SUBNORMAL,
        {
            "a group of zeros counts as live": ("live = minus < 0", "live = minus <= 0"),
            "the scale unrounded": (
                "minus = value * (gsa * -0.125)",
                "minus = _corrected(sixth, gsa, tl.div_rn(1.0, gsa)) * (gsa * -0.125)",
            ),
        },
    ),
    Faults(
        nvfp4_kernel.steps,
        THRESHOLDS,
        {
            "one reciprocal instead of two terms": (
                "tl.fma(tl.abs(low), 1.1920928955078125e-07, low)",
                "0 * low",
            ),
        },
    ),
    Faults(
        nvfp4_kernel._to_e4m3,
        SCALES,
        {
            "ties up": ("sum = x + shift", "sum = x * 1.0000001 + shift"),
            "no subnormal scales": ("tl.maximum(power, 0.015625)", "tl.maximum(power, 2.0**-20)"),
        },
    ),
    Faults(nvfp4_kernel._to_e4m3, GIVEN, {"beyond 448": ("x = tl.minimum(x, 448.0)", "x = x")}),
    Faults(
        nvfp4_kernel.in_top_bits,
        THRESHOLDS,
        {
            "the second term of the reciprocal left out": ("tl.fma(size, high, size * low)", "size * high"),
            "no sign": (" | (x.to(tl.uint32, bitcast=True) & 0x80000000)", ""),
        },
    ),
    Faults(
        nvfp4_kernel.in_top_bits,
        SUBNORMAL,
        {"codes run over": ("48.0)", "4800.0)")},
    ),
    Faults(
        nvfp4_kernel.packed,
        NVFP4,
        {"the last two codes swapped": ("_append(c7 >> 28, c6)", "_append(c6 >> 28, c7)")},
    ),
    Faults(
        nvfp4_kernel.by_divisions,
        NO_FIT,
        {
            "the scale unrounded": ("step = value * gsa", "step = ideal * gsa"),
            "nibbles swapped": ("c4 | (c5 << 4)", "c5 | (c4 << 4)"),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
