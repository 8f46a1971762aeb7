"""How finely the sums of a backend are kept: the one place that says it, and where it comes from."""

from dataclasses import dataclass

FP32_UNIT = 2.0**-24  # largest relative error of one FP32 rounding

# FP8 products on Hopper's tensor cores. Within one step of 32 products, products and the running sum are shifted to
# the largest exponent among them and cut there: "around 14 bits" are kept (DeepSeek-V3, arXiv 2412.19437, section
# 3.3.2, "increasing accumulation precision"). Of 14 bits the first is the leading one, so what is cut off an addend
# is under 2^-13 of the largest one. A cut is uniform in [0, 2^-13) towards zero, with the sign of its addend, so its
# root mean square is 2^-13 / sqrt(3): what a rounding with the unit 2^-13 has in :class:`dsv4.floor.dither.Dither`,
# and there is one a product (33 a step of 32). A kernel that adds partial sums in FP32 cuts under smaller maxima
# and stays below. Blackwell adds FP8 products in FP32, and other formats are added in FP32 everywhere.
HOPPER = (9, 0)
HOPPER_FP8_UNIT = 2.0**-13


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """Units of the sums behind a value.

    Attributes
    ----------
    fp8 : of a sum of products whose operands are both FP8.
    """

    fp8: float = FP32_UNIT


FP32 = Accumulation()


def accumulation_of(kind: str, capability: tuple[int, int] | None) -> Accumulation:
    """Of refs, or of kernels on a card of this compute capability."""
    return Accumulation(fp8=HOPPER_FP8_UNIT) if kind == "kernel" and capability == HOPPER else FP32
