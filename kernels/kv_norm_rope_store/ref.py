"""RMSNorm, RoPE and cache write of kv as one op: the refs that it fuses."""

from torch import Tensor

from kernels.kv_store.ref import store, store_aligned
from kernels.rmsnorm.ref import rmsnorm
from kernels.rope.ref import rope
from kernels.rounding import Round, exact


def normed_and_turned(
    kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float, between: Round = exact
) -> Tensor:
    """What is stored: the norm of (T, K) under weights (K,), turned by cos and sin (T, 32); (T, K) FP32."""
    return rope(rmsnorm(kv, weight, eps=eps, out=between), cos, sin, out=between)


def kv_norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    eps: float,
    between: Round = exact,
) -> None:
    """Normalise, rotate and write rows as records of seven scales, in place.

    Parameters
    ----------
    kv : (T, nope + 64) floating
    weight : (nope + 64,)
    cos, sin : (T, 32) FP32
    pages : (P, page_bytes) uint8
        Changed.
    slots : (T,) int64
    eps : float
    between : Round
        Stores after the norm and after RoPE: BF16 in three launches, none in one.
    """
    store(normed_and_turned(kv, weight, cos, sin, eps=eps, between=between), pages, slots)


def kv_norm_rope_store_aligned(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    data: Tensor,
    token_scale: Tensor,
    slots: Tensor,
    *,
    eps: float,
    between: Round = exact,
) -> None:
    """Normalise, rotate and write rows as aligned records, data (P, p, nope + 128) and token_scale (P, p)."""
    turned = normed_and_turned(kv, weight, cos, sin, eps=eps, between=between)
    store_aligned(turned, data, token_scale, slots)
