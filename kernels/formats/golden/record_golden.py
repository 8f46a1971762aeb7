"""Record what two libraries do: ``python -m kernels.formats.golden.record_golden`` on a GPU with their wheels.

tokenspeed_deepgemm 2.5.0.post20260604 (module deep_gemm) holds quantisers: FP8 per token and per block, FP4 per
token, all with UE8M0 scales. tokenspeed_flashmla 1.0.0.post20260615 (module flash_mla) holds none for the 584-byte
record, so what is recorded is how it reads one: attention to a single key, without a sink, returns that key's
values. ``golden.npz`` is committed; ``test_golden.py`` compares :mod:`kernels.formats` with it.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.formats.kv_record import RecordLayout

FILE = Path(__file__).with_name("golden.npz")
NOPE, ROPE, PAGE = 448, 64, 64
TOKENS = 48  # of one page of 64: the file stays under 300 KB
ROWS, COLS = 32, 512


def inputs(seed: int, rows: int, cols: int, device: str) -> torch.Tensor:
    """BF16 values (rows, cols): 64-value groups from 2^-9 to 2^9, one huge value, a zero group, powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    power = torch.randint(-9, 10, (rows, cols // 64), generator=generator)
    x *= torch.exp2(power.float()).repeat_interleave(64, -1)
    x[0, :64] = 0
    x[1, 5] = 3.0e4
    x[2, :64] = torch.exp2(torch.arange(64) % 16 - 8.0)
    x[3, 64:128] = 448.0
    return x.bfloat16().to(device)


def deep_gemm_bytes() -> dict[str, np.ndarray]:
    """Inputs as BF16 bits, and codes and UE8M0 scales (as FP32) of each quantiser."""
    from deep_gemm.utils import math as quantisers  # type: ignore[import-not-found]

    x = inputs(1, ROWS, COLS, "cuda")
    block = inputs(2, 128, 256, "cuda")
    found = {"x": _bits(x), "block": _bits(block)}
    for group in (64, 128):
        codes, scale = quantisers.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=group)
        found |= {f"fp8_{group}_codes": _bytes(codes), f"fp8_{group}_scale": scale.cpu().numpy()}
    codes, scale = quantisers.per_block_cast_to_fp8(block, use_ue8m0=True)
    found |= {"fp8_block_codes": _bytes(codes), "fp8_block_scale": scale.cpu().numpy()}
    codes, scale = quantisers.per_token_cast_to_fp4(x.float(), use_ue8m0=True, gran_k=32)
    return found | {"fp4_codes": _bytes(codes), "fp4_scale": scale.cpu().numpy()}


def flash_mla_values() -> dict[str, np.ndarray]:
    """A page as :class:`RecordLayout` writes it, and what FlashMLA makes of each token: BF16 bits (TOKENS, 512)."""
    import flash_mla  # type: ignore[import-not-found]

    layout = RecordLayout(NOPE)
    x = inputs(3, TOKENS, NOPE + ROPE, "cuda")
    pages = torch.zeros(1, layout.page_bytes(PAGE), dtype=torch.uint8, device="cuda")
    layout.write(pages, torch.arange(TOKENS, device="cuda"), *layout.encode(x))
    blocks = pages.view(torch.float8_e4m3fn).as_strided(
        (1, PAGE, 1, layout.token_bytes), (pages.shape[1], layout.token_bytes, layout.token_bytes, 1)
    )
    idx = torch.full((TOKENS, 1, 64), -1, dtype=torch.int32, device="cuda")
    idx[:, 0, 0] = torch.arange(TOKENS, device="cuda")
    q = torch.zeros(TOKENS, 1, 64, NOPE + ROPE, dtype=torch.bfloat16, device="cuda")
    schedule, _ = flash_mla.get_mla_metadata()
    out, _ = flash_mla.flash_mla_with_kvcache(
        q, blocks, None, None, NOPE + ROPE, schedule, is_fp8_kvcache=True, indices=idx
    )
    return {"kv": _bits(x), "page": pages.cpu().numpy(), "page_values": _bits(out[:, 0, 0])}


def _bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint16).cpu().numpy()


def _bytes(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).cpu().numpy()


def main() -> int:
    """Write the file; 1 without a GPU. A library that is absent raises: half a file is none."""
    if not torch.cuda.is_available():
        print("record_golden: no CUDA device", file=sys.stderr)
        return 1
    arrays: dict[str, Any] = deep_gemm_bytes() | flash_mla_values()
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
