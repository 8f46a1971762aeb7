"""RMSNorm, RoPE and the record of an index key; composed of the ops' refs."""

from torch import Tensor

from kernels.formats import e2m1, fp8_scaled, mxfp4, ue8m0
from kernels.hadamard.ref import hadamard
from kernels.rmsnorm.ref import rmsnorm
from kernels.rope.ref import rope


def key_fp8(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """E4M3 with one FP32 scale a key: the plan's cache.

    Parameters
    ----------
    x : (E, D) FP32
        The compressor's pooling.
    weight : (D,)
    cos, sin : (E, P / 2) FP32
        At position ``entry * ratio``.
    eps : float

    Returns
    -------
    codes : (E, D) uint8
    scale : (E, 1) FP32
    """
    return fp8_scaled.quantise(rope(rmsnorm(x, weight, eps=eps), cos, sin))


def key_fp4(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """MXFP4 of the Hadamard-rotated key, as the model was trained; arguments as :func:`key_fp8`.

    Returns
    -------
    codes : (E, D / 2) uint8, packed
    scales : (E, D / 32) uint8, UE8M0
    """
    codes, scale = mxfp4.quantise(hadamard(rope(rmsnorm(x, weight, eps=eps), cos, sin)))
    return e2m1.pack(codes), ue8m0.encode(scale)
