"""The interpreter converts as the hardware does; on a GPU the same kernels prove the hardware."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.formats import bf16, e4m3

NARROW = pytest.mark.parametrize(
    ("dtype", "rounded"),
    [
        pytest.param(torch.bfloat16, bf16.round, id="bf16"),
        pytest.param(torch.float8_e4m3fn, lambda x: e4m3.decode(e4m3.encode(x)), id="e4m3"),
    ],
)


@triton.jit
def _store_narrow(x_ptr, y_ptr, z_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + at, at < size).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, at < size)
    tl.store(z_ptr + at, y.to(tl.float32), at < size)


@triton.jit
def _product(a_ptr, b_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(y_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Every finite code of the type, every midpoint, and one FP32 ulp to both sides of each."""
    count = 1 << (8 * dtype.itemsize)
    codes = torch.arange(count, dtype=torch.int32).to(torch.uint8 if count == 256 else torch.uint16)
    values = codes.view(dtype).double()
    values = values[values.isfinite()].unique()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2)).float().numpy()
    around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    special = np.array([0.0, -0.0, 1e-45, 500.0, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    return torch.from_numpy(np.concatenate([*around, special]))


@NARROW
def test_stores_round_to_nearest_even_and_saturate(dtype, rounded, accelerator):
    x = torch.cat((edges(dtype), draw(5000, seed=1, decades=6)))
    y = torch.empty(len(x), dtype=dtype, device=accelerator)
    back = torch.empty(len(x), device=accelerator)
    _store_narrow[(triton.cdiv(len(x), 4096),)](x.to(accelerator), y, back, len(x), BLOCK=4096)
    assert_bitwise(y.float().cpu(), rounded(x))
    assert_bitwise(back.cpu(), rounded(x))


@NARROW
def test_a_dot_multiplies_values(dtype, rounded, accelerator):
    a, b = (draw(32, 32, seed=seed).to(dtype).to(accelerator) for seed in (2, 3))
    y = torch.empty(32, 32, device=accelerator)
    _product[(1,)](a, b, y, SIZE=32)
    exact = a.double() @ b.double()
    magnitude = a.double().abs() @ b.double().abs()
    assert ((y.double() - exact).abs() <= 2.0**-13 * magnitude).all()  # Hopper sums FP8 in about 14 bits


@triton.jit
def _rows(a_ptr, b_ptr, y_ptr, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    rows, k, n = tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, N)
    a, b = tl.load(a_ptr + rows[:, None] * K + k), tl.load(b_ptr + k[:, None] * N + n)
    tl.store(y_ptr + rows[:, None] * N + n, tl.dot(a, b, input_precision="ieee"))


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="no interpreter: a GPU runs kernels, and Triton's types are as it has them",
)


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 32])
def test_a_rows_dot_does_not_see_the_rows_beside_it(rows):
    """BLAS takes other kernels for other shapes: a test of a kernel's own order would fail on some processors."""
    a, b = draw(64, 128, seed=4), draw(128, 32, seed=5)
    whole, part = torch.empty(64, 32), torch.empty(rows, 32)
    _rows[(1,)](a, b, whole, ROWS=64, K=128, N=32)
    for first in range(0, 64, rows):
        _rows[(1,)](a[first : first + rows].clone(), b, part, ROWS=rows, K=128, N=32)
        assert_bitwise(part, whole[first : first + rows])


def test_truncation_would_be_seen():
    x = edges(torch.bfloat16)
    cut = (x.view(torch.int32) & -65536).view(torch.float32)
    assert_differs(cut, bf16.round(x))


@triton.jit
def _fused(x_ptr, y_ptr, z_ptr, fma_ptr, low_ptr, high_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y, z = tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at)
    tl.store(fma_ptr + at, tl.fma(x, y, z))
    tl.store(low_ptr + at, tl.minimum(x, y))
    tl.store(high_ptr + at, tl.maximum(x, y))


def test_a_fused_multiply_add_rounds_once_and_extremes_skip_nan(accelerator):
    x, y = draw(4096, seed=4, decades=3), draw(4096, seed=5, decades=3)
    z = -(x * y)  # cancels: what is left is the product's rounding error
    z[::2] += draw(2048, seed=6)
    y[1], x[3], z[5], x[7] = float("nan"), float("nan"), float("inf"), float("inf")
    exact = (x.numpy().astype(np.longdouble) * y.numpy() + z.numpy()).astype(np.float32)
    out = [torch.empty(4096, device=accelerator) for _ in range(3)]
    _fused[(1,)](*(t.to(accelerator) for t in (x, y, z)), *out, SIZE=4096)
    assert_bitwise(out[0].cpu(), exact)
    assert_differs(x * y + z, exact)
    assert_bitwise(out[1].cpu(), torch.fmin(x, y))
    assert_bitwise(out[2].cpu(), torch.fmax(x, y))


@triton.jit
def _count(y_ptr, size, STEP: tl.constexpr):
    total = 0
    for start in range(tl.program_id(0) * STEP, size, tl.num_programs(0) * STEP):
        total += start
    tl.store(y_ptr + tl.program_id(0), total)


def test_a_loop_may_be_bounded_by_values(accelerator):
    y = torch.full((3,), -1, dtype=torch.int32, device=accelerator)
    _count[(3,)](y, 20, STEP=2)
    assert y.tolist() == [sum(range(start, 20, 6)) for start in (0, 2, 4)]


@interpreted
def test_a_known_shape_is_checked_and_named_like_a_new_one():
    held = tl.block_type(tl.float32, [4, tl.constexpr(8)])
    again = tl.block_type(tl.int32, (4, 8))
    assert (str(again), again.numel, list(again.shape)) == ("<['4', '8'], int32>", 32, [4, 8])
    assert held != again
    assert held == tl.block_type(tl.float32, [4, 8])
    assert held != tl.block_type(tl.float32, [8, 4])
    assert held.shape == [4, 8]
    assert not held.shape == [8, 4]  # noqa: SIM201 - Triton's own equality, which gives a constexpr
    assert held.shape == tl.tuple([tl.constexpr(4), 8])
    assert (tl.int32 == tl.dtype("int32"), tl.int32 == tl.uint32) == (True, False)
    for shape, error in (([4, 8.0], TypeError), ([4, 3], ValueError), ([], TypeError)):
        with pytest.raises(error):
            tl.block_type(tl.float32, shape)
    one, two = (tl.tensor(None, kind) for kind in (held, again))
    assert (two.dtype, two.type, two.numel.value) == (tl.int32, again, 32)
    assert [size.value for size in one.shape] == [4, 8]
    assert tl.tensor(None, tl.int32).numel.value == 1
