"""P4: RMSNorm and quantiser in one launch, against torch's ops and its own two kernels, input norm and q_a's.

What is replaced is the unfused path as the plan counts it, the formats' torch ops: the norm, then amax, gsa, scales,
codes, bytes. Our own unfused kernels are a fairer peer, shown beside it: two launches cannot cost three times one,
as a launch alone is 1.4 us here.
"""

from collections.abc import Iterator

import torch

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.build_spec import FLASH, PRO
from kernels.formats import nvfp4
from kernels.nvfp4_quantise.kernel import quantise
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rmsnorm_quantise_nvfp4.kernel import rmsnorm_quantise

EPS = 1e-6


def cases(device: torch.device) -> Iterator[Case]:
    """Both models at T = 1, a decode batch, and prefill."""
    for sizes in (FLASH, PRO):
        for D in (sizes.hidden_size, sizes.q_lora_rank):
            for T in (1, 64, 4096):
                yield _case(T, D, device)


def _case(T: int, D: int, device: torch.device) -> Case:
    torch.manual_seed(T + D)
    size = T * (2 * D + D // 2 + D // 16 + 4)
    copies = rotation(size, device)
    x = torch.randn(copies, T, D, device=device).bfloat16()
    weight = torch.rand(D, device=device).bfloat16()
    out = [rmsnorm_quantise(row, weight, eps=EPS) for row in x]
    normed, codes = torch.empty_like(x), [quantise(row) for row in x]

    def ours(i: int) -> None:
        rmsnorm_quantise(x[i], weight, eps=EPS, out=out[i])

    def two_kernels(i: int) -> None:
        rmsnorm(x[i], weight, eps=EPS, out=normed[i])
        quantise(normed[i], out=codes[i])

    def torch_ops(i: int) -> None:
        wide = torch.nn.functional.rms_norm(x[i], (D,), weight, EPS)
        made, scales, _ = nvfp4.quantise(wide)
        torch.bitwise_or(made[:, ::2], made[:, 1::2] << 4, out=codes[i].codes)  # e2m1.pack waits for the GPU
        codes[i].scales.copy_(scales)

    def check() -> None:
        two_kernels(0)
        fused = rmsnorm_quantise(x[0], weight, eps=EPS, between=torch.bfloat16).rows
        for got, want in zip(fused, codes[0], strict=True):
            if not torch.equal(got, want):
                raise AssertionError("the fused kernel through BF16 has other bits than the two")

    return Case(
        group="p4_p5_prefill" if T == 4096 else "p4_p5_decode" if T == 1 else "p4",
        name=f"P4, T={T}, {D} values",
        paths={OURS: ours, REPLACED: torch_ops, "our unfused kernels": two_kernels},
        copies=copies,
        bytes=size + 2 * D,
        launches={OURS: 1, "our unfused kernels": 2},
        check=check,
    )
