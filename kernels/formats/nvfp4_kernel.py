"""NVFP4 inside Triton kernels: the bits of :mod:`kernels.formats.nvfp4`, of a row that one program holds.

A row is FP32 [GROUPS, 2, 8] with a group of 16 in one thread, so that a group's scale is worked out once. On the
H200 instructions bound the quantiser, not memory: about 11 a value here, of which two make the quotient exact enough,
six round it to a code and pack it.
"""

import triton
import triton.language as tl

from kernels.formats.device import e2m1_code, nvfp4_gsa


@triton.jit
def max_nan(a, b):
    """The larger of two; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def eighths(x, A: tl.constexpr, B: tl.constexpr):
    """Eight tensors [A, B] of one of shape [A, B, 8]; free where a thread holds the eight."""
    even, odd = tl.split(tl.reshape(x, (A, B, 4, 2)))
    even0, even1 = tl.split(tl.reshape(even, (A, B, 2, 2)))
    odd0, odd1 = tl.split(tl.reshape(odd, (A, B, 2, 2)))
    x0, x4 = tl.split(even0)
    x2, x6 = tl.split(even1)
    x1, x5 = tl.split(odd0)
    x3, x7 = tl.split(odd1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def nvfp4_row(x, amax, top, GROUPS: tl.constexpr):
    """Quantise one row [GROUPS, 2, 8] with its groups' largest magnitudes [GROUPS] and its own, a scalar.

    Gives codes, uint32 [GROUPS, 2] of eight each, the even index in the low nibble; E4M3 scales, uint8 [GROUPS]; and
    gsa, a scalar.
    """
    gsa = nvfp4_gsa(finite(top))
    word, scale = nvfp4_codes(x, amax, gsa, gsa == gsa, GROUPS)
    return word, scale, gsa


@triton.jit
def nvfp4_codes(x, amax, gsa, fits, GROUPS: tl.constexpr):
    """Codes and scales as :func:`nvfp4_row`, under any gsa; ``fits``: amax is at most gsa * 2^20."""
    if fits & by_steps(gsa):
        word, scale = _by_products(x, amax, gsa, GROUPS)
    else:
        word, scale = by_divisions(x, finite(amax), gsa, GROUPS)
    return word, scale


@triton.jit
def finite(x):
    """FP32 from 0 up, NaN where it is infinite."""
    return tl.where(x < float("inf"), x, float("nan"))


@triton.jit
def by_steps(gsa):
    """Whether :func:`steps` is for this gsa: from 2^-80 to 2^80 no remainder underflows."""
    return (gsa >= 8.271806125530277e-25) & (gsa <= 1.2089258196146292e24)


@triton.jit
def by_divisions(x, amax, gsa, GROUPS: tl.constexpr):
    """As the format is defined, for any gsa: 0, subnormal, NaN."""
    known = gsa != 0
    sixth = tl.div_rn(amax, 6.0)
    ideal = tl.where(known, tl.div_rn(sixth, tl.where(known, gsa, 1.0)), amax * 0.0)
    value, byte = _to_e4m3(ideal)
    value, byte = tl.where(ideal == ideal, value, float("nan")), tl.where(ideal == ideal, byte, 0x7F)
    step = value * gsa
    live = (step > 0)[:, None, None]  # else the codes are 0
    divisor = tl.broadcast_to(tl.where(live, step[:, None, None], 1.0), x.shape)
    c0, c1, c2, c3, c4, c5, c6, c7 = eighths(e2m1_code(tl.where(live, tl.div_rn(x, divisor), 0.0)), GROUPS, 2)
    low, high = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12), c4 | (c5 << 4) | (c6 << 8) | (c7 << 12)
    return (low | (high << 16)).to(tl.uint32, bitcast=True), byte.to(tl.uint8)


@triton.jit
def _by_products(x, amax, gsa, GROUPS: tl.constexpr):
    """The same bits without a division a value, for gsa from 2^-80 to 2^80."""
    byte, live, high, low = steps(amax, gsa)
    word = packed(in_top_bits(x, high[:, None, None], low[:, None, None]), GROUPS)
    return tl.where(live[:, None], word, 0), byte.to(tl.uint8)


@triton.jit
def steps(amax, gsa):
    """Of each group's step, for gsa from 2^-80 to 2^80: its E4M3 byte, int32; whether it is over 0; 8 / step in two.

    A code needs no exact quotient, only the right side of a few thresholds: seven of E2M1 and the midpoints of E4M3.
    A product with the rounded reciprocal of the divisor, corrected once by its remainder, is on the side of the
    quotient rounded to FP32 for every midpoint; so is a product with the reciprocal as a sum of two for every
    threshold, the second's last bit or two upwards; and a sixth so computed is the rounded sixth.
    test_nvfp4_kernel.py checks this, exhaustively when asked to.
    """
    sixth = _corrected(amax, 6.0, 1 / 6)
    value, byte = _to_e4m3(_corrected(sixth, gsa, tl.div_rn(1.0, gsa)))
    minus = value * (gsa * -0.125)  # -step / 8
    live = minus < 0
    near = -1.0 / minus
    high = tl.where(live, tl.fma(tl.fma(minus, near, 1.0), near, near), 0.0)
    low = high * tl.fma(minus, high, 1.0)
    return byte, live, high, tl.fma(tl.abs(low), 1.1920928955078125e-07, low)


@triton.jit
def _to_e4m3(x):
    """The nearest E4M3, ties to even, at most 448, of FP32 from 0 up, and its byte, int32: NaN gives 448.

    By sums, as :func:`in_top_bits` has it, and not by the hardware's conversion: where a thread converted four, the
    bytes stored for two of them were wrong on the H200 (ptxas 12.8; 522,089 of 1,048,576), though codes made of the
    same bytes were right.
    """
    x = tl.minimum(x, 448.0)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = (
        tl.maximum(power, 0.015625) * 1048576.0
    )  # the grid is an eighth of the power of two, at least 2^-9
    sum = x + shift
    bits = sum.to(tl.int32, bitcast=True)
    return sum - shift, (bits + (bits >> 20) - 1128) & 0xFF


@triton.jit
def _corrected(x, divisor, inverse):
    """Give x / divisor but for a rare last bit, with the divisor's correctly rounded reciprocal."""
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def in_top_bits(x, high, low):
    """Codes of values of a block, of 8 / step = ``high`` + ``low``, in the top four bits of uint32.

    E2M1 has one bit after the leading one and a grid of 0.5 under 2: its ties go to even on a grid of half the
    quotient's power of two, or 0.5. FP32 rounds to just that grid in a sum with 2^22 times the power; the code is
    then the last bits plus twice the power's exponent. With the quotient times 8 that exponent is 0 mod 8, and one
    product moves both to the top.
    """
    size = tl.abs(x)
    quotient = tl.minimum(tl.fma(size, high, size * low), 48.0)
    power = (quotient.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    sum = tl.fma(tl.maximum(power, 8.0), 4194304.0, quotient).to(tl.uint32, bitcast=True)
    return (sum * 0x10000040) | (x.to(tl.uint32, bitcast=True) & 0x80000000)


@triton.jit
def packed(code, GROUPS: tl.constexpr):
    """Words of eight codes, uint32 [GROUPS, 2], the even index in the low nibble, of codes in the top bits."""
    c0, c1, c2, c3, c4, c5, c6, c7 = eighths(code, GROUPS, 2)
    word = _append(_append(_append(c7 >> 28, c6), c5), c4)
    return _append(_append(_append(_append(word, c3), c2), c1), c0)


@triton.jit
def _append(word, code):
    """``word`` one nibble up, with the top nibble of ``code``: one funnel shift."""
    return (word << 4) | (code >> 28)
