"""Sparse attention on the GPU. The contract is kernels/sparse_attn/ref.py; three ways to read K and q.

====================  =====  =========================================  ==========================
function              rung   K                                          q
====================  =====  =========================================  ==========================
sparse_attn_gathered  B0     a BF16 buffer [T, S, K] gathered before    BF16
sparse_attn_widened   B1a    FP8 pages in place, widened in registers   BF16
sparse_attn_fp8       B1     FP8 pages in place, to the tensor cores    FP8, one term or two
====================  =====  =========================================  ==========================

product.py starts from q_b's product instead of q, in one launch on Hopper where that is faster.

p is relative to a running maximum rounded up to a power of two (to one that is not rounded for B1 on Hopper), where
the ref's is relative to the row's final one: both round with the same relative error, not to the same value. Tiles
and splits change the order of sums alone (but for B1 on Hopper): FP32, and where keys are split, parts stored in
BF16. The number of splits is a function of the launch; see :mod:`kernels.sparse_attn.combine_kernel`.
"""

from typing import Literal, get_args

import torch
import triton
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.formats.kv_record import ROPE
from kernels.overlap import overlap
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.sparse_attn import gathered_hopper_kernel as gathered_hopper
from kernels.sparse_attn import hopper_launch_kernel as hopper
from kernels.sparse_attn.bf16_kernel import attend_bf16_kernel
from kernels.sparse_attn.builds import builds
from kernels.sparse_attn.fp8_kernel import attend_fp8_kernel
from kernels.sparse_attn.keys_kernel import check_keys
from kernels.sparse_attn.tiles import ROOM, Room, joined, of_room, room, tile_of

__all__ = ["builds", "path_of", "room", "sparse_attn_fp8", "sparse_attn_gathered", "sparse_attn_widened"]
Path = Literal["hopper", "portable"]
BF16, FP32, INT32, BYTE = torch.bfloat16, torch.float32, torch.int32, torch.uint8


def sparse_attn_gathered(
    q: Tensor,
    keys: Tensor,
    idx: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    path: Path | None = None,
    into: Room | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over gathered keys: :func:`kernels.sparse_attn.ref.sparse_attn` with q, K and p in BF16.

    Parameters
    ----------
    q : (T, H, K) BF16
    keys : (T, S, K) BF16
        Of :func:`kernels.gather_dequantise.kernel.gather_dequantise`: zeros where idx is -1.
    idx : (T, S) int32
        -1: no key; nothing else of it is read.
    sinks : (H,) FP32
    scale : float
        ``head_dim ** -0.5``.
    path : Path or None
        None: the Hopper kernel where :func:`path_of` has one and q and its rows are aligned.
    into : Room or None

    Returns
    -------
    out : (T, H, K) BF16, or as ``into`` has it
    lse : (T, H) FP32
        The Hopper path takes keys whose logit is under -6900 for no keys, and a NaN query gives NaN there even in a
        row without keys, where the ref has 0 and -inf.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; the message has its name, shape, dtype and strides.
    """
    check_option("sparse_attn_gathered", (*get_args(Path), None), path=path)
    check(
        "sparse_attn_gathered",
        dense=("keys", "idx", "sinks", *ROOM),
        q=(q, "T H K", BF16),
        keys=(keys, "T S K", BF16),
        idx=(idx, "T S", INT32),
        sinks=(sinks, "H", FP32),
        **of_room(into, "K"),
    )
    _check_q(q)
    rows, heads, width = q.shape
    into = into or room(rows, heads, idx.shape[1], width, q.device)
    whole = not (q.data_ptr() % 16 or keys.data_ptr() % 16 or q.stride(0) % 16)
    plain = whole and idx.shape[1] > 0 and into.written[0].dtype == BF16
    best = path_of(width, q.device, plain=plain)
    if path == "hopper" and best != "hopper":
        raise ValueError(
            f"sparse_attn_gathered: no Hopper kernel for this call: {hopper.why_not(q.device) or 'its options'}"
        )
    if (path or best) == "portable" or not rows:
        return _bf16(q, keys, None, 1, idx, sinks, scale, None, None, into)
    gathered_hopper.launch(q, keys, idx, sinks, *into.written, scale, into.splits)
    return joined(into, sinks)


def sparse_attn_widened(
    q: Tensor,
    pages: Tensor,
    idx: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    page_table: Tensor | None = None,
    sequence: Tensor | None = None,
    into: Room | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over FP8 pages in place, K widened to BF16 in registers; otherwise as :func:`sparse_attn_gathered`.

    Parameters
    ----------
    q : (T, H, K) BF16
    pages : (P, page_bytes) uint8
        Of :mod:`kernels.formats.kv_record`; rows may be strided by a multiple of 16 bytes.
    idx : (T, S) int32
        Slots (page * page_size + offset), or with a page table rows of the sequence; -1: no key.
    sinks : (H,) FP32
    scale : float
    page_table : (B, M) int32 or None
        Page of each run of page_size rows of a sequence.
    sequence : (T,) int32 or None
        Which sequence each query row belongs to; with ``page_table`` only.
    into : Room or None

    Returns
    -------
    out : (T, H, K) BF16, or as ``into`` has it
    lse : (T, H) FP32

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; the message has its name, shape, dtype and strides.
    """
    check(
        "sparse_attn_widened",
        dense=("sinks", *ROOM),
        q=(q, "T H K", BF16),
        sinks=(sinks, "H", FP32),
        idx=(idx, "T S", INT32),
        **of_room(into, "K"),
    )
    _check_q(q)
    page = check_keys("sparse_attn_widened", q.shape[2], pages, idx, page_table, sequence)
    return _bf16(q, None, pages, page, idx, sinks, scale, page_table, sequence, into)


def _bf16(q, keys, pages, page, idx, sinks, scale, page_table, sequence, into):
    rows, heads, width = q.shape
    into = into or room(rows, heads, idx.shape[1], width, q.device)
    operands = (q, keys, pages, None if pages is None else pages.view(BF16), q.stride(0))
    tile = tile_of(heads, width, q.device, gathered=pages is None)
    chosen = (pages, page, idx, page_table, sequence)
    return _portable(
        attend_bf16_kernel, operands, tile, chosen, sinks, scale, width, into, **overlap(q.device)
    )


def _portable(kernel, operands, tile, chosen, sinks, scale, width, into, **constants):
    """Launch a portable kernel and join parts; ``operands`` are its arguments before the index list's."""
    pages, page, idx, page_table, sequence = chosen
    rows, heads = into.lse.shape
    if rows:
        kernel[(rows * triton.cdiv(heads, tile.heads), into.splits)](
            *operands,
            idx,
            page_table,
            sequence,
            sinks,
            *into.written,
            0 if pages is None else pages.stride(0),
            0 if page_table is None else page_table.stride(0),
            heads,
            idx.shape[1],
            scale,
            NOPE=width - ROPE,
            PAGE=page,
            BLOCK_H=tile.heads,
            BLOCK_S=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **constants,
        )
    return joined(into, sinks) if rows else (into.out, into.lse)


def _check_q(q: Tensor) -> None:
    """Refuse head_dims that have no kernel, and heads that do not lie densely; a row may be strided."""
    if q.shape[2] not in (256, 512) or (q.numel() and q.stride(1) != q.shape[2]):
        raise ValueError(
            f"sparse_attn: q of shape {tuple(q.shape)} and strides {q.stride()}: head_dim must be 256 or 512,"
            " and the heads of a row dense"
        )


def sparse_attn_fp8(
    q: Tensor,
    q_scale: Tensor,
    pages: Tensor,
    idx: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    residual: Tensor | None = None,
    token_scale: Tensor | None = None,
    page_table: Tensor | None = None,
    sequence: Tensor | None = None,
    rope_fp8: bool = False,
    pv_fp8: bool = False,
    path: Path | None = None,
    into: Room | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with q and K nope in FP8, rope and PV in BF16.

    :func:`kernels.sparse_attn.ref.sparse_attn` with ``q_nope`` of a plan's ``fp8`` (or ``fp8x2`` with a residual)
    and BF16 elsewhere.

    Parameters
    ----------
    q : (T, H, K + 64) uint8
        K - 64 E4M3 codes of q / q_scale, then 64 BF16 values of rope / q_scale.
    q_scale : (T, H) FP32
        A power of two a head.
    pages : (P, page_bytes) uint8, or (P, p, K + 64) uint8 with ``token_scale``
        Of :mod:`kernels.formats.kv_record`, or data of the aligned record; pages may be strided by 16 bytes.
    idx : (T, S) int32
        Slots (page * page_size + offset), or with a page table rows of the sequence; -1: no key.
    sinks : (H,) FP32
    scale : float
        ``head_dim ** -0.5``.
    residual : (T, H, K - 64) uint8 or None
        The second term: E4M3 of (q / q_scale - first term).
    token_scale : (P, p) FP32 or None
        The aligned record's scales.
    page_table : (B, M) int32 or None
    sequence : (T,) int32 or None
        Which sequence each query row belongs to; with ``page_table`` only.
    rope_fp8 : bool
        The rope dot in FP8 too, one power-of-two scale a row of 64.
    pv_fp8 : bool
        Probabilities of the nope part rounded to E4M3 of 256 p; the product's operands stay BF16.
    path : Path or None
        None: what :func:`path_of` says. A path that cannot run this call is refused.
    into : Room or None

    Returns
    -------
    out : (T, H, K) BF16, or as ``into`` has it
    lse : (T, H) FP32
        The Hopper path takes keys whose logit is under -6900 for no keys.

    Notes
    -----
    The Hopper path is right for keys with scales up to 2^67 a group of 64, or with ``token_scale`` up to 2^40 a token:
    beyond, a group's part of V is multiplied by less than its scale, or results are infinite or NaN. A NaN query gives
    NaN there even where the ref has 0 and -inf, in a row without keys. The portable path has neither limit.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; the message has its name, shape, dtype and strides.
    """
    check_option("sparse_attn_fp8", (*get_args(Path), None), path=path)
    sizes = check(
        "sparse_attn_fp8",
        dense=("q", "q_scale", "residual", "sinks", *ROOM),
        q=(q, "T H Z", BYTE),
        q_scale=(q_scale, "T H", FP32),
        residual=(residual, f"T H Z-{2 * ROPE}", BYTE),
        sinks=(sinks, "H", FP32),
        idx=(idx, "T S", INT32),
        **of_room(into, f"Z-{ROPE}"),
    )
    width = sizes["Z"] - ROPE
    page = check_keys("sparse_attn_fp8", width, pages, idx, page_table, sequence, token_scale)
    rows, heads, num_keys = *q_scale.shape, idx.shape[1]
    into = into or room(rows, heads, num_keys, width, q.device)
    plain = not (rope_fp8 or pv_fp8) and num_keys > 0 and into.written[0].dtype == BF16
    best = path_of(width, q.device, slots=page_table is None, plain=plain)
    path = path or best
    if path == "hopper" and best != "hopper":
        raise ValueError(
            f"sparse_attn_fp8: no Hopper kernel for this call: {hopper.why_not(q.device) or 'its options'}"
        )
    if path == "portable" or not rows:
        operands = (q, q.view(BF16), residual, q_scale, pages, pages.view(BF16), token_scale)
        terms = 1 if residual is None else 2
        tile = tile_of(heads, width, q.device, gathered=False, terms=terms)
        chosen = (pages, page, idx, page_table, sequence)
        choices = {"ROPE_FP8": rope_fp8, "PV_FP8": pv_fp8}
        return _portable(attend_fp8_kernel, operands, tile, chosen, sinks, scale, width, into, **choices)
    codes = QuantisedQ(q, q_scale, residual)
    hopper.launch(codes, pages, page, token_scale, idx, sinks, *into.written, scale, into.splits)
    return joined(into, sinks)


def path_of(width: int, device: torch.device, *, slots: bool = True, plain: bool = True) -> Path:
    """Which kernel :func:`sparse_attn_fp8` runs: ``"hopper"`` where it can, else ``"portable"``.

    The Hopper kernel needs Triton 3.6, an sm_90 device, head_dim 512, an index list of slots (no page table) and
    the plain options (rope, PV and result in BF16, at least one key).
    """
    return "hopper" if slots and plain and width == 512 and not hopper.why_not(device) else "portable"
