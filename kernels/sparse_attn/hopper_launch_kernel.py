"""Where attention's Hopper kernels run, B0's too, and the launch of FP8's."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.overlap import overlap
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.sparse_attn.hopper_kernel import attend_hopper_kernel, attend_product_hopper_kernel
from kernels.sparse_attn.hopper_layouts_kernel import LOG2E, UNSHIFT
from kernels.sparse_attn.tiles import BLOCK, check_hopper

TRITON = "3.6."


def stages_of(terms: int, seven: bool) -> int:
    """Tiles of keys in flight: four, but three where seven scales and two terms of q leave no room for more.

    Of 227 KB. For two terms and one scale the fourth gains 2 to 3% (H200, 2026-11-30: 37.3 us against 38.5 at 128
    rows of 64 heads and 640 keys).
    """
    return 3 if seven and terms == 2 else 4


def why_not(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device: None if they can."""
    if not triton.__version__.startswith(TRITON):
        return f"Triton is {triton.__version__}, not {TRITON}x"
    if device.type != "cuda":
        return f"the device is {device.type}"
    found = torch.cuda.get_device_capability(device)
    return None if found == (9, 0) else f"the device is sm_{found[0]}{found[1]}, not sm_90"


class Product(NamedTuple):
    """q_b's product, of which a kernel makes q: (T, H, 512) BF16 with dense heads, (T, 32) FP32 twice, and eps."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    eps: float


def launch(
    q: QuantisedQ | Product,
    pages: Tensor,
    page: int,
    token_scale: Tensor | None,
    idx: Tensor,
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    splits: int,
) -> None:
    """Write attention's results, or its parts if splits > 1; the caller has checked the tensors.

    Parameters
    ----------
    q : QuantisedQ of (T, H, 512), or Product
    pages, token_scale, idx, sinks, scale
        As in :func:`kernels.sparse_attn.kernel.sparse_attn_fp8`; ``idx`` (T, S) holds slots.
    page : int
        Tokens a page.
    out, lse : (T, H, 512) BF16 and (T, H) FP32, or with ``splits`` in front of each
    splits : int
        Parts of each row's keys.

    Raises
    ------
    ValueError
        More splits than 64-key tiles, no keys, an ``out`` that is not BF16, a q that is not aligned.
    """
    rows, num_keys = idx.shape
    heads = len(sinks)
    check_hopper("sparse_attn_fp8", out, splits, num_keys)
    read = {"q": q.q} if isinstance(q, Product) else {"q": q.record, "residual": q.residual}
    for name, tensor in read.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"sparse_attn_fp8: {name} does not start at a multiple of 16 bytes")
    seven = token_scale is None
    units = pages.stride(0) // 16
    if not seven and pages.is_contiguous():
        page, units = 1, pages.shape[2] // 16  # slots are rows: nothing to divide
    tensors = (
        pages.view(torch.bfloat16),
        pages.view(torch.int64) if seven else token_scale,
        idx,
        sinks,
        out,
        lse,
    )
    factor = scale * float(LOG2E.value) * (1.0 if seven else float(UNSHIFT.value))
    grid = rows * triton.cdiv(heads, BLOCK), splits
    options = {"PAGE": page, "SEVEN": seven, "num_warps": 4, **overlap(idx.device)}
    if isinstance(q, Product):
        attend_product_hopper_kernel[grid](
            *(q.q, q.cos, q.sin),
            *tensors,
            *(q.q.stride(0), units, heads, num_keys),
            *(q.eps, factor),
            STAGES=stages_of(1, seven),
            **options,
        )
        return
    record = q.record.view(torch.bfloat16)
    terms = 1 if q.residual is None else 2
    attend_hopper_kernel[grid](
        record,
        record if q.residual is None else q.residual.view(torch.bfloat16),
        q.scale,
        *tensors,
        *(units, heads, num_keys, factor),
        STAGES=stages_of(terms, seven),
        TERMS=terms,
        **options,
    )
