"""Products of NVFP4 rows and NVFP4 weights inside Triton kernels: see :func:`nvfp4_product`.

E2M1 value x E4M3 scale has six significant bits and lies between 2^-10 and 2688: exact in FP16 as in BF16. FP16
is taken because ``cvt`` gives it from E4M3, two values an instruction: fewer instructions a weight, which is what
bounds decode on Hopper. Operands carry 2^-6, so that no step leaves FP16's range.

``WAY`` is how the codes meet the tensor cores: ``"native"`` (Blackwell: block-scaled dots read the codes),
``"ptx"`` (unpacked in registers, two instructions a code), ``"plain"`` (the same values by Triton operations
alone: what the interpreter runs; also what a GPU can be checked against).
"""

import torch
import triton
import triton.language as tl

from kernels.formats import device as fmt

UNDO = tl.constexpr(2.0**12)  # both operands carry 2^-6


def way(device: torch.device) -> str:
    """``WAY`` for tensors on ``device``."""
    if device.type != "cuda":
        return "plain"
    return "native" if torch.cuda.get_device_capability(device)[0] >= 10 else "ptx"


def codes_for(codes: torch.Tensor, name: str, how: str) -> torch.Tensor:
    """Codes uint8 (..., K/2) as ``how`` addresses them: bytes, or int32 words of eight codes.

    Raises
    ------
    ValueError
        Rows that do not start at multiples of 4 bytes.
    """
    if how == "native":
        return codes
    if codes.data_ptr() % 4 or any(stride % 4 for stride in codes.stride()[:-1]):
        raise ValueError(
            f"{name}: rows of codes must start at multiples of 4 bytes, strides {codes.stride()}"
        )
    return codes.view(torch.int32)


def operands(code: str, x_scale: str, w_scale: str, store: str) -> dict[str, str]:
    """Types of a product's pointers, given those of codes, of both sides' scales and of the result."""
    pointers = {"x_ptr": code, "x_scale_ptr": x_scale, "gsa_ptr": "*fp32"}
    return pointers | {"w_ptr": code, "w_scale_ptr": w_scale, "scale_2_ptr": "*fp32", "out_ptr": store}


def _unpack_two_words() -> str:
    """PTX: words $8, $9 (int32) and FP16 scale pair $10 -> eight FP16 pairs, pair j = code j of both words.

    Bytes of the two words take turns, so that the two values of a pair come from neighbours. Four codes at a time
    become E4M3 bytes of value x 2^-6 (sign to bit 7, magnitude to bits 4 to 2), and ``cvt`` widens two at a time.
    """
    lines = [".reg .b32 w, m, s;", ".reg .b16 a, b;"]
    for selector, first in (("0x5140", 0), ("0x7362", 4)):
        lines.append(f"prmt.b32 w, $8, $9, {selector};")
        for code, magnitude, sign in (
            (first, "shl.b32 m, w, 2;", "shl.b32 s, w, 4;"),
            (first + 1, "shr.u32 m, w, 2;", "mov.b32 s, w;"),
        ):
            lines += [
                magnitude,
                "and.b32 m, m, 0x1C1C1C1C;",
                sign,
                "lop3.b32 m, s, 0x80808080, m, 0xEA;",  # (s & mask) | m
                "mov.b32 {a, b}, m;",
                f"cvt.rn.f16x2.e4m3x2 ${code}, a;",
                f"cvt.rn.f16x2.e4m3x2 ${code + 2}, b;",
                f"mul.f16x2 ${code}, ${code}, $10;",
                f"mul.f16x2 ${code + 2}, ${code + 2}, $10;",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK = tl.constexpr(_unpack_two_words())
REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))


@triton.jit
def _plain(words, scale, CODE: tl.constexpr):
    return (fmt.e2m1_value((words >> (4 * CODE)) & 15) * scale).to(tl.float16)


@triton.jit
def unpack(words, scales, ROWS: tl.constexpr, WORDS: tl.constexpr, WAY: tl.constexpr):
    """Eight FP16 [ROWS, WORDS]: value x scale x 2^-6 of code 0 to 7 of int32 words; E4M3 bytes [ROWS, WORDS/2]."""
    half = scales.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    half = tl.reshape(tl.broadcast_to(half[:, :, None], (ROWS, WORDS // 2, 2)), (ROWS, WORDS))
    if WAY == "ptx":
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            UNPACK, REGISTERS, [words, half], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        scale = half.to(tl.float32) * 0.015625  # 2^-6
        a, b = _plain(words, scale, 0), _plain(words, scale, 1)
        c, d = _plain(words, scale, 2), _plain(words, scale, 3)
        e, f = _plain(words, scale, 4), _plain(words, scale, 5)
        g, h = _plain(words, scale, 6), _plain(words, scale, 7)
    return a, b, c, d, e, f, g, h


@triton.jit
def nvfp4_product(
    w_ptr,
    w_scale_ptr,
    w_row,
    w_stride,
    w_scale_stride,
    x_ptr,
    x_scale_ptr,
    x_row,
    x_stride,
    x_scale_stride,
    ahead,
    first_step,
    steps,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    WAY: tl.constexpr,
):
    """``W[w_row] . x[x_row]`` over ``steps`` of BK columns from ``first_step`` on: FP32 [BN, BT], no gsa, no scale_2.

    Codes are int32 words of eight (bytes of two where WAY is native); ``w_row`` int64 [BN], ``x_row`` int64 [BT];
    ``ahead``: how many rows of the weight lie before the columns of ``x`` that meet it. The weight is dense: where its
    rows are not a WHOLE number of steps, columns from its strides on count as zeros.
    """
    COLS: tl.constexpr = BK // 2 if WAY == "native" else BK // 8
    GROUPS: tl.constexpr = BK // 16
    col = first_step * COLS + tl.arange(0, COLS)
    group = first_step * GROUPS + tl.arange(0, GROUPS)
    w_at = w_ptr + w_row[:, None] * w_stride + col[None, :]
    w_scale_at = w_scale_ptr + w_row[:, None] * w_scale_stride + group[None, :]
    x_at = x_ptr + x_row[:, None] * x_stride + (ahead * w_stride + col)[None, :]
    x_scale_at = x_scale_ptr + x_row[:, None] * x_scale_stride + (ahead * w_scale_stride + group)[None, :]
    acc = tl.zeros((BN, BT), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        if WHOLE:
            w = tl.load(w_at + step * COLS)
            w_scale = tl.load(w_scale_at + step * GROUPS)
            x = tl.load(x_at + step * COLS)
            x_scale = tl.load(x_scale_at + step * GROUPS)
        else:
            inside = (step * COLS + col < w_stride)[None, :]
            group_inside = (step * GROUPS + group < w_scale_stride)[None, :]
            w = tl.load(w_at + step * COLS, mask=inside, other=0)
            w_scale = tl.load(w_scale_at + step * GROUPS, mask=group_inside, other=0)
            x = tl.load(x_at + step * COLS, mask=inside, other=0)
            x_scale = tl.load(x_scale_at + step * GROUPS, mask=group_inside, other=0)
        if WAY == "native":
            w_e4m3 = w_scale.to(tl.float8e4nv, bitcast=True)
            x_e4m3 = x_scale.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(w, w_e4m3, "e2m1", tl.trans(x), x_e4m3, "e2m1", acc)
        else:
            w0, w1, w2, w3, w4, w5, w6, w7 = unpack(w, w_scale, BN, COLS, WAY)
            x0, x1, x2, x3, x4, x5, x6, x7 = unpack(x, x_scale, BT, COLS, WAY)
            acc = tl.dot(w0, tl.trans(x0), acc)
            acc = tl.dot(w1, tl.trans(x1), acc)
            acc = tl.dot(w2, tl.trans(x2), acc)
            acc = tl.dot(w3, tl.trans(x3), acc)
            acc = tl.dot(w4, tl.trans(x4), acc)
            acc = tl.dot(w5, tl.trans(x5), acc)
            acc = tl.dot(w6, tl.trans(x6), acc)
            acc = tl.dot(w7, tl.trans(x7), acc)
    return acc if WAY == "native" else acc * UNDO
