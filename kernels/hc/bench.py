"""mHC's mixing product with Sinkhorn, against the peer's product alone, and the streams' update."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.build_spec import FLASH, PRO
from kernels.hc.kernel import expand, mix, partial_sums
from kernels.hc.ref import Mix
from kernels.hc.ref import mix as ref_mix

OPTIONS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 20}
PEER_SPLITS = 16
PEER_BLOCK = 64  # columns; with less than one a split the peer's kernel waits for ever


def cases(device: torch.device) -> Iterator[Case]:
    """Both models at decode and prefill."""
    for sizes in (FLASH, PRO):
        for T in (1, 64, 512, 4096):
            yield _mix(T, sizes.hidden_size, device)
        for T in (1, 4096):
            yield _expand(T, sizes.hidden_size, device)


def _mix(T: int, D: int, device: torch.device) -> Case:
    torch.manual_seed(T + D)
    copies = rotation(8 * T * D + 4 * 24 * 4 * D, device)
    streams = torch.randn(copies, T, 4, D, device=device).bfloat16()
    fn = torch.randn(copies, 24, 4 * D, device=device) * (4 * D) ** -0.5  # a site's own
    base, scale = torch.randn(24, device=device), torch.rand(3, device=device)
    shapes = (T, 4), (T, 4), (T, 4, 4)
    out = [Mix(*(torch.empty(shape, device=device) for shape in shapes)) for _ in range(copies)]
    part = [partial_sums(T, D, device) for _ in range(copies)]

    def ours(i: int) -> None:
        mix(streams[i], fn[i], base, scale, **OPTIONS, out=out[i], part=part[i])

    paths: dict[str, Callable[[int], None]] = {OURS: ours}
    if find_spec("deep_gemm") and 4 * D >= PEER_SPLITS * PEER_BLOCK:
        product = import_module("deep_gemm").tf32_hc_prenorm_gemm
        logits = torch.empty(copies, PEER_SPLITS, T, 24, device=device)
        squares = torch.empty(copies, PEER_SPLITS, T, device=device)

        def peer(i: int) -> None:
            product(streams[i].view(T, 4 * D), fn[i], logits[i], squares[i], num_splits=PEER_SPLITS)

        paths["deepgemm"] = peer

    def check() -> None:
        ours(0)
        want = ref_mix(streams[0, :8].float(), fn[0], base, scale, **OPTIONS)
        for got, wanted in zip(out[0], want, strict=True):
            _require((got[:8] - wanted).abs().max(), 2e-5)
        if "deepgemm" in paths:
            paths["deepgemm"](0)
            exact = streams[0, :8].flatten(1).double() @ fn[0].double().T
            _require((logits[0].sum(0)[:8] - exact).abs().max(), 3e-2)  # TF32

    return Case(
        group="mhc_gemm",
        name=f"T={T}, hidden {D}",
        paths=paths,
        copies=copies,
        bytes=8 * T * D + 4 * 24 * 4 * D + 4 * 24 * T,
        flops={"bf16": 2.0 * T * 4 * D * 24 * 3},
        launches={OURS: 2, "deepgemm": 1},
        check=check,
    )


def _expand(T: int, D: int, device: torch.device) -> Case:
    torch.manual_seed(T + D + 1)
    copies = rotation(18 * T * D, device)
    streams, y = (torch.randn(copies, T, *shape, device=device).bfloat16() for shape in ((4, D), (D,)))
    post, comb = torch.rand(T, 4, device=device), torch.rand(T, 4, 4, device=device)
    out, replaced = torch.empty_like(streams), torch.empty(copies, T, 4, D, device=device)

    def ours(i: int) -> None:
        expand(streams[i], y[i], post, comb, out=out[i])

    def torch_bmm(i: int) -> None:
        wide = post[..., None] * y[i][:, None].float()
        torch.baddbmm(wide, comb.mT, streams[i].float(), out=replaced[i])

    def check() -> None:
        ours(0)
        torch_bmm(0)
        _require((out[0].float() - replaced[0]).abs().max(), 0.1)  # BF16 of values up to 16

    return Case(
        group="mhc_expand",
        name=f"streams' update, T={T}, hidden {D}",
        paths={OURS: ours, REPLACED: torch_bmm},
        copies=copies,
        bytes=18 * T * D + 80 * T,
        launches={OURS: 1, REPLACED: 4},
        check=check,
    )


def _require(error: Tensor, most: float) -> None:
    if not float(error) <= most:
        raise AssertionError(f"off by {float(error):.2e}, expected at most {most:.0e}")
