"""NVFP4 codes in registers: every code with every scale, by Triton's operations, and the PTX step by step."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels._check import assert_bitwise, assert_differs
from kernels.formats import e2m1, nvfp4
from kernels.linear.nvfp4_kernel import UNPACK, unpack


def test_every_code_meets_every_scale_exactly(accelerator):
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    got = unpacked(e2m1.pack(codes).to(accelerator), scales.to(accelerator), "plain")
    assert_bitwise(got.float().cpu() * 64, nvfp4.scaled_values(codes, scales))


@triton.jit
def _store_unpacked(w_ptr, s_ptr, y_ptr, ROWS: tl.constexpr, WORDS: tl.constexpr, WAY: tl.constexpr):
    row, word = tl.arange(0, ROWS)[:, None], tl.arange(0, WORDS)[None, :]
    w = tl.load(w_ptr + row * WORDS + word)
    s = tl.load(s_ptr + row * (WORDS // 2) + tl.arange(0, WORDS // 2)[None, :])
    a, b, c, d, e, f, g, h = unpack(w, s, ROWS, WORDS, WAY)
    at = y_ptr + (row * WORDS + word) * 8
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)
    tl.store(at + 4, e)
    tl.store(at + 5, f)
    tl.store(at + 6, g)
    tl.store(at + 7, h)


def unpacked(codes, scales, how):
    """FP16 [R, K] of all columns."""
    y = torch.zeros(len(codes), 2 * codes.shape[1], dtype=torch.float16, device=codes.device)
    words = codes.view(torch.int32)
    _store_unpacked[(1,)](words, scales, y, ROWS=len(codes), WORDS=words.shape[1], WAY=how)
    return y


def run_ptx(text, words, scale):
    """The PTX by hand, a lane each: words (2, lanes) uint32, scale (lanes,) FP16 -> (8, lanes, 2) FP16."""
    lanes = words.shape[1]
    register = {"$8": words[0], "$9": words[1]}

    def value(name):
        return np.uint32(int(name, 0)) if name[0].isdigit() else register[name]

    for step in re.findall(r"(\w+)[\w.]* ([^;]+);", text):
        what, where = step[0], [part.strip(" {}") for part in step[1].split(",")]
        if what == "reg":
            continue
        if what == "prmt":
            both = np.stack([register[where[1]], register[where[2]]], 1).view(np.uint8)
            order = [int(where[3], 0) >> 4 * byte & 7 for byte in range(4)]
            register[where[0]] = np.ascontiguousarray(both[:, order]).view(np.uint32)[:, 0]
        elif what == "mov" and where[0] == "a":
            register["a"], register["b"] = register["m"] & 0xFFFF, register["m"] >> 16
        elif what == "mov":
            register[where[0]] = value(where[1])
        elif what in ("shl", "shr", "and"):
            operation = {"shl": np.left_shift, "shr": np.right_shift, "and": np.bitwise_and}[what]
            register[where[0]] = operation(value(where[1]), value(where[2]))
        elif what == "lop3":
            assert where[4] == "0xEA"  # (0xF0 & 0xCC) | 0xAA: the table of (a & b) | c
            register[where[0]] = (value(where[1]) & value(where[2])) | value(where[3])
        elif what == "cvt":
            pair = register[where[1]].astype(np.uint16).view(np.uint8).view(ml_dtypes.float8_e4m3fn)
            register[where[0]] = pair.reshape(lanes, 2).astype(np.float16)  # low byte first
        else:
            assert (what, where[2]) == ("mul", "$10")
            register[where[0]] = register[where[1]] * scale[:, None]
    return np.stack([register[f"${j}"] for j in range(8)])


def test_the_ptx_gives_the_values_by_hand():
    rng = np.random.default_rng(8)
    words = rng.integers(0, 2**32, (2, 4096), dtype=np.uint32)
    scale = np.arange(256, dtype=np.uint8).repeat(16)
    half = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    got = run_ptx(UNPACK.value, words, half)
    codes = words[None] >> 4 * np.arange(8, dtype=np.uint32)[:, None, None] & 15  # [8, 2, lanes]
    codes, scales = (torch.from_numpy(part.astype(np.uint8)) for part in (codes, scale))
    values = nvfp4.scaled_values(codes.permute(2, 1, 0).reshape(-1, 16), scales[:, None])  # word by word
    want = values.view(-1, 2, 8).permute(2, 0, 1) / 64
    assert_bitwise(torch.from_numpy(got.astype(np.float32)), want)
    for right, wrong in (
        ("shl.b32 m, w, 2", "shl.b32 m, w, 1"),
        ("0x5140", "0x5410"),
        ("0x80808080", "0x00808080"),
    ):
        assert right in UNPACK.value
        broken = torch.from_numpy(run_ptx(UNPACK.value.replace(right, wrong), words, half).astype(np.float32))
        assert_differs(broken, want)


@pytest.mark.gpu
def test_packed_arithmetic_equals_plain(accelerator):
    if accelerator == "cpu":
        pytest.skip("no GPU: the interpreter runs no PTX")
    codes = torch.randint(0, 256, (256, 64), dtype=torch.uint8, device=accelerator)
    scales = torch.arange(256, dtype=torch.uint8, device=accelerator)[:, None].expand(256, 8).contiguous()
    one, other = (unpacked(codes, scales, how).float().cpu() for how in ("ptx", "plain"))
    one, other = (
        values.view(256, -1, 16).sort(-1).values for values in (one, other)
    )  # of a group, in any order
    assert_bitwise(one, other)
