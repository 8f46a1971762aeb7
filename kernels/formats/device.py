"""The formats inside Triton kernels: the same choices, bit for bit, as the modules beside this one.

All take and give FP32 (or integers) and use no arithmetic on BF16, which the interpreter does not have. Divisions
are ``div_rn``: Triton's ``/`` is off by up to 2 ulp. A kernel that quantises is launched with
``enable_fp_fusion=False`` (:data:`EXACT`): a fused multiply-add would skip the rounding of a product.
"""

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}  # launch option of every kernel whose codes must equal the ref's
AMAX_FLOOR = tl.constexpr(1e-4)  # fp8_block and fp8_scaled
MXFP4_FLOOR = tl.constexpr(6 * 2.0**-126)


@triton.jit
def e4m3(x):
    """Nearest E4M3 of FP32, ties to even, clamped to +-448; NaN stays: any shape -> float8e4nv."""
    low = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def e4m3_value(byte):
    """FP32 value of E4M3 bytes, int32 of any shape; NaN for 0x7f and 0xff.

    By integer work: ptxas 12.8 and 12.9 miscompile the hardware's conversion of codes that the same kernel made.
    """
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)  # bias 127 instead of 7: off by 2^120, subnormal too
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _unit(x):
    """FP32 limited to [0, 1], NaN to 0: no instruction of its own, but a modifier of the one before."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _e2m1_sum(half, sign):
    """2^23 + code 0 to 15 of FP32 values, ties to even, from half their magnitudes and +-1 for their signs: -> FP32.

    The grid is 0.5 up to 2, 1 up to 4, 2 up to 6. FP32 from 2^23 on holds integers, so three sums round three parts
    of the magnitude, each in units of its grid; at most one part is inside its range, and the others are even, so
    that its ties go where the code's would. NaN gives 0. Multiply-adds, as a GPU has twice as many of these a cycle
    as of comparisons and integer work.
    """
    sum = tl.fma(_unit(half), 4.0, 8388612.0)
    sum = tl.fma(_unit(half - 1.0), 2.0, sum)
    sum += _unit(half - 2.0)
    return tl.fma(sign, -4.0, sum)


@triton.jit
def _signed_one(x, kept):
    """+-1 by the sign bit of FP32 where ``kept`` is 1 << 31, 1 where it is 0."""
    return ((x.to(tl.int32, bitcast=True) & kept) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_code(x):
    """Code 0 to 15 of the nearest E2M1 value, ties to the even mantissa; NaN gives 0: any shape -> int32."""
    sign = _signed_one(x, _sign_if(x == x))
    return _e2m1_sum(tl.abs(x) * 0.5, sign).to(tl.int32, bitcast=True) & 15


@triton.jit
def e2m1_pairs(half, sign, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Bytes of two codes, the even index in the low nibble, for :func:`_e2m1_sum`'s arguments: uint8 [ROWS, COLS/2]."""
    low, high = tl.split(tl.reshape(_e2m1_sum(half, sign), (ROWS, COLS // 2, 2)))
    return tl.fma(high - 8388608.0, 16.0, low).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """FP32 value of codes 0 to 15, int32 of any shape."""
    # exponent field 0 to 3 and one mantissa bit, read as FP32 of bias 127 instead of 1: off by 2^126, subnormal too
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def power_of_two_scale(amax, LIMIT: tl.constexpr):
    """Smallest power of two s with LIMIT * s >= amax, from exponent bits: FP32 -> FP32; NaN and Inf give NaN.

    LIMIT is 448 (1.75 * 2^8) or 6 (1.5 * 2^2). ``amax`` is a normal number: both formats have a floor above
    FP32's subnormals.
    """
    bits = amax.to(tl.int32, bitcast=True)
    over: tl.constexpr = 0x600000 if LIMIT == 448.0 else 0x400000
    shift: tl.constexpr = 8 if LIMIT == 448.0 else 2
    byte = (bits >> 23) - shift + ((bits & 0x7FFFFF) > over).to(tl.int32)
    byte = tl.maximum(byte, 0)
    scale = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where((bits & 0x7F800000) == 0x7F800000, 0x7FC00000, scale).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_byte(scale):
    """UE8M0 byte of a power of two or NaN (0xff): FP32 -> uint8."""
    return tl.where(scale == scale, (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0xFF).to(tl.uint8)


@triton.jit
def ue8m0_value(byte):
    """FP32 value of UE8M0 bytes, uint8."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return tl.where(wide == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """BF16 bits of FP32, uint16; every NaN is 0x7fc0, as :mod:`kernels.formats.bf16` has it."""
    return tl.where(x == x, x.to(tl.bfloat16).to(tl.uint16, bitcast=True), 0x7FC0)


@triton.jit
def abs_max(x, axis: tl.constexpr):
    """Largest magnitude along an axis as the formats take it: NaN if any value is NaN or infinite, FP32."""
    bits = tl.max(
        x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis
    )  # magnitudes order like integers, NaN on top
    return no_infinity(bits)


@triton.jit
def no_infinity(bits):
    """A magnitude, NaN if it is infinite: int32 bits -> FP32."""
    return tl.where(bits >= 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def floored(amax, FLOOR: tl.constexpr):
    """The larger of amax and the format's floor; NaN stays: FP32 -> FP32."""
    return tl.maximum(amax, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nvfp4_gsa(amax):
    """Row factor: amax / 2688, rounded once, FP32."""
    return tl.div_rn(amax, 2688.0)


@triton.jit
def _sign_if(live):
    """The sign bit where codes are kept, int32."""
    return tl.where(live, -2147483648, 0)


@triton.jit
def mxfp4_block(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Quantise [ROWS, COLS] FP32: packed codes uint8 [ROWS, COLS/2], UE8M0 bytes [ROWS, COLS/32]."""
    groups = tl.reshape(x, (ROWS, COLS // 32, 32))
    scale = power_of_two_scale(floored(abs_max(groups, 2), MXFP4_FLOOR), 6.0)
    scaled = tl.div_rn(groups, tl.broadcast_to(scale[:, :, None], groups.shape))
    sign = _signed_one(groups, _sign_if(scale == scale)[:, :, None])
    return e2m1_pairs(tl.abs(scaled) * 0.5, sign, ROWS, COLS), ue8m0_byte(scale)


@triton.jit
def fp8_block(groups):
    """Quantise [ROWS, GROUPS, SIZE] FP32: float8e4nv of that shape, power-of-two scales FP32 [ROWS, GROUPS].

    A product with the scale's reciprocal is the quotient: both are powers of two from 2^-119 to 2^119.
    """
    scale = power_of_two_scale(floored(abs_max(groups, 2), AMAX_FLOOR), 448.0)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return e4m3(groups * inverse[:, :, None]), scale


@triton.jit
def fp8_scaled(x):
    """Quantise [ROWS, COLS] FP32 rows: float8e4nv [ROWS, COLS], FP32 scale [ROWS]."""
    amax = floored(abs_max(x, 1), AMAX_FLOOR)
    scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    return e4m3(x * tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)[:, None]), scale
