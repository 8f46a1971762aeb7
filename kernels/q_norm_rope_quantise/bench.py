"""q from q_b's output to what attention reads, in one launch, against the norm's and the turn's kernels (BF16 q)."""

from collections.abc import Iterator

import torch

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.build_spec import FLASH, PRO
from kernels.q_norm_rope_quantise.kernel import norm_rope, norm_rope_quantise
from kernels.q_norm_rope_quantise.ref import quantise
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.kernel import rope
from kernels.rope.ref import cos_sin, inverse_frequencies

EPS, K = 1e-6, 512


def cases(device: torch.device) -> Iterator[Case]:
    """Decode batches of both models and a prefill chunk, one term and two."""
    for T, heads in (
        (2, FLASH.num_attention_heads),
        (64, FLASH.num_attention_heads),
        (128, PRO.num_attention_heads),
    ):
        for residual in (False, True):
            yield _case(T, heads, residual, device)


def _case(T: int, H: int, residual: bool, device: torch.device) -> Case:
    torch.manual_seed(T)
    size = T * H * (2 * K + K + 64 + 4 + (448 if residual else 0)) + T * 4 * 64
    copies = rotation(size, device)
    q = torch.randn(copies, T, H, K, device=device).bfloat16()
    turn = [t.to(device) for t in cos_sin(torch.arange(T) * 31, inverse_frequencies(64, 1e4))]
    out = [norm_rope_quantise(one, *turn, eps=EPS, residual=residual) for one in q]
    normed, turned = torch.empty(copies, T * H, K, device=device), torch.empty_like(q)

    def ours(i: int) -> None:
        norm_rope_quantise(q[i], *turn, eps=EPS, out=out[i])

    def bf16(i: int) -> None:
        norm_rope(q[i], *turn, eps=EPS, out=turned[i])

    def two_kernels(i: int) -> None:
        rmsnorm(q[i].flatten(0, 1), None, eps=EPS, out=normed[i])
        rope(normed[i].view(T, H, K), *turn, out=turned[i])

    def check() -> None:
        ours(0)
        two_kernels(0)
        for got, want in zip(out[0], quantise(turned[0].float(), residual=residual), strict=True):
            if got is not None and want is not None and not torch.equal(got, want):
                raise AssertionError(
                    "the fused kernel has other bits than the quantiser of the unfused values"
                )

    return Case(
        group="q_record",
        name=f"q, T={T}, {H} heads, {'two terms' if residual else 'one term'}",
        paths={OURS: ours, REPLACED: two_kernels, "one launch, BF16": bf16},
        copies=copies,
        bytes=size,
        launches={OURS: 1, REPLACED: 2, "one launch, BF16": 1},
        check=check,
    )
