"""FP8 quantiser, Triton; the contract is :func:`kernels.fp8_quantise.ref.quantise`, bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check
from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.formats.fp8_block import GROUP
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.rmsnorm.row_kernel import columns, group_max, load_row, paired

CHUNK = 1024  # values of a row that a program takes: 16 a thread of two warps
CONSTANTS = {"GROUPS": CHUNK // 16}
OPTIONS = {"num_warps": 2, **fmt.EXACT}
OUT_SIGNATURE = {"code_ptr": "*u8", "scale_ptr": "*fp32"}


@triton.jit
def store_fp8(y, amax, code_ptr, scale_ptr, row, D, GROUPS: tl.constexpr, FIRST: tl.constexpr = 0):
    """Quantise and store groups of 16 from FIRST on of the row ``row`` (int64), eight under a scale.

    FP32 [GROUPS, 2, 8], zeros beyond D; the groups' largest magnitudes, NaN if one is.
    """
    blocks: tl.constexpr = GROUPS // 8
    top = fmt.abs_max(tl.reshape(amax, (blocks, 8)), 1)
    scale = fmt.power_of_two_scale(fmt.floored(top, fmt.AMAX_FLOOR), 448.0)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)  # a power of two: no product is rounded
    scaled = tl.reshape(y, (blocks, 8, 2, 8)) * inverse[:, None, None, None]
    code = tl.reshape(fmt.e4m3(scaled).to(tl.uint8, bitcast=True), (GROUPS, 2, 8))
    col = FIRST * 16 + columns(GROUPS)
    tl.store(code_ptr + row * D + col, code, col < D)
    block = FIRST // 8 + tl.arange(0, blocks)
    tl.store(scale_ptr + row * (D // 128) + block, scale, block < D // 128)


@triton.jit
def _fp8_quantise_kernel(x_ptr, code_ptr, scale_ptr, x_stride, D, GROUPS: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # row * stride outgrows int32
    run: tl.constexpr = GROUPS * (8 if x_ptr.dtype.element_ty == tl.int32 else 16)
    left = D - chunk * GROUPS * 16
    x = load_row(x_ptr + row * x_stride + chunk * run, left, GROUPS)
    at, scale_at = (
        code_ptr + row * D + chunk * GROUPS * 16,
        scale_ptr + row * (D // 128) + chunk * (GROUPS // 8),
    )
    store_fp8(x, group_max(x, GROUPS), at, scale_at, 0, left, GROUPS)


def quantise(x: Tensor, *, out: Fp8Rows | None = None) -> Fp8Rows:
    """Store rows as FP8; see :func:`kernels.fp8_quantise.ref.quantise`.

    Parameters
    ----------
    x : (T, D) BF16 or FP32
        Rows may be strided. 128 divides D.
    out : Fp8Rows, contiguous, optional

    Returns
    -------
    Fp8Rows of (T, D), (T, D / 128)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; D is no multiple of 128.
    """
    T, D = check("fp8_quantise", x=(x, "T D", FLOATS)).values()
    rows = allocate("fp8_quantise", T, D, x.device, out)
    if T == 0 or D == 0:
        return rows
    from_x = paired(x)
    _fp8_quantise_kernel[(T, triton.cdiv(D, CHUNK))](
        from_x, *in_bytes(rows), from_x.stride(0), D, **CONSTANTS, **OPTIONS, **overlap(x.device)
    )
    return rows


def in_bytes(rows: Fp8Rows) -> tuple[Tensor, Tensor]:
    """Codes as uint8, and scales: a kernel's outputs."""
    return rows.codes.view(torch.uint8), rows.scales


def allocate(op: str, T: int, D: int, device: torch.device, out: Fp8Rows | None) -> Fp8Rows:
    """``out``, checked, or memory for the FP8 of T rows of D values.

    Raises
    ------
    TypeError, ValueError
        A tensor of ``out`` does not fit; D is no multiple of 128.
    """
    if D % GROUP:
        raise ValueError(f"{op}: D = {D} is no multiple of FP8's {GROUP} values a scale")
    if out is None:
        codes = torch.empty(T, D, dtype=torch.float8_e4m3fn, device=device)
        return Fp8Rows(codes, torch.empty(T, D // GROUP, device=device))
    check(
        op,
        dense=["codes", "scales"],
        device=device,
        codes=(out.codes, f"{T} {D}", torch.float8_e4m3fn),
        scales=(out.scales, f"{T} {D // GROUP}", torch.float32),
    )
    return out


def builds(sizes: Sizes) -> list[Build]:
    """The quantiser before the linears of a layer, of any width."""
    pointers = {"x_ptr": "*i32", **OUT_SIGNATURE}
    return [
        Build(
            name=f"fp8_quantise/{sizes.name}",
            kernel=_fp8_quantise_kernel,
            signature={**pointers, "x_stride": "i32", "D": "i32"},
            constants={"PDL": True, **CONSTANTS},
            aligned=(*pointers, "x_stride", "D"),
            options={**OPTIONS, **OVERLAPPED},
        )
    ]
