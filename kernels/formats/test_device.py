"""Formats inside kernels against the formats in torch: bitwise, over every decade, tie and special value."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels._check import assert_bitwise, draw
from kernels.formats import device as fmt
from kernels.formats import e2m1, e4m3, fp8_block, fp8_scaled, mxfp4, ue8m0

COLS, ROWS = 128, 4  # of a program


@triton.jit
def _at(COLS: tl.constexpr, ROWS: tl.constexpr):
    """Elements [ROWS, COLS] of this program's rows."""
    return (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * COLS + tl.arange(0, COLS)[None, :]


@triton.jit
def _fp8_block(x_ptr, code_ptr, scale_ptr, GROUP: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    x = tl.load(x_ptr + _at(COLS, ROWS))
    code, scale = fmt.fp8_block(tl.reshape(x, (ROWS, COLS // GROUP, GROUP)))
    tl.store(code_ptr + _at(COLS, ROWS), tl.reshape(code, (ROWS, COLS)))
    tl.store(scale_ptr + _at(COLS // GROUP, ROWS), fmt.ue8m0_value(fmt.ue8m0_byte(scale)))


@triton.jit
def _fp8_scaled(x_ptr, code_ptr, scale_ptr, COLS: tl.constexpr, ROWS: tl.constexpr):
    code, scale = fmt.fp8_scaled(tl.load(x_ptr + _at(COLS, ROWS)))
    tl.store(code_ptr + _at(COLS, ROWS), code)
    tl.store(scale_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS), scale)


@triton.jit
def _mxfp4(x_ptr, code_ptr, byte_ptr, COLS: tl.constexpr, ROWS: tl.constexpr):
    packed, byte = fmt.mxfp4_block(tl.load(x_ptr + _at(COLS, ROWS)), ROWS, COLS)
    tl.store(code_ptr + _at(COLS // 2, ROWS), packed)
    tl.store(byte_ptr + _at(COLS // 32, ROWS), byte)


@triton.jit
def _e2m1_codes(x_ptr, y_ptr):
    at = tl.arange(0, 128)
    tl.store(y_ptr + at, fmt.e2m1_code(tl.load(x_ptr + at)))


@triton.jit
def _e4m3_values(code_ptr, y_ptr):
    at = tl.arange(0, 256)
    tl.store(y_ptr + at, fmt.e4m3_value(tl.load(code_ptr + at).to(tl.int32)))


@triton.jit
def _e2m1_values(code_ptr, y_ptr):
    at = tl.arange(0, 16)
    tl.store(y_ptr + at, fmt.e2m1_value(tl.load(code_ptr + at).to(tl.int32)))


@pytest.fixture
def rows(accelerator) -> torch.Tensor:
    """Rows of every decade, with ties, values around powers of two, zeros, tiny, huge, one huge channel, NaN, Inf."""
    ordinary = draw(40, COLS, seed=5, decades=3)
    grid = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    ties = torch.cat((grid, (grid[:7] + grid[1:8]) / 2, torch.zeros(9))).repeat(4)[None]
    edge = torch.ones(4, COLS) * torch.tensor([448.0, 447.99997, 448.00003, 2.0**-8])[:, None]
    powers = torch.from_numpy(2.0 ** np.arange(-64, 64, dtype=np.float32))[None]
    special = torch.zeros(7, COLS)
    special[1], special[2, 3], special[3] = 1e-30, 1e30, 3e38 * torch.sign(draw(COLS, seed=6))
    special[4, 5], special[5, 100], special[6] = float("nan"), float("-inf"), -0.0
    one_ulp = torch.nextafter(powers, torch.tensor(float("inf")))
    tiny = draw(3, COLS, seed=7) * 1e-40
    parts = ordinary, ties, 6 * ties, edge, powers, one_ulp, special, tiny, next_to_ties()
    return torch.cat(parts).to(accelerator)


def next_to_ties() -> torch.Tensor:
    """Rows whose quotients by amax / 448 lie an ulp or none from the middle of two E4M3 values: one operation shows."""
    middle = e4m3.decode(torch.arange(9, 126, dtype=torch.uint8)) + e4m3.decode(
        torch.arange(8, 125, dtype=torch.uint8)
    )
    amax = draw(2, 1, seed=9).abs() + 1
    near = (middle / 2 * (amax / 448)).view(torch.int32) + torch.arange(117, dtype=torch.int32) % 3 - 1
    return torch.cat((amax, near.view(torch.float32), torch.zeros(2, COLS - 118)), 1)


def programs(rows: torch.Tensor) -> tuple[int]:
    assert len(rows) % ROWS == 0
    return (len(rows) // ROWS,)


def empty(rows: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, cols) bytes that no kernel wrote."""
    count = rows.shape[0] * cols * dtype.itemsize
    return torch.full((count,), 0xAA, dtype=torch.uint8, device=rows.device).view(dtype).view(-1, cols)


@pytest.mark.parametrize("group", [64, 128])
def test_fp8_block(rows, group):
    code, scale = empty(rows, COLS, torch.float8_e4m3fn), empty(rows, COLS // group, torch.float32)
    _fp8_block[programs(rows)](rows, code, scale, GROUP=group, COLS=COLS, ROWS=ROWS, **fmt.EXACT)
    wanted = fp8_block.quantise(rows, group)
    assert_bitwise(e4m3.decode(code.view(torch.uint8)).cpu(), e4m3.decode(wanted[0]).cpu())
    assert_bitwise(scale.cpu(), wanted[1].cpu())


def test_fp8_scaled(rows):
    code, scale = empty(rows, COLS, torch.float8_e4m3fn), empty(rows, 1, torch.float32)
    _fp8_scaled[programs(rows)](rows, code, scale, COLS=COLS, ROWS=ROWS, **fmt.EXACT)
    wanted = fp8_scaled.quantise(rows)
    assert_bitwise(e4m3.decode(code.view(torch.uint8)).cpu(), e4m3.decode(wanted[0]).cpu())
    assert_bitwise(scale.cpu(), wanted[1].cpu())


def test_mxfp4(rows):
    code, byte = empty(rows, COLS // 2, torch.uint8), empty(rows, COLS // 32, torch.uint8)
    _mxfp4[programs(rows)](rows, code, byte, COLS=COLS, ROWS=ROWS, **fmt.EXACT)
    wanted = mxfp4.quantise(rows)
    assert_bitwise(code.cpu(), e2m1.pack(wanted[0]).cpu())
    assert_bitwise(byte.cpu(), ue8m0.encode(wanted[1]).cpu())


def test_e2m1_codes(accelerator):
    size = e2m1.decode(torch.arange(8, dtype=torch.uint8))
    middle = torch.cat((size, (size[1:] + size[:-1]) / 2, torch.tensor([1e-45, 7.0, 1e30, float("inf")])))
    around = [middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, -middle)]
    x = torch.cat((*around, -torch.cat(around), torch.tensor([float("nan")])))
    x = torch.nn.functional.pad(x, (0, 128 - len(x))).to(accelerator)
    y = torch.empty(128, dtype=torch.int32, device=accelerator)
    _e2m1_codes[(1,)](x, y)
    assert_bitwise(y.cpu(), e2m1.encode(x).int().cpu())


def test_e4m3_values(accelerator):
    codes = torch.arange(256, dtype=torch.uint8)
    y = torch.empty(256, device=accelerator)
    _e4m3_values[(1,)](codes.to(accelerator), y)
    assert_bitwise(y.cpu(), e4m3.decode(codes))


def test_e2m1_values(accelerator):
    codes = torch.arange(16, dtype=torch.uint8)
    y = torch.empty(16, device=accelerator)
    _e2m1_values[(1,)](codes.to(accelerator), y)
    assert_bitwise(y.cpu(), e2m1.decode(codes))
