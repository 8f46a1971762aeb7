"""NVFP4 quantiser, Triton; the contract is :func:`kernels.nvfp4_quantise.ref.quantise`, bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.formats.nvfp4_kernel import max_nan, nvfp4_row
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.overlap import OVERLAPPED, follow, overlap
from kernels.rmsnorm.kernel import FLOATS, MAX_D, check_width, row_constants
from kernels.rmsnorm.row_kernel import group_max, load_row, paired, row_top

U8, F32 = torch.uint8, torch.float32
MOST_PARTS = 4  # of a row in turns: attention's 128 heads of 512 are two
OUT_SIGNATURE = {"code_ptr": "*i32", "scale_ptr": "*u8", "gsa_ptr": "*fp32"}  # codes eight at a time


@triton.jit
def store_nvfp4(
    y, amax, top, code_ptr, scale_ptr, gsa_ptr, row, D, GROUPS: tl.constexpr, FIRST: tl.constexpr = 0
):
    """Quantise and store groups from FIRST on of the row ``row`` (int64).

    FP32 [GROUPS, 2, 8], zeros beyond D; the groups' amax; the row's.
    """
    word, scale, gsa = nvfp4_row(y, amax, top, GROUPS)
    group = FIRST + tl.arange(0, GROUPS)
    at = group[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(code_ptr + row * (D // 8) + at, word.to(tl.int32, bitcast=True), at < D // 8)
    tl.store(scale_ptr + row * (D // 16) + group, scale, group < D // 16)
    tl.store(gsa_ptr + row, gsa)


@triton.jit
def _nvfp4_quantise_kernel(
    x_ptr, code_ptr, scale_ptr, gsa_ptr, x_stride, D: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows int32 on a long prompt
    x = load_row(x_ptr + row * x_stride, D, GROUPS)
    amax = group_max(x, GROUPS)
    store_nvfp4(x, amax, row_top(amax), code_ptr, scale_ptr, gsa_ptr, row, D, GROUPS)


@triton.jit
def _nvfp4_quantise_long_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    gsa_ptr,
    x_stride,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of up to PARTS runs of GROUPS, read twice: for its largest magnitude, and for its codes."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    run = GROUPS * (8 if x_ptr.dtype.element_ty == tl.int32 else 16)
    top = tl.full((), 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        x = load_row(x_ptr + row * x_stride + part * run, D - part * GROUPS * 16, GROUPS)
        top = max_nan(top, row_top(group_max(x, GROUPS)))
    for part in tl.static_range(PARTS):
        x = load_row(x_ptr + row * x_stride + part * run, D - part * GROUPS * 16, GROUPS)
        amax = group_max(x, GROUPS)
        store_nvfp4(x, amax, top, code_ptr, scale_ptr, gsa_ptr, row, D, GROUPS, FIRST=part * GROUPS)


def quantise(x: Tensor, *, out: Nvfp4Rows | None = None) -> Nvfp4Rows:
    """Store rows as NVFP4; see :func:`kernels.nvfp4_quantise.ref.quantise`.

    Parameters
    ----------
    x : (T, D) BF16 or FP32
        Rows may be strided. 16 divides D, which is at most 131072.
    out : Nvfp4Rows, contiguous, optional

    Returns
    -------
    Nvfp4Rows of (T, D / 2), (T, D / 16), (T,)

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; D is over 131072 or no multiple of 16.
    """
    T, D = check("nvfp4_quantise", x=(x, "T D", FLOATS)).values()
    rows_out = allocate("nvfp4_quantise", T, D, x.device, out, most=MOST_PARTS * MAX_D)
    if T == 0 or D == 0:
        return rows_out
    parts = triton.cdiv(D, MAX_D)
    constants, options = row_constants(min(D, MAX_D))
    constants |= {"PARTS": parts} if parts > 1 else {}
    from_x = paired(x)
    kernel = _nvfp4_quantise_long_kernel if parts > 1 else _nvfp4_quantise_kernel
    kernel[(T,)](
        from_x, *in_words(rows_out), from_x.stride(0), D=D, **constants, **options, **overlap(x.device)
    )
    return rows_out


def in_words(rows: Nvfp4Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as int32 of eight, scales and gsa: a kernel's outputs."""
    return rows.codes.view(torch.int32), rows.scales, rows.gsa


def allocate(
    op: str, T: int, D: int, device: torch.device, out: Nvfp4Rows | None, *, most: int = MAX_D
) -> Nvfp4Rows:
    """``out``, checked, or memory for the NVFP4 of T rows of D values.

    Raises
    ------
    TypeError, ValueError
        A tensor of ``out`` does not fit; D is over ``most`` or no multiple of 16.
    """
    if D % 16:
        raise ValueError(f"{op}: D = {D} is no multiple of NVFP4's 16 values a scale")
    check_width(op, D, most)
    if out is None:
        codes, scales = (torch.empty(T, D // values, dtype=U8, device=device) for values in (2, 16))
        return Nvfp4Rows(codes, scales, torch.empty(T, dtype=F32, device=device))
    check(
        op,
        dense=["codes", "scales", "gsa"],
        aligned={"codes": 4},
        device=device,
        codes=(out.codes, f"{T} {D // 2}", U8),
        scales=(out.scales, f"{T} {D // 16}", U8),
        gsa=(out.gsa, f"{T}", F32),
    )
    return out


def builds(sizes: Sizes) -> list[Build]:
    """The quantiser before the linears of a layer."""
    found = []
    widths = {"hidden": sizes.hidden_size, "q_lora": sizes.q_lora_rank}
    widths |= {
        "heads": sizes.num_attention_heads * sizes.head_dim,
        "o_lora": sizes.o_groups * sizes.o_lora_rank,
    }
    for name, D in widths.items():
        constants, options = row_constants(min(D, MAX_D))
        if D > MAX_D:
            constants |= {"PARTS": triton.cdiv(D, MAX_D)}
        found.append(
            Build(
                name=f"nvfp4_quantise/{name}/{sizes.name}",
                kernel=_nvfp4_quantise_kernel if D <= MAX_D else _nvfp4_quantise_long_kernel,
                signature={"x_ptr": "*i32", **OUT_SIGNATURE, "x_stride": "i32"},
                constants={"D": D, "PDL": True, **constants},
                aligned=("x_ptr", *OUT_SIGNATURE, "x_stride"),
                options={**options, **OVERLAPPED},
            )
        )
    return found
