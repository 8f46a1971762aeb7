"""B3: norm, turn, quantiser and cache write of kv in one launch, against its three kernels."""

from collections.abc import Iterator

import torch

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.formats.kv_record import RecordLayout
from kernels.kv_norm_rope_store.kernel import kv_norm_rope_store, kv_norm_rope_store_aligned
from kernels.kv_store.kernel import store, store_aligned
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.kernel import rope
from kernels.rope.ref import cos_sin, inverse_frequencies

EPS, WIDTH, PAGE = 1e-6, 512, 64


def cases(device: torch.device) -> Iterator[Case]:
    """Decode batches and a prefill chunk, into either record."""
    for T in (1, 64, 4096):
        for aligned in (False, True):
            yield _case(T, aligned, device)


def _case(T: int, aligned: bool, device: torch.device) -> Case:
    torch.manual_seed(T)
    size = T * (2 * WIDTH + 4 * 64 + 8 + 576 + (4 if aligned else 8))
    copies = rotation(size, device)
    kv = torch.randn(copies, T, WIDTH, device=device).bfloat16()
    weight = torch.rand(WIDTH, device=device).bfloat16()
    cos, sin = (t.to(device) for t in cos_sin(torch.arange(T), inverse_frequencies(64, 1e4)))
    num_pages = max(64, 2 * T // PAGE)
    slots = torch.randperm(num_pages * PAGE, device=device)[:T]
    bf16 = {"dtype": torch.bfloat16, "device": device}
    normed, turned = (torch.empty(copies, T, WIDTH, **bf16) for _ in range(2))
    page_bytes = RecordLayout(448).page_bytes(PAGE)
    pages = torch.zeros(copies, num_pages, page_bytes, dtype=torch.uint8, device=device)
    data = torch.zeros(copies, num_pages, PAGE, 576, dtype=torch.uint8, device=device)
    scale = torch.zeros(copies, num_pages, PAGE, device=device)

    def ours(i: int, between: torch.dtype = torch.float32) -> None:
        if aligned:
            into = data[i], scale[i], slots
            kv_norm_rope_store_aligned(kv[i], weight, cos, sin, *into, eps=EPS, between=between)
        else:
            kv_norm_rope_store(kv[i], weight, cos, sin, pages[i], slots, eps=EPS, between=between)

    def three_kernels(i: int) -> None:
        rmsnorm(kv[i], weight, eps=EPS, out=normed[i])
        rope(normed[i], cos, sin, out=turned[i])
        if aligned:
            store_aligned(turned[i], data[i], scale[i], slots)
        else:
            store(turned[i], pages[i], slots)

    def check() -> None:
        three_kernels(0)
        stored = data[0] if aligned else pages[0]
        want = stored.clone()
        ours(0, torch.bfloat16)
        if not torch.equal(stored, want):
            raise AssertionError("the fused kernel through BF16 has other bytes than the three")

    return Case(
        group="b3",
        name=f"kv, T={T}, {'aligned' if aligned else '584-byte'} record",
        paths={OURS: ours, REPLACED: three_kernels},
        copies=copies,
        bytes=size,
        launches={OURS: 1, REPLACED: 3},
        check=check,
    )
