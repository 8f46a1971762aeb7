"""FP8 attention from q_b's product: the kernel of q and attention, or one kernel of both where that is faster.

Bits are the same either way. Measured on an H200 (2026-12-02, us, q's kernel and attention, one kernel): 35.7 and 31.9
for 128 rows of 64 heads and 640 keys, 18.9 and 18.3 for 16, 12.3 and 12.9 for 2: there q's kernel is short, and hidden
in part, and every split makes q again. With two terms of q one kernel takes 50.8 us where two take 42.1.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.q_norm_rope_quantise.kernel import norm_rope_quantise
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.sparse_attn import hopper_launch_kernel as hopper
from kernels.sparse_attn.kernel import path_of, room, sparse_attn_fp8
from kernels.sparse_attn.keys_kernel import check_keys
from kernels.sparse_attn.tiles import ROOM, Room, joined, of_room

OP = "sparse_attn_product"
LEAST = 1024  # heads of all rows from which one kernel is faster
Launches = Literal[1, 2]


def launches_of(rows: int, heads: int, width: int, device: torch.device, *, terms: int = 1) -> Launches:
    """How many launches make q (``rows`` of ``heads`` x ``width``) and attention of a plain call, joins left out."""
    return 1 if terms == 1 and rows * heads >= LEAST and path_of(width, device) == "hopper" else 2


def sparse_attn_product(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    idx: Tensor,
    sinks: Tensor,
    *,
    eps: float,
    scale: float,
    residual: bool = False,
    token_scale: Tensor | None = None,
    rope_fp8: bool = False,
    pv_fp8: bool = False,
    launches: Launches | None = None,
    codes: QuantisedQ | None = None,
    into: Room | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`kernels.q_norm_rope_quantise.kernel.norm_rope_quantise`, then attention over slots as ``sparse_attn_fp8``.

    Parameters
    ----------
    q : (T, H, K) BF16 or FP32
        q_b's product. Tokens may be strided, their heads are dense.
    cos, sin : (T, 32) FP32
    pages, idx, sinks, scale, token_scale, rope_fp8, pv_fp8, into
        As in :func:`kernels.sparse_attn.kernel.sparse_attn_fp8`; ``idx`` holds slots.
    eps : float
        Of the norm; positive.
    residual : bool
        q in two terms.
    launches : 1, 2 or None
        q made inside attention's kernel, or by its own; None: what is faster. One that cannot be is refused.
    codes : QuantisedQ or None
        Where q's own kernel writes, if it runs; ``residual`` is then what this has.

    Returns
    -------
    out : (T, H, K) BF16, or as ``into`` has it
    lse : (T, H) FP32

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; the message has its name, shape, dtype and strides.
    """
    check_option(OP, (*get_args(Launches), None), launches=launches)
    sizes = check(
        OP,
        dense=("cos", "sin", "sinks", *ROOM),
        aligned=None,  # this and the next named, as the unpacked names could be theirs
        device=None,
        q=(q, "T H K", FLOATS),
        cos=(cos, "T 32", torch.float32),
        sin=(sin, "T 32", torch.float32),
        sinks=(sinks, "H", torch.float32),
        idx=(idx, "T S", torch.int32),
        **of_room(into, "K"),
    )
    page = check_keys(OP, sizes["K"], pages, idx, None, None, token_scale)
    rows, heads, width = (sizes[letter] for letter in "THK")
    into = into or room(rows, heads, sizes["S"], width, q.device)
    residual = residual if codes is None else codes.residual is not None
    plain = not (rope_fp8 or pv_fp8) and sizes["S"] > 0 and into.written[0].dtype == torch.bfloat16
    whole = q.dtype == torch.bfloat16 and not q.data_ptr() % 16 and q.stride(1) == width
    can = plain and whole and not residual and path_of(width, q.device) == "hopper"
    if launches == 1 and not can:
        raise ValueError(
            f"{OP}: no kernel makes q and attention of this call: {hopper.why_not(q.device) or 'its options'}"
        )
    if rows and can and (launches or launches_of(rows, heads, width, q.device)) == 1:
        product = hopper.Product(q, cos, sin, eps)
        hopper.launch(product, pages, page, token_scale, idx, sinks, *into.written, scale, into.splits)
        return joined(into, sinks)
    made = norm_rope_quantise(q, cos, sin, eps=eps, residual=residual, out=codes)
    return sparse_attn_fp8(
        made.record,
        made.scale,
        pages,
        idx,
        sinks,
        scale=scale,
        residual=made.residual,
        token_scale=token_scale,
        rope_fp8=rope_fp8,
        pv_fp8=pv_fp8,
        into=into,
    )
