"""Routing in Triton: scores as one product, then choice and weights in one launch; see :func:`route`.

The contracts are :mod:`kernels.route.ref`'s. Ids are the same; scores and weights are FP32 roundings of FP64 work on
FP32 sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.linear.wide_kernel import fp32_linear

IDS = (torch.int32, torch.int64)
MOST_PLACES = 32


def router_scores(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``sqrt(softplus(x @ W.T))``: (T, D), (E, D) FP32 -> (T, E) FP32.

    Raises
    ------
    TypeError, ValueError
        Another dtype, shape or stride.
    """
    return fp32_linear(x, weight, scores=True, out=out)


@triton.jit
def _store_weights(score, held, weight_ptr, at, SCALING: tl.constexpr):
    """Chosen scores over (their sum + 1e-20), times SCALING: FP64, rounded once."""
    wide = tl.where(held, score, 0.0).to(tl.float64)
    tl.store(weight_ptr + at, (wide / (tl.sum(wide) + 1e-20) * SCALING).to(tl.float32), mask=held)


@triton.jit
def _order(x):
    """FP32 -> int32 that orders alike: -0 as 0, every NaN above all, as a descending sort takes them."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)


@triton.jit
def _route(
    score_ptr,
    bias_ptr,
    id_ptr,
    weight_ptr,
    score_stride,
    SCALING: tl.constexpr,
    PLACES: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_BLOCK)
    inside = expert < E
    score = tl.load(score_ptr + token * score_stride + expert, mask=inside, other=0.0)
    ranked = _order(score + tl.load(bias_ptr + expert, mask=inside, other=0.0)).to(tl.int64)
    # one number per expert, larger is earlier: ties to the smaller index. int64's least: not there, or taken
    gone = tl.full((E_BLOCK,), -(2**63), tl.int64)
    key = tl.where(inside, ranked * 4294967296 + (E_BLOCK - expert), gone)
    chosen = tl.zeros((E_BLOCK,), tl.int32)
    for _ in tl.static_range(PLACES):
        best = key == tl.max(key, 0)
        chosen |= best.to(tl.int32)
        key = tl.where(best, gone, key)
    held = chosen != 0
    at = token * PLACES + tl.cumsum(chosen, 0) - 1
    tl.store(id_ptr + at, expert, mask=held)
    _store_weights(score, held, weight_ptr, at, SCALING)


@triton.jit
def _route_by_table(
    score_ptr,
    token_ptr,
    table_ptr,
    id_ptr,
    weight_ptr,
    score_stride,
    SCALING: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    held = place < PLACES
    row = tl.load(token_ptr + token).to(tl.int64)
    expert = tl.load(table_ptr + row * PLACES + place, mask=held, other=2147483647).to(tl.int32)
    earlier = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (place[None, :] < place[:, None])
    )
    at = token * PLACES + tl.sum(earlier.to(tl.int32), 1)
    tl.store(id_ptr + at, expert, mask=held)
    score = tl.load(score_ptr + token * score_stride + expert, mask=held, other=0.0)
    _store_weights(score, held, weight_ptr, at, SCALING)


def _outputs(
    tokens: int, k: int, scores: Tensor, ids: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    check(
        "route",
        dense=("ids", "weights"),
        device=scores.device,
        ids=(ids, f"{tokens} {k}", torch.int32),
        weights=(weights, f"{tokens} {k}", torch.float32),
    )
    ids = torch.empty(tokens, k, dtype=torch.int32, device=scores.device) if ids is None else ids
    return ids, torch.empty(
        tokens, k, dtype=torch.float32, device=scores.device
    ) if weights is None else weights


def route(
    scores: Tensor,
    bias: Tensor,
    k: int,
    *,
    scaling: float,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``choose_experts`` and ``expert_weights`` in one launch.

    Parameters
    ----------
    scores : (T, E) FP32, rows may be strided
    bias : (E,) FP32
        Steers the choice alone.
    k : int
        From 1 to E, at most 32.
    scaling : float
        ``routed_scaling_factor``.
    ids : (T, k) int32, optional; weights : (T, k) FP32, optional
        Dense; they are written and returned.

    Returns
    -------
    (T, k) int32, ascending, ties to the smaller index; (T, k) FP32

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit, or k is out of range.
    """
    T, E = check("route", scores=(scores, "T E", torch.float32), bias=(bias, "E", torch.float32)).values()
    if not 1 <= k <= min(E, MOST_PLACES):
        raise ValueError(f"route: k = {k}; expected 1 to {min(E, MOST_PLACES)}")
    ids, weights = _outputs(T, k, scores, ids, weights)
    if T:
        block = triton.next_power_of_2(E)
        _route[(T,)](
            scores, bias, ids, weights, scores.stride(0), SCALING=scaling, PLACES=k, E=E, E_BLOCK=block
        )
    return ids, weights


def route_by_table(
    scores: Tensor,
    tokens: Tensor,
    table: Tensor,
    *,
    scaling: float,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``hash_experts`` and ``expert_weights`` in one launch.

    Parameters
    ----------
    scores : (T, E) FP32, rows may be strided
    tokens : (T,) int32 or int64
        Token ids.
    table : (V, k) int32 or int64, dense, k at most 32
    scaling, ids, weights : as :func:`route`

    Returns
    -------
    (T, k) int32, ascending; (T, k) FP32
    """
    sizes = check(
        "route_by_table",
        dense=("tokens", "table"),
        scores=(scores, "T E", torch.float32),
        tokens=(tokens, "T", IDS),
        table=(table, "V k", IDS),
    )
    T, k = sizes["T"], sizes["k"]
    if not 1 <= k <= MOST_PLACES:
        raise ValueError(f"route_by_table: k = {k}; expected 1 to {MOST_PLACES}")
    ids, weights = _outputs(T, k, scores, ids, weights)
    if T:
        block = triton.next_power_of_2(k)
        stride = scores.stride(0)
        _route_by_table[(T,)](
            scores, tokens, table, ids, weights, stride, SCALING=scaling, PLACES=k, BLOCK=block
        )
    return ids, weights


def builds(sizes: Sizes) -> list[Build]:
    """Both ways to choose."""
    k, experts = sizes.num_experts_per_tok, sizes.n_routed_experts
    outputs = {"id_ptr": "*i32", "weight_ptr": "*fp32", "score_stride": "i32"}
    return [
        Build(
            name=f"route/scores/{sizes.name}",
            kernel=_route,
            signature={"score_ptr": "*fp32", "bias_ptr": "*fp32"} | outputs,
            constants={"SCALING": 1.5, "PLACES": k, "E": experts, "E_BLOCK": triton.next_power_of_2(experts)},
            aligned=("score_ptr", "bias_ptr", "id_ptr", "weight_ptr", "score_stride"),
        ),
        Build(
            name=f"route/table/{sizes.name}",
            kernel=_route_by_table,
            signature={"score_ptr": "*fp32", "token_ptr": "*i32", "table_ptr": "*i32"} | outputs,
            constants={"SCALING": 1.5, "PLACES": k, "BLOCK": triton.next_power_of_2(k)},
            aligned=("score_ptr", "table_ptr", "id_ptr", "weight_ptr"),
        ),
    ]
