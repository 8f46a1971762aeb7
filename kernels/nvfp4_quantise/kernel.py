"""NVFP4 quantiser, Triton; the contract is :func:`kernels.nvfp4_quantise.ref.quantise`, bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.rmsnorm.kernel import FLOATS, SMS, check_width, num_programs, rows_and_warps

U8, F32 = torch.uint8, torch.float32
OUT_SIGNATURE = {"code_ptr": "*u8", "scale_ptr": "*u8", "gsa_ptr": "*fp32"}


@triton.jit
def store_nvfp4(y, code_ptr, scale_ptr, gsa_ptr, row, num_rows, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Quantise and store whole rows: ``y`` [ROWS, BLOCK_D] FP32, zeros beyond D, for the rows ``row`` [ROWS]."""
    packed, scale, gsa = fmt.nvfp4_rows(y, ROWS, BLOCK_D)
    wide, held = row.to(tl.int64)[:, None], (row < num_rows)[:, None]
    pair, group = tl.arange(0, BLOCK_D // 2)[None, :], tl.arange(0, BLOCK_D // 16)[None, :]
    tl.store(code_ptr + wide * (D // 2) + pair, packed, held & (pair < D // 2))
    byte = scale.to(tl.uint8, bitcast=True)
    tl.store(scale_ptr + wide * (D // 16) + group, byte, held & (group < D // 16))
    tl.store(gsa_ptr + row, gsa, row < num_rows)


@triton.jit
def _nvfp4_quantise_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    x_stride,
    num_rows,
    D,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    col = tl.arange(0, BLOCK_D)[None, :]
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (col < D)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + col, mask, other=0.0).to(tl.float32)
        store_nvfp4(x, code_ptr, scale_ptr, gsa_ptr, row, num_rows, D, ROWS, BLOCK_D)


def launch(num_rows: int, block: int) -> tuple[tuple[int], dict[str, int], dict[str, int]]:
    """Grid, row constants and options of a kernel that quantises whole rows of ``block`` values.

    Many rows hide memory behind each other only if several programs fit an SM: at most 80 registers a thread let
    three programs of eight warps in, 64 two of sixteen.
    """
    rows, warps = rows_and_warps(block, num_rows)
    options = {"num_warps": warps, **fmt.EXACT}
    if num_rows > SMS:
        options["maxnreg"] = 80 if warps <= 8 else 64
    return (num_programs(num_rows, rows, warps),), {"ROWS": rows, "BLOCK_D": block}, options


def quantise(x: Tensor, *, out: Nvfp4Rows | None = None) -> Nvfp4Rows:
    """Store rows as NVFP4; see :func:`kernels.nvfp4_quantise.ref.quantise`.

    Parameters
    ----------
    x : (T, D) BF16 or FP32
        Rows may be strided. 16 divides D, which is at most 32768.
    out : Nvfp4Rows, contiguous, optional

    Returns
    -------
    Nvfp4Rows of (T, D / 2), (T, D / 16), (T,)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; D is over 32768 or no multiple of 16.
    """
    T, D = check("nvfp4_quantise", x=(x, "T D", FLOATS)).values()
    rows_out = allocate("nvfp4_quantise", T, D, x.device, out)
    if T == 0 or D == 0:
        return rows_out
    grid, constants, options = launch(T, triton.next_power_of_2(D))
    _nvfp4_quantise_kernel[grid](x, *rows_out, x.stride(0), T, D, **constants, **options)
    return rows_out


def allocate(op: str, T: int, D: int, device: torch.device, out: Nvfp4Rows | None) -> Nvfp4Rows:
    """``out``, checked, or memory for the NVFP4 of T rows of D values.

    Raises
    ------
    TypeError, ValueError
        A tensor of ``out`` does not fit; D is over the limit or no multiple of 16.
    """
    if D % 16:
        raise ValueError(f"{op}: D = {D} is no multiple of NVFP4's 16 values a scale")
    check_width(op, D)
    if out is None:
        codes, scales = (torch.empty(T, D // values, dtype=U8, device=device) for values in (2, 16))
        return Nvfp4Rows(codes, scales, torch.empty(T, dtype=F32, device=device))
    check(
        op,
        dense=["codes", "scales", "gsa"],
        codes=(out.codes, f"{T} {D // 2}", U8),
        scales=(out.scales, f"{T} {D // 16}", U8),
        gsa=(out.gsa, f"{T}", F32),
    )
    return out


def builds(sizes: Sizes) -> list[Build]:
    """The quantiser before the linears of a layer."""
    found = []
    for name, D in {"hidden": sizes.hidden_size, "q_lora": sizes.q_lora_rank}.items():
        _, constants, options = launch(4096, triton.next_power_of_2(D))
        found.append(
            Build(
                name=f"nvfp4_quantise/{name}/{sizes.name}",
                kernel=_nvfp4_quantise_kernel,
                signature={
                    "x_ptr": "*bf16",
                    **OUT_SIGNATURE,
                    "x_stride": "i32",
                    "num_rows": "i32",
                    "D": "i32",
                },
                constants=constants,
                aligned=("x_ptr", *OUT_SIGNATURE, "x_stride", "D"),
                options=options,
            )
        )
    return found
