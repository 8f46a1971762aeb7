"""q_b and o_b of the Flash model in NVFP4 at decode, against torch on the dequantised BF16 weight."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.build_spec import FLASH
from kernels.formats import e2m1, nvfp4
from kernels.linear.kernel import Nvfp4Weight, nvfp4_linear
from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise

TOKENS = (1, 4, 16)


def random_weight(*shape: int, device: str) -> Nvfp4Weight:
    """(..., N, K) of random codes and of scales from 0.5 to 2, sized so that products are near 1."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0x30, 0x41, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8, device=device)
    count = shape[0] if len(shape) == 3 else 1
    return Nvfp4Weight(codes, scales, torch.full((count,), 0.3 * shape[-1] ** -0.5, device=device))


def dequantised(weight: Nvfp4Weight) -> Tensor:
    """(N, K) BF16 of one matrix."""
    values = nvfp4.scaled_values(e2m1.unpack(weight.codes), weight.scales)
    return (values * weight.scale_2).bfloat16()


def assert_close(got: Tensor, want: Tensor, most: float) -> None:
    """Raise if the relative L2 distance is over ``most``."""
    distance = float((got.double() - want.double()).norm() / want.double().norm())
    if not distance <= most:
        raise AssertionError(f"relative L2 {distance:.2e}, expected at most {most:.0e}")


def num_bytes(*tensors: Tensor) -> int:
    """Sum of the tensors' sizes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cases(device: str) -> Iterator[Case]:
    """Both linears at every batch size."""
    heads = FLASH.num_attention_heads * FLASH.head_dim
    low_rank = FLASH.o_groups * FLASH.o_lora_rank
    for name, n, k, launches in (
        ("q_b", heads, FLASH.q_lora_rank, 1),
        ("o_b", FLASH.hidden_size, low_rank, 2),
    ):
        for T in TOKENS:
            yield _case(name, T, n, k, launches, device)


def _case(name: str, T: int, n: int, k: int, launches: int, device: str) -> Case:
    torch.manual_seed(n + T)
    copies = rotation(n * k * 9 // 16, device)
    weights = [random_weight(n, k, device=device) for _ in range(copies)]
    wide = [dequantised(weight) for weight in weights]
    rows = [quantise(torch.randn(T, k, device=device)) for _ in range(copies)]
    x = [part.values().bfloat16() for part in rows]
    out = torch.empty(copies, T, n, dtype=torch.bfloat16, device=device)
    replaced = torch.empty_like(out)

    def ours(i: int) -> None:
        nvfp4_linear(rows[i], weights[i], out=out[i])

    def torch_bf16(i: int) -> None:
        torch.mm(x[i], wide[i].T, out=replaced[i])

    def check() -> None:
        ours(0)
        torch_bf16(0)
        assert_close(out[0], replaced[0], 1e-2)  # operands and result rounded to BF16 there

    return Case(
        group="nvfp4_linear",
        name=f"{name} [{n} x {k}], T={T}",
        paths={OURS: ours, REPLACED: torch_bf16},
        copies=copies,
        bytes=_bytes(rows[0], weights[0]) + num_bytes(out[0]),
        flops={"bf16": 2.0 * T * n * k},
        launches={OURS: launches, REPLACED: 1},
        check=check,
    )


def _bytes(rows: Nvfp4Rows, weight: Nvfp4Weight) -> int:
    return num_bytes(*rows, *weight)
