"""The Gluon linear: its PTX step by step where no GPU is; on a Hopper the sums in the bound, bit for bit alone."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels._check import assert_bitwise, assert_differs
from kernels.formats import nvfp4
from kernels.linear import hopper_kernel
from kernels.linear.hopper_product_kernel import UNPACK_HIGH, UNPACK_LOW
from kernels.linear.kernel import grouped_linear, nvfp4_linear, stacked_linear
from kernels.linear.test_linear_kernel import bound, exact, is_close, rows_of, weight_of
from kernels.nvfp4_quantise.ref import Nvfp4Rows

PAIRS = ((0, 4), (2, 6), (1, 5), (3, 7))  # codes of a word in its four registers


def run_ptx(text, words, scales):
    """The PTX by hand, a lane each: words (4, lanes) and scales (lanes,) uint32 -> (16, lanes, 2) FP16."""
    lanes = words.shape[1]
    register = {f"${16 + i}": words[i] for i in range(4)} | {"$20": scales, "0": np.zeros_like(scales)}

    def value(name):
        return register[name] if name in register else np.uint32(int(name, 0))

    for what, rest in re.findall(r"(\w+)[\w.]* ([^;]+);", text):
        to, *sources = [part.strip(" {}") for part in rest.split(",")]
        if what == "mov":
            register["lo"], register["hi"] = scales & 0xFFFF, scales >> 16
        elif what == "cvt":
            pair = register[sources[0]].astype(np.uint16).view(np.uint8).view(ml_dtypes.float8_e4m3fn)
            register[to] = pair.astype(np.float16).view(np.uint32)  # low byte first
        elif what == "prmt":
            both = np.stack([value(name) for name in sources[:2]], 1).view(np.uint8)
            order = [int(sources[2], 0) >> 4 * byte & 7 for byte in range(4)]
            register[to] = np.ascontiguousarray(both[:, order]).view(np.uint32)[:, 0]
        elif what == "lop3":
            a, b, c = (value(name) for name in sources[:3])
            register[to] = {"0xEA": (a & b) | c, "0xA8": (a | b) & c}[sources[3]]
        elif what == "mul":
            a, b = (register[name].view(np.float16) for name in sources)
            register[to] = (a * b).view(np.uint32)
        elif what != "reg":
            do = {"shl": np.left_shift, "shr": np.right_shift, "and": np.bitwise_and}[what]
            register[to] = do(value(sources[0]), value(sources[1]))
    return np.stack([register[f"${i}"] for i in range(16)]).view(np.float16).reshape(16, lanes, 2)


@pytest.mark.parametrize("high", [False, True])
def test_the_ptx_gives_the_values_by_hand(high):
    rng = np.random.default_rng(8)
    words = rng.integers(0, 2**32, (4, 65536), dtype=np.uint32)
    scales = rng.permutation(65536).astype(np.uint32) * 65536 + rng.permutation(65536).astype(np.uint32)
    half = (scales >> 16 if high else scales & 0xFFFF).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    want = np.empty((16, 65536, 2), np.float32)
    for word in range(4):
        codes = (words[word][:, None] >> 4 * np.arange(8, dtype=np.uint32) & 15).astype(np.uint8)
        scale = torch.from_numpy(half[:, [word // 2]])
        values = nvfp4.scaled_values(torch.from_numpy(codes.repeat(2, 1)), scale)[:, ::2].numpy()
        want[4 * word : 4 * word + 4] = values[:, np.array(PAIRS)].transpose(1, 0, 2) * 2.0**-14
    text = (UNPACK_HIGH if high else UNPACK_LOW).value

    def unpacked(ptx):
        return torch.from_numpy(run_ptx(ptx, words, scales).astype(np.float32))

    assert_bitwise(unpacked(text), torch.from_numpy(want))
    for right, wrong in (
        ("shr.u32 t, o, 3", "shr.u32 t, o, 4"),
        ("0x2404", "0x2414"),
        ("0x8E008E00", "0x0E000E00"),
    ):
        assert right in text
        assert_differs(unpacked(text.replace(right, wrong)), torch.from_numpy(want))


def test_sizes_decide_not_the_batch():
    assert hopper_kernel.fits(32768, 1024, 16)
    assert not hopper_kernel.fits(32768 + 64, 1024, 16)
    assert not hopper_kernel.fits(32768, 1024 + 128, 16)
    assert not hopper_kernel.fits(32768, 4096, 16)  # 128 KB of activation
    assert hopper_kernel.plan(1536, 1, 4) == (8, 1, 256, 3)
    assert hopper_kernel.plan(768, 9, 2) == (16, 16, 128, 1)


@pytest.fixture
def hopper(accelerator, monkeypatch):
    """A Hopper; counts the launches of the Gluon kernel."""
    if accelerator == "cpu" or not hopper_kernel.here(torch.device(accelerator)):
        pytest.skip("no Hopper GPU: Gluon for sm_90 is neither interpreted nor built elsewhere")
    count, launch = [], hopper_kernel.launch

    def counted(*args, **named):
        count.append(1)
        launch(*args, **named)

    monkeypatch.setattr(hopper_kernel, "launch", counted)
    return accelerator, count


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("N", "K"), [(128, 256), (384, 1024), (128, 1536), (256, 4096)])
def test_the_sum_is_exact_within_the_bound_and_the_same_alone(hopper, T, N, K):
    device, count = hopper
    rows, x = rows_of(T, K, device=device)
    packed, weight = weight_of(N, K, device=device)
    got = nvfp4_linear(rows, packed, dtype=torch.float32)
    assert len(count) == 1
    assert is_close(got, exact(x, weight), bound(x, weight, torch.float32))
    for row in range(T):
        alone = nvfp4_linear(Nvfp4Rows(*(part[row : row + 1] for part in rows)), packed, dtype=torch.float32)
        assert_bitwise(alone.cpu(), got[row : row + 1].cpu())
    swapped = packed._replace(codes=((packed.codes >> 4) | (packed.codes << 4)).contiguous())
    assert not is_close(nvfp4_linear(rows, swapped), exact(x, weight), bound(x, weight, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 16])
def test_groups_take_their_own_columns_or_the_same_ones(hopper, T):
    device, count = hopper
    packed, _ = weight_of(3, 128, 512, device=device)
    wide, _ = rows_of(T, 3 * 512, device=device)
    own = grouped_linear(wide, packed, dtype=torch.float32)
    for g in range(3):
        part = Nvfp4Rows(
            wide.codes[:, 256 * g : 256 * (g + 1)], wide.scales[:, 32 * g : 32 * (g + 1)], wide.gsa
        )
        one = packed._replace(
            codes=packed.codes[g], scales=packed.scales[g], scale_2=packed.scale_2[g : g + 1]
        )
        want = nvfp4_linear(part, one, dtype=torch.float32)
        assert_bitwise(own[:, 128 * g : 128 * (g + 1)].cpu(), want.cpu())
        same = stacked_linear(part, packed, dtype=torch.float32)
        assert_bitwise(same[:, 128 * g : 128 * (g + 1)].cpu(), want.cpu())
    assert len(count) == 7
