"""How finely the sums of a backend are kept: the one place that says it, and where it comes from."""

from dataclasses import dataclass

FP32_UNIT = 2.0**-24  # largest relative error of one FP32 rounding

# FP8 products on Hopper's tensor cores. Within one step of 32 products, products and the running sum are shifted to
# the largest exponent among them and cut there, towards zero: "around 14 bits" are kept (DeepSeek-V3, arXiv
# 2412.19437, section 3.3.2, "increasing accumulation precision"). Of 14 bits the first is the leading one, so less
# than 2^-13 of the largest addend is cut off: a cut has the root mean square 2^-13 / sqrt(3), as a rounding with the
# unit 2^-13 has in :class:`dsv4.floor.dither.Dither`. A product of two E4M3 values has 8 bits, so only those under
# 2^-6 of the largest addend lose any. That leaves two cuts a step of 32: the running sum's, and one for all of the
# small products together. ``test_accumulation.py`` simulates such sums and finds draws within a factor of 1.5.
# A kernel that adds partial sums in FP32 cuts under smaller maxima and stays below. Blackwell adds FP8 products in
# FP32, and other formats are added in FP32 everywhere.
HOPPER = (9, 0)
HOPPER_FP8_UNIT = 2.0**-13
HOPPER_PRODUCTS_A_CUT = 16


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """Units of the sums behind a value.

    Attributes
    ----------
    fp8 : of a sum of products whose operands are both FP8.
    products : of these, how many there are to one rounding of their sum.
    """

    fp8: float = FP32_UNIT
    products: int = 1


FP32 = Accumulation()
HOPPER_FP8 = Accumulation(fp8=HOPPER_FP8_UNIT, products=HOPPER_PRODUCTS_A_CUT)
NAMED = {"fp32": FP32, "hopper_fp8": HOPPER_FP8}  # as an engine's entry in config.yaml says it


def accumulation_of(kind: str, capability: tuple[int, int] | None) -> Accumulation:
    """Of refs, or of kernels on a card of this compute capability."""
    return HOPPER_FP8 if kind == "kernel" and capability == HOPPER else FP32
