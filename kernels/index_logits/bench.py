"""The scores beside DeepGEMM's: prefill over contiguous keys, decode over pages that both read."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.bench_case import OURS, Case, rotation
from kernels.formats import e4m3
from kernels.index_logits import ref
from kernels.index_logits.hopper_kernel import why_not
from kernels.index_logits.kernel import HEAD_DIM, index_logits, paged_index_logits

HEADS = 64
PAGE = 64
ENTRY_BYTES = HEAD_DIM + 4
PREFILL = ((2048, 32768), (8192, 65536))
DECODE = ((1, 32768), (64, 8192), (64, 32768), (256, 8192), (256, 32768))
CHECKED = 256  # entries of a row compared with the ref
TOLERANCE = 2e-3  # relative L2 of sums with about 14 bits, after ReLU and heads; 1.5e-4 was measured


class Paged(NamedTuple):
    """One decode step: queries of B sequences, their pages at shuffled places, scores."""

    q: Tensor
    pages: Tensor
    table: Tensor
    weights: Tensor
    limits: Tensor
    out: Tensor


def codes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Gaussian E4M3 codes in float8_e4m3fn."""
    return (8 * torch.randn(shape, dtype=torch.float16, device=device)).to(torch.float8_e4m3fn)


def paged(B: int, C: int, device: torch.device) -> Paged:
    """Inputs of one decode step over C entries a sequence."""
    count = B * C // PAGE
    pages = torch.empty(count, PAGE * ENTRY_BYTES, dtype=torch.uint8, device=device)
    split = PAGE * HEAD_DIM
    pages[:, :split] = codes((count, split), device).view(torch.uint8)
    pages[:, split:] = (0.01 + torch.rand(count, PAGE, device=device)).view(torch.uint8)
    table = torch.randperm(count, device=device).to(torch.int32).view(B, C // PAGE)
    weights = torch.randn(B, 1, HEADS, device=device)
    limits = torch.full((B, 1), C, dtype=torch.int32, device=device)
    out = torch.empty(B, 1, C, device=device)
    return Paged(codes((B, 1, HEADS, HEAD_DIM), device), pages, table, weights, limits, out)


def decode_bytes(B: int, C: int) -> float:
    """Read and written at least once: keys with scales, page ids, queries, weights, scores."""
    return B * (C * (ENTRY_BYTES + 4 / PAGE + 4) + HEADS * (HEAD_DIM + 4))


def relative(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def require(name: str, distance: float) -> None:
    """Raise if a result is too far from another."""
    if not distance <= TOLERANCE:
        raise ValueError(f"{name}: relative L2 {distance:.2e} is over {TOLERANCE:.0e}")


def scored(q: Tensor, k: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """The ref's scores of codes."""
    q, k = (e4m3.decode(x.contiguous().view(torch.uint8)) for x in (q, k))
    return ref.index_logits(q, k, weights, key_scale=scale, narrow=True)


def first_keys(step: Paged) -> tuple[Tensor, Tensor]:
    """Codes and scales of the first CHECKED entries of sequence 0, read by hand."""
    page = step.pages[step.table[0, : CHECKED // PAGE].long()]
    split = PAGE * HEAD_DIM
    keys = page[:, :split].reshape(CHECKED, HEAD_DIM)
    return keys.contiguous().view(torch.float8_e4m3fn), page[:, split:].contiguous().view(
        torch.float32
    ).flatten()


def _prefill(T: int, C: int, device: torch.device) -> Case:
    """All keys visible to all rows: the most work."""
    copies = 2
    q = [codes((T, HEADS, HEAD_DIM), device) for _ in range(copies)]
    k = [codes((C, HEAD_DIM), device) for _ in range(copies)]
    scale = 0.01 + torch.rand(C, device=device)
    weights = torch.randn(T, HEADS, device=device)
    limits = torch.full((T,), C, dtype=torch.int32, device=device)
    out = torch.empty(copies, T, C, device=device)
    theirs: dict[str, Tensor] = {}

    def ours(i: int) -> None:
        index_logits(q[i], k[i], scale, weights, limits, fill=False, out=out[i])

    paths: dict[str, Callable[[int], None]] = {OURS: ours}
    if not why_not(q[0]):

        def portable(i: int) -> None:
            index_logits(q[i], k[i], scale, weights, limits, fill=False, out=out[i], path="portable")

        paths["portable"] = portable
    if find_spec("deep_gemm"):
        deep_gemm = import_module("deep_gemm")

        start = torch.zeros_like(limits)

        def peer(i: int) -> None:
            theirs["scores"] = deep_gemm.fp8_mqa_logits(
                q[i], (k[i], scale), weights, start, limits, clean_logits=False
            )

        paths["deepgemm"] = peer

    def check() -> None:
        ours(0)
        want = scored(q[0][:2], k[0][:CHECKED], scale[:CHECKED], weights[:2])
        require("ours against the ref", relative(out[0, :2, :CHECKED], want))
        if "deepgemm" in paths:
            paths["deepgemm"](0)
            require("ours against DeepGEMM", relative(out[0, :64], theirs["scores"][:64, :C]))

    return Case(
        group="b2_prefill",
        name=f"{T} queries x {C} keys, {HEADS} heads",
        paths=paths,
        copies=copies,
        bytes=T * HEADS * (HEAD_DIM + 4) + C * ENTRY_BYTES + 4 * T * C,
        flops={"fp8": 2.0 * T * C * HEADS * HEAD_DIM},
        launches={name: 1 for name in paths},
        check=check,
    )


def _decode(B: int, C: int, device: torch.device) -> Case:
    copies = rotation(decode_bytes(B, C), device)
    steps = [paged(B, C, device) for _ in range(copies)]
    theirs: dict[str, Tensor] = {}

    def ours(i: int) -> None:
        step = steps[i]
        paged_index_logits(*step[:5], page_size=PAGE, fill=False, out=step.out)

    paths: dict[str, Callable[[int], None]] = {OURS: ours}
    if find_spec("deep_gemm"):
        deep_gemm = import_module("deep_gemm")

        lengths = torch.full((B, 1), C, dtype=torch.int32, device=device)  # of each query of a sequence
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        # computed once a step for all layers, so not part of a layer's time
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, processors)
        pages = [step.pages.view(-1, PAGE, 1, ENTRY_BYTES) for step in steps]
        weights = [step.weights.view(B, HEADS) for step in steps]

        def peer(i: int) -> None:
            theirs["scores"] = deep_gemm.fp8_paged_mqa_logits(
                steps[i].q, pages[i], weights[i], lengths, steps[i].table, schedule, C, clean_logits=False
            )

        paths["deepgemm"] = peer

    def check() -> None:
        ours(0)
        keys, scale = first_keys(steps[0])
        want = scored(steps[0].q[0], keys, scale, steps[0].weights[0])
        require("ours against the ref", relative(steps[0].out[0, :, :CHECKED], want))
        if "deepgemm" in paths:
            paths["deepgemm"](0)
            require("ours against DeepGEMM", relative(steps[0].out.view(B, C), theirs["scores"][:, :C]))

    return Case(
        group="b2_decode",
        name=f"B={B}, {C} entries in pages of {PAGE}, {HEADS} heads",
        paths=paths,
        copies=copies,
        bytes=decode_bytes(B, C),
        flops={"fp8": 2.0 * B * C * HEADS * HEAD_DIM},
        launches={name: 1 for name in paths},
        check=check,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield the rows of the B2 logits' targets."""
    for T, C in PREFILL:
        yield _prefill(T, C, device)
    for B, C in DECODE:
        yield _decode(B, C, device)
