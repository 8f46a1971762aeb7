"""Routed experts of the Flash model in NVFP4 at decode, against torch's products on dequantised BF16 weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.bench_case import OURS, REPLACED, Case
from kernels.build_spec import FLASH
from kernels.formats import nvfp4
from kernels.grouped_ffn.hopper_kernel import MOST_ALONE
from kernels.grouped_ffn.kernel import grouped_ffn
from kernels.linear.bench import assert_close, dequantised, num_bytes, random_weight
from kernels.linear.hopper_kernel import here
from kernels.linear.kernel import Nvfp4Weight
from kernels.nvfp4_quantise.ref import quantise

COPIES = 4  # choices of experts over one set of weights (3.6 GB): at T = 1 already 85 MB each
TOKENS = (1, 2, 4, 8, 16, 32, 64)
LIMIT = 10.0
Chosen = list[tuple[int, Tensor, Tensor]]


def cases(device: str) -> Iterator[Case]:
    """Every batch size, on one set of weights."""
    torch.manual_seed(7)
    experts, d, f = FLASH.n_routed_experts, FLASH.hidden_size, FLASH.moe_intermediate_size
    gate_up = random_weight(experts, 2 * f, d, device=device)
    down = random_weight(experts, d, f, device=device)
    wide = _all_dequantised(gate_up), _all_dequantised(down)
    for T in TOKENS:
        yield _case(T, gate_up, down, wide, device)


def _all_dequantised(weight: Nvfp4Weight) -> Tensor:
    # one scale an expert: a slice keeps its axis, as a matrix of its own has it
    count = len(weight.codes)
    return torch.stack(
        [
            dequantised(Nvfp4Weight(weight.codes[e], weight.scales[e], weight.scale_2[e : e + 1]))
            for e in range(count)
        ]
    )


def _expert(x: Tensor, gate_up: Tensor, down: Tensor, *, store: bool = False) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    return (nvfp4.round(hidden).bfloat16() if store else hidden) @ down.T


def _torch(
    x: Tensor, chosen: Chosen, wide: tuple[Tensor, Tensor], out: Tensor, *, store: bool = False
) -> None:
    """Expert by expert, as inference code in torch does it; the rows of each are known before."""
    out.zero_()
    for expert, rows, weight in chosen:
        out.index_add_(0, rows, _expert(x[rows], wide[0][expert], wide[1][expert], store=store) * weight)


def _case(T: int, gate_up: Nvfp4Weight, down: Nvfp4Weight, wide: tuple[Tensor, Tensor], device: str) -> Case:
    k, experts, d = FLASH.num_experts_per_tok, FLASH.n_routed_experts, FLASH.hidden_size
    rows = [quantise(torch.randn(T, d, device=device)) for _ in range(COPIES)]
    x = [part.values().bfloat16() for part in rows]
    ids = _choices(T, experts, k, device)
    weights = torch.rand(COPIES, T, k, device=device)
    chosen = [_by_expert(ids[i], weights[i]) for i in range(COPIES)]
    active = sum(len(found) for found in chosen) / COPIES
    out = torch.empty(COPIES, T, d, dtype=torch.bfloat16, device=device)
    replaced = torch.empty_like(out)

    def ours(i: int) -> None:
        grouped_ffn(rows[i], ids[i], weights[i], gate_up, down, limit=LIMIT, out=out[i])

    def torch_bf16(i: int) -> None:
        _torch(x[i], chosen[i], wide, replaced[i])

    def check() -> None:
        ours(0)
        _torch(x[0], chosen[0], wide, replaced[0], store=True)
        assert_close(
            out[0], replaced[0], 0.1
        )  # BF16 stores there move one hidden code in twenty by a quarter

    weight_bytes = num_bytes(*gate_up, *down) / experts * active
    # sets that share experts: gate and up of one are read again after the down product of all, and the other way round
    down_bytes = num_bytes(*down) / experts * active
    slot_flops = 2.0 * 3 * d * FLASH.moe_intermediate_size
    return Case(
        group="nvfp4_moe",
        name=f"{k} of {experts} experts, T={T}, {active:.0f} active",
        paths={OURS: ours, REPLACED: torch_bf16},
        copies=COPIES,
        bytes=weight_bytes + num_bytes(*rows[0], ids[0], weights[0], out[0]),
        flops={"bf16": T * k * slot_flops},
        launches={OURS: _launches(T, device)},
        check=check,
        apart=None if COPIES * T * k <= experts else down_bytes,
    )


def _choices(T: int, experts: int, k: int, device: str) -> list[Tensor]:
    """Ids (T, k) int32 ascending of each set; no expert in two sets while there are enough of them."""
    free, found = torch.ones(experts, device=device), []
    for _ in range(COPIES):
        ids = (torch.rand(T, experts, device=device) * free).topk(k).indices
        if COPIES * T * k <= experts:
            free[ids.flatten()] = 0.0
        found.append(ids.sort(1).values.int())
    return found


def _launches(T: int, device: str) -> int:
    """Grouping, gate and up, SwiGLU, down, weighted sum; few tokens need no grouping, on a Hopper no SwiGLU either."""
    if here(torch.device(device)) and T <= MOST_ALONE:
        return 3
    return 4 if T == 1 else 5


def _by_expert(ids: Tensor, weights: Tensor) -> Chosen:
    """Active experts with their rows and BF16 weights (rows, 1)."""
    found = []
    for expert in ids.unique().tolist():
        rows, place = torch.where(ids == expert)
        found.append((expert, rows, weights[rows, place][:, None].bfloat16()))
    return found
