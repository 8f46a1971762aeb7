"""Linear layers in BF16 and FP32: see :func:`bf16_linear`, :func:`fp32_linear`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check, check_option
from kernels.build_spec import Build, Sizes
from kernels.linear.finish_kernel import finish, num_parts, sqrt_softplus

BF16, FP32 = "bf16", "fp32"
# activation rows up to -> (weight rows, activation rows, columns, warps, stages). Tensor cores of Hopper take 64
# weight rows of 4 warps; FP32 sums are FMAs, one column a thread and step, in the same order for any tile.
TILES = {
    BF16: ((16, (64, 16, 128, 4, 4)), (1 << 31, (128, 64, 64, 4, 4))),
    FP32: ((16, (32, 16, 64, 4, 3)), (1 << 31, (64, 32, 32, 4, 3))),
}


def tile_for(kind: str, num_rows: int) -> tuple[int, int, int, int, int]:
    """Tile by format and number of activation rows."""
    return next(tile for most, tile in TILES[kind] if num_rows <= most)


def parts_of(kind: str, n: int, k: int) -> int:
    """Parts that K is cut into at decode; a tile in flight is 16 KB or more here, so two programs do for each SM."""
    bn, _, bk, _, _ = TILES[kind][0][1]
    return num_parts(triton.cdiv(n, bn), k, bk)


@triton.jit(do_not_specialize=["T", "steps"])
def _wide_linear(
    x_ptr,
    w_ptr,
    out_ptr,
    T,
    N,
    K,
    x_stride,
    steps,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    SCORES: tl.constexpr,
):
    part = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    w_row = tl.where(n < N, n, 0).to(tl.int64)
    x_row = tl.where(t < T, t, 0).to(tl.int64)
    col = tl.arange(0, BK)
    first = part * steps * BK
    w_at = w_ptr + w_row[:, None] * K + (first + col)[None, :]
    x_at = x_ptr + x_row[:, None] * x_stride + (first + col)[None, :]
    acc = tl.zeros((BN, BT), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        if WHOLE:
            w = tl.load(w_at + step * BK)
            x = tl.load(x_at + step * BK)
        else:
            inside = (first + step * BK + col < K)[None, :]
            w = tl.load(w_at + step * BK, mask=inside, other=0.0)
            x = tl.load(x_at + step * BK, mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    if SCORES:
        acc = sqrt_softplus(acc.to(tl.float64)).to(tl.float32)
    at = (part * T + t[None, :].to(tl.int64)) * N + n[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (t < T)[None, :])


def _launch(kind: str, x: Tensor, weight: Tensor, out: Tensor, *, scores: bool = False) -> Tensor:
    rows, k = x.shape
    n = weight.shape[0]
    if rows == 0 or n == 0:
        return out
    bn, bt, bk, warps, stages = tile_for(kind, rows)
    parts = parts_of(kind, n, k) if rows <= TILES[kind][0][0] else 1
    target = out if parts == 1 else torch.empty(parts, rows, n, dtype=torch.float32, device=x.device)
    _wide_linear[(triton.cdiv(n, bn), parts, triton.cdiv(rows, bt))](
        x,
        weight,
        target,
        rows,
        n,
        k,
        x.stride(0),
        triton.cdiv(k // parts, bk),
        BN=bn,
        BT=bt,
        BK=bk,
        STAGES=stages,
        WHOLE=k % bk == 0,
        SCORES=scores and parts == 1,
        num_warps=warps,
    )
    if parts > 1:
        finish(target, out, scores=scores)
    return out


def bf16_linear(
    x: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """``x @ W.T`` of BF16 operands, FP32 sums, stored once (compressor and indexer projections).

    Parameters
    ----------
    x : (T, K) bfloat16, rows may be strided
    weight : (N, K) bfloat16, dense
    dtype : bfloat16 or float32
        Of the result.
    out : (T, N), optional
        Dense, of ``dtype``.

    Returns
    -------
    (T, N) bfloat16 or float32

    Raises
    ------
    TypeError, ValueError
        Another dtype, shape or stride.
    """
    check_option("bf16_linear", FLOATS, dtype=dtype)
    check(
        "bf16_linear",
        dense=("weight", "out"),
        x=(x, "T K", torch.bfloat16),
        weight=(weight, "N K", torch.bfloat16),
        out=(out, "T N", dtype),
    )
    return _launch(BF16, x, weight, _result(x, weight, dtype, out))


def fp32_linear(x: Tensor, weight: Tensor, *, scores: bool = False, out: Tensor | None = None) -> Tensor:
    """``x @ W.T`` of FP32 operands by FP32 multiply-adds, no TF32 (lm_head, router).

    Parameters
    ----------
    x : (T, K) FP32, rows may be strided
    weight : (N, K) FP32, dense
    scores : bool
        Store sqrt(softplus) of the sums, taken in FP64 and rounded once: the router's.
    out : (T, N) FP32, optional
        Dense.

    Returns
    -------
    (T, N) FP32

    Raises
    ------
    TypeError, ValueError
        Another dtype, shape or stride.
    """
    check(
        "fp32_linear",
        dense=("weight", "out"),
        x=(x, "T K", torch.float32),
        weight=(weight, "N K", torch.float32),
        out=(out, "T N", torch.float32),
    )
    return _launch(FP32, x, weight, _result(x, weight, torch.float32, out), scores=scores)


def _result(x: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return torch.empty(len(x), len(weight), dtype=dtype, device=x.device) if out is None else out


def builds(sizes: Sizes) -> list[Build]:
    """Indexer and compressor projections in BF16, router and lm_head in FP32, at decode and in batches."""
    d = sizes.hidden_size
    return [
        _build(f"index_weights/T=16/{sizes.name}", BF16, sizes.index_n_heads, d, 16),
        _build(f"compressor/T=64/{sizes.name}", BF16, 2 * sizes.head_dim, d, 64),
        _build(f"router/T=16/{sizes.name}", FP32, sizes.n_routed_experts, d, 16),
        _build(f"lm_head/T=16/{sizes.name}", FP32, 129280, d, 16),
    ]


def _build(name: str, kind: str, n: int, k: int, rows: int) -> Build:
    bn, bt, bk, warps, stages = tile_for(kind, rows)
    parts = parts_of(kind, n, k) if rows <= 16 else 1
    element = {BF16: "*bf16", FP32: "*fp32"}[kind]
    store = "*bf16" if parts == 1 and kind != FP32 else "*fp32"
    pointers = {"x_ptr": element, "w_ptr": element, "out_ptr": store}
    constants = {"BN": bn, "BT": bt, "BK": bk, "STAGES": stages, "WHOLE": k % bk == 0}
    return Build(
        name=f"linear/{kind}/{name}",
        kernel=_wide_linear,
        signature=pointers | dict.fromkeys(("T", "N", "K", "x_stride", "steps"), "i32"),
        constants=constants | {"SCORES": False},
        aligned=(*pointers, "N", "K", "x_stride"),
        options={"num_warps": warps},
    )
