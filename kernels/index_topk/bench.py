"""The choice beside torch.topk; and the indexer whole, scores and choice, beside the FP32 einsum it replaces."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.formats import e4m3
from kernels.index_logits.bench import HEADS, PAGE, Paged, decode_bytes, paged
from kernels.index_logits.kernel import HEAD_DIM, paged_index_logits
from kernels.index_topk import kernel, ref

K = 512
SHAPES = ((1, 32768), (64, 32768), (1, 262144), (64, 262144))
WHOLE = (1, 64)
WHOLE_ENTRIES = 32768
MISSED = 0.02  # of the choices may differ between FP8 sums of 14 bits and FP32: near ties at the cut


def _launches(C: int) -> int:
    """Launches of a choice: of the runs' largest and of the rest, or of segments and their candidates."""
    if kernel.alone(C, K):
        return 2
    count, launches = C, 1
    while count > kernel.block_of(count, K):
        count, launches = -(-count // kernel.SEGMENT) * K, launches + 1
    return launches


def _topk(T: int, C: int, device: torch.device) -> Case:
    copies = rotation(4 * T * C, device, most=1024)
    scores = [torch.randn(T, C, device=device) for _ in range(copies)]
    visible = torch.full((T,), C, dtype=torch.int32, device=device)
    out = torch.empty(copies, T, K, dtype=torch.int32, device=device)
    best, places = torch.empty(copies, T, K, device=device), torch.empty_like(out, dtype=torch.int64)

    def ours(i: int) -> None:
        kernel.index_topk(scores[i], visible, K, out=out[i])

    def replaced(i: int) -> None:
        torch.topk(scores[i], K, dim=-1, out=(best[i], places[i]))

    def check() -> None:
        ours(0)
        if not torch.equal(out[0].long(), ref.index_topk(scores[0], visible.long(), K)):
            raise ValueError("the choice is not the ref's")

    return Case(
        group="topk",
        name=f"top {K} of {T} x {C}",
        paths={OURS: ours, REPLACED: replaced},
        copies=copies,
        bytes=4.0 * T * (C + K),
        launches={OURS: _launches(C)},
        check=check,
    )


def _wide(step: Paged, B: int, C: int) -> tuple[Tensor, Tensor]:
    """Queries (B, H, D) and keys (B, C, D) in FP32, scales applied: what the einsum reads."""
    pages = step.pages[step.table.flatten().long()]
    split = PAGE * HEAD_DIM
    keys = e4m3.decode(pages[:, :split].contiguous()).view(B, C, HEAD_DIM)
    scale = pages[:, split:].contiguous().view(torch.float32).view(B, C, 1)
    return e4m3.decode(step.q.view(torch.uint8)).squeeze(1), keys.mul_(scale)


def _whole(B: int, C: int, device: torch.device) -> Case:
    copies = rotation(B * C * (HEAD_DIM + 4), device)
    steps = [paged(B, C, device) for _ in range(copies)]
    wide = [_wide(step, B, C) for step in steps]
    out = torch.empty(copies, B, K, dtype=torch.int32, device=device)
    theirs: dict[str, Tensor] = {}

    def ours(i: int) -> None:
        step = steps[i]
        paged_index_logits(*step[:5], page_size=PAGE, fill=False, out=step.out)
        kernel.index_topk(step.out.view(B, C), step.limits.view(B), K, out=out[i])

    def replaced(i: int) -> None:
        q, keys = wide[i]
        dots = torch.einsum("bhd,bcd->bhc", q, keys).relu_()
        scores = torch.einsum("bhc,bh->bc", dots, steps[i].weights.view(B, HEADS))
        theirs["choice"] = torch.topk(scores, K, dim=-1).indices

    def check() -> None:
        ours(0)
        replaced(0)
        chosen = torch.zeros(B, C, dtype=torch.bool, device=device)
        chosen.scatter_(1, out[0].long(), True)
        share = float(chosen.gather(1, theirs["choice"]).float().mean())
        if share < 1 - MISSED:
            raise ValueError(f"only {share:.4f} of torch's choices are ours")

    return Case(
        group="b2_whole",
        name=f"B={B}, top {K} of {C} entries, {HEADS} heads",
        paths={OURS: ours, REPLACED: replaced},
        copies=copies,
        bytes=decode_bytes(B, C) - 4 * B * C + 4 * B * K,  # fused, scores need not be written
        flops={"fp8": 2.0 * B * C * HEADS * HEAD_DIM},
        launches={OURS: 1 + _launches(C)},
        check=check,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield the rows of the top-k's and of the whole indexer's targets."""
    for T, C in SHAPES:
        yield _topk(T, C, device)
    for B in WHOLE:
        yield _whole(B, WHOLE_ENTRIES, device)
