"""Faults planted in the source of SwiGLU's kernel: the op's tests see each."""

from kernels._mutate import Faults, Seen, planted
from kernels.swiglu import kernel
from kernels.swiglu import test_swiglu_kernel as tests

ROWS = Seen(tests.test_every_number_of_rows, T=3, dtype=tests.F32)
WIDTH = Seen(tests.test_every_width, F=1500)
GATES = Seen(tests.test_every_gate)
SPECIAL = Seen(tests.test_clamps_and_special_values)
FAULTS = [
    Faults(
        kernel._swiglu_kernel,
        WIDTH,
        {
            "up before gate": ("swiglu_of(gate, up, limit)", "swiglu_of(up, gate, limit)"),
            "up one column early": ("x_stride + F + col", "x_stride + F - 1 + col"),
            "the last column not stored": ("y.to(y_ptr.dtype.element_ty), col < F)", "y, col < F - 1)"),
            "another row's gate": (
                "gate = tl.load(x_ptr + row * x_stride",
                "gate = tl.load(x_ptr + 0 * x_stride",
            ),
        },
    ),
    Faults(
        kernel.swiglu_of,
        SPECIAL,
        {
            "the gate's clamp left out": ("tl.minimum(gate, limit,", "tl.minimum(gate, gate,"),
            "up's upper clamp left out": ("up = tl.minimum(up, limit,", "up = tl.minimum(up, up,"),
            "up's lower clamp left out": ("tl.maximum(up, -limit,", "tl.maximum(up, up,"),
            "a NaN gate becomes the limit": (
                "gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)",
                "gate = tl.minimum(gate, limit)",
            ),
        },
    ),
    Faults(
        kernel.swiglu_of,
        ROWS,
        {
            "the gate clamped below too": (
                "    up = tl.minimum(",
                "    gate = tl.maximum(gate, -limit)\n    up = tl.minimum(",
            ),
            "a sigmoid, not SiLU": ("tl.div_rn(gate, 1.0 + fall)", "tl.div_rn(1.0, 1.0 + fall)"),
            "the sigmoid's sign": ("tl.minimum(-gate, 88.0", "tl.minimum(gate, 88.0"),
        },
    ),
    Faults(
        kernel.exponential,
        GATES,
        {
            "log2(e) in one term": ("-product) + x * 1.925963033500011e-08", "-product)"),
            "the product's rounding not made good": (
                "tl.fma(power, rest * 0.6931471824645996, power)",
                "power",
            ),
        },
    ),
]
test_faults_in_the_source_are_seen = planted(FAULTS)
