"""Number formats: the one place where a value is rounded to fewer bits, or bytes are given a meaning.

Every module is plain torch, on CPU and GPU alike, and states its choices: "quantise to FP8" alone names no
operation. Element formats (``e4m3``, ``e2m1``, ``ue8m0``, ``bf16``) encode and decode single values. Block
formats have ``quantise``, ``dequantise`` and ``round``. Records are bytes in a cache. Inputs are computed in
float32; float64 is rounded to it once, but for ``bf16``, which rounds float64 directly. A NaN or an infinity
comes out as NaN, over the whole group that shares its scale: it is never hidden.

==============  ===========  ==========================  ==================  ============  ==============
format          amax floor   scale                       divide or multiply  values        overflow
==============  ===========  ==========================  ==================  ============  ==============
e4m3                                                               nearest even  clamped to 448
e2m1                                                               nearest even  clamped to 6
ue8m0                                                              none          refused
bf16                                                               nearest even  infinity
fp8_block       1e-4         up to a power of two        divide, exact       nearest even  cannot occur
mxfp4           6 * 2^-126   up to a power of two        divide, exact       nearest even  cannot occur
nvfp4           none         E4M3 nearest even, x gsa    divide              nearest even  saturates at 6
fp8_scaled      1e-4         amax / 448 in float32       by reciprocal       nearest even  clamped to 448
kv_record       1e-4         fp8_block's, UE8M0 byte     divide, exact       nearest even  cannot occur
aligned_record  1e-4         kv_record's largest         divide, exact       nearest even  cannot occur
==============  ===========  ==========================  ==================  ============  ==============
"""
