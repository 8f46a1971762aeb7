"""P5: streams' sum, RMSNorm and quantiser in one launch, against torch's ops and its own three kernels.

What is replaced is the unfused path as the plan counts it, seven launches and more: torch's ops for the sum and the
norm, and the formats' torch ops for NVFP4. Our own unfused kernels are a fairer peer, shown beside it, as are torch's
sum and norm before our quantiser.
"""

from collections.abc import Iterator

import torch

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.build_spec import FLASH, PRO
from kernels.formats import nvfp4
from kernels.hc.kernel import collapse
from kernels.mhc_rmsnorm_quantise_nvfp4.kernel import mhc_rmsnorm_quantise
from kernels.nvfp4_quantise.kernel import quantise
from kernels.rmsnorm.kernel import rmsnorm

EPS = 1e-6
BF16 = torch.bfloat16


def cases(device: torch.device) -> Iterator[Case]:
    """Both models at T = 1, a decode batch, and prefill; prefill with the BF16 copy too."""
    for sizes in (FLASH, PRO):
        for T in (1, 64, 4096):
            yield _case(T, sizes.hidden_size, False, device)
        yield _case(4096, sizes.hidden_size, True, device)


def _case(T: int, D: int, copy: bool, device: torch.device) -> Case:
    torch.manual_seed(T + D)
    size = T * (8 * D + 16 + D // 2 + D // 16 + 4 + 2 * D * copy)
    copies = rotation(size, device)
    streams = torch.randn(copies, T, 4, D, device=device).bfloat16()
    pre, weight = torch.rand(T, 4, device=device), torch.rand(D, device=device).bfloat16()
    stored = BF16 if copy else None
    out = [mhc_rmsnorm_quantise(one, pre, weight, eps=EPS, copy=stored) for one in streams]
    x, normed = (torch.zeros(copies, T, D, dtype=BF16, device=device) for _ in range(2))
    codes = [quantise(row) for row in x]

    def ours(i: int) -> None:
        mhc_rmsnorm_quantise(streams[i], pre, weight, eps=EPS, out=out[i])

    def three_kernels(i: int) -> None:
        collapse(streams[i], pre, out=x[i])
        rmsnorm(x[i], weight, eps=EPS, out=normed[i])
        quantise(normed[i], out=codes[i])

    def torch_sum(i: int) -> None:
        x[i].copy_((streams[i] * pre[..., None]).sum(1))
        normed[i].copy_(torch.nn.functional.rms_norm(x[i], (D,), weight, EPS))
        quantise(normed[i], out=codes[i])

    def torch_ops(i: int) -> None:
        x[i].copy_((streams[i] * pre[..., None]).sum(1))
        made, scales, _ = nvfp4.quantise(torch.nn.functional.rms_norm(x[i], (D,), weight, EPS))
        torch.bitwise_or(made[:, ::2], made[:, 1::2] << 4, out=codes[i].codes)  # e2m1.pack waits for the GPU
        codes[i].scales.copy_(scales)

    def check() -> None:
        three_kernels(0)
        fused = mhc_rmsnorm_quantise(streams[0], pre, weight, eps=EPS, between=BF16).rows
        for got, want in zip(fused, codes[0], strict=True):
            if not torch.equal(got, want):
                raise AssertionError("the fused kernel through BF16 has other bits than the three")

    return Case(
        group="p4_p5_prefill" if T == 4096 else "p4_p5_decode" if T == 1 else "p5",
        name=f"P5, T={T}, hidden {D}" + (", with a BF16 copy" if copy else ""),
        paths={
            OURS: ours,
            REPLACED: torch_ops,
            "our unfused kernels": three_kernels,
            "torch's sum and norm": torch_sum,
        },
        copies=copies,
        bytes=size + 2 * D,
        launches={OURS: 1, "our unfused kernels": 3, "torch's sum and norm": 6},
        check=check,
    )
