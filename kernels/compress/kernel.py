"""The compressor's windows and pooling in one launch, Triton. The contract is kernels/compress/ref.py, in FP32.

A program owns some channels of one entry and reads its slots where the projections left them: no window is copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.compress import step_kernel
from kernels.compress.pool_kernel import CSA_RATIO, HCA_RATIO, WARPS, pooled, tile, window_columns


@triton.jit
def _compress_kernel(
    kv_ptr,
    gate_ptr,
    bias_ptr,
    out_ptr,
    kv_stride,
    gate_stride,
    D,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)  # entry * RATIO * kv_stride outgrows int32 on a long prompt
    slot = tl.arange(0, SLOTS)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    column, there, width = window_columns(slot, channel, D, RATIO, OVERLAP)
    row = (entry * RATIO + slot)[:, None]
    bias = tl.load(bias_ptr + (slot % RATIO)[:, None] * width + column, there, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, there, other=float("-inf")) + bias
    kv = tl.load(kv_ptr + row * kv_stride + column, there, other=0.0)
    tl.store(out_ptr + entry * D + channel, pooled(kv, gate), channel < D)


def compress(
    kv: Tensor, gate: Tensor, position_bias: Tensor, *, ratio: int, overlap: bool, out: Tensor | None = None
) -> Tensor:
    """Pool whole windows: the ref's ``pool(*windows(kv, gate + bias, ratio, overlap))`` in FP32.

    Parameters
    ----------
    kv, gate : ((W + 1) * ratio, 2 * D) FP32 if overlap, else (W * ratio, D)
        Rows may be strided. With overlap the first ``ratio`` rows are the window before the first entry; its gate is
        -inf where there is none. Every entry has a finite gate.
    position_bias : (ratio, 2 * D or D) FP32
        Added to the gate by a token's place in its window.
    ratio : int
    overlap : bool
    out : (W, D) FP32 or None

    Returns
    -------
    (W, D) FP32

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above.
    """
    sizes = check(
        "compress",
        dense=("position_bias", "out"),
        kv=(kv, "R K", torch.float32),
        gate=(gate, "R K", torch.float32),
        position_bias=(position_bias, f"{ratio} K", torch.float32),
    )
    rows, width = sizes["R"], sizes["K"]
    whole = rows // ratio - (1 if overlap else 0)
    if rows % ratio or whole < 0 or (overlap and width % 2):
        raise ValueError(
            f"compress: kv of shape {tuple(kv.shape)} is no run of windows of {ratio} tokens"
            f"{', the one before included, of two series' if overlap else ''}"
        )
    D = width // 2 if overlap else width
    check("compress", dense=("out",), device=kv.device, out=(out, f"{whole} {D}", torch.float32))
    out = torch.empty(whole, D, dtype=torch.float32, device=kv.device) if out is None else out
    if whole and D:
        slots, block = tile(ratio, overlap, D)
        _compress_kernel[(whole, triton.cdiv(D, block))](
            kv,
            gate,
            position_bias,
            out,
            kv.stride(0),
            gate.stride(0),
            D,
            RATIO=ratio,
            OVERLAP=overlap,
            SLOTS=slots,
            BLOCK_D=block,
            num_warps=WARPS,
        )
    return out


def builds(sizes: Sizes) -> list[Build]:
    """CSA's entries and index keys, HCA's entries; and the same of a decode step."""
    found = step_kernel.builds(sizes)
    for name, ratio, D in (
        ("csa", CSA_RATIO, sizes.head_dim),
        ("csa_index", CSA_RATIO, sizes.index_head_dim),
        ("hca", HCA_RATIO, sizes.head_dim),
    ):
        overlap = ratio == CSA_RATIO
        slots, block = tile(ratio, overlap, D)
        found.append(
            Build(
                name=f"compress/{name}/{sizes.name}",
                kernel=_compress_kernel,
                signature={
                    "kv_ptr": "*fp32",
                    "gate_ptr": "*fp32",
                    "bias_ptr": "*fp32",
                    "out_ptr": "*fp32",
                    "kv_stride": "i32",
                    "gate_stride": "i32",
                    "D": "i32",
                },
                constants={"RATIO": ratio, "OVERLAP": overlap, "SLOTS": slots, "BLOCK_D": block},
                aligned=("kv_ptr", "gate_ptr", "bias_ptr", "out_ptr", "kv_stride", "gate_stride", "D"),
                options={"num_warps": WARPS},
            )
        )
    return found
