"""Number formats: the one place where a value is rounded to fewer bits, or bytes are given a meaning.

Every module is plain torch, on CPU and GPU alike, and states its choices; "quantise to FP8" alone names no operation.
Element formats ``e4m3``, ``e2m1``, ``ue8m0`` and ``bf16`` encode and decode single values. Block formats have
``quantise``, ``dequantise`` and ``round``. Records are bytes in a cache. Inputs are computed in float32 (float64 is
rounded to it once, but for ``bf16``, which rounds float64 directly). Non-finite input comes out as NaN, over the
whole group that shares its scale: it is never hidden. All choices hold from one device to another, bit for bit.

==============  ================  =======================================  ================  ============  ============
format          amax floor        scale rounding                           divide, multiply  values        overflow
==============  ================  =======================================  ================  ============  ============
fp8_block       1e-4              up to a power of two                     divide (exact)    nearest even  cannot occur
mxfp4           6 * 2^-126        up to a power of two                     divide (exact)    nearest even  cannot occur
nvfp4           none (0 stays 0)  E4M3 nearest even, under amax / 2688     divide            nearest even  saturates
fp8_scaled      1e-4              amax / 448 in float32                    times reciprocal  nearest even  saturates
kv_record       as fp8_block      one UE8M0 byte per 64                    divide (exact)    nearest even  cannot occur
aligned_record  as fp8_block      largest power of two of the token        divide (exact)    nearest even  cannot occur
==============  ================  =======================================  ================  ============  ============
"""
