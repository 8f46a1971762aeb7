"""Our formats against bytes that DeepGEMM's quantisers wrote and values that FlashMLA read on an H200, 2026-11-30."""

import numpy as np
import pytest
import torch

from kernels._check import assert_bitwise
from kernels.formats import bf16, e2m1, fp8_block, mxfp4
from kernels.formats.golden.record_golden import FILE, NOPE, PAGE, TOKENS, inputs
from kernels.formats.kv_record import RecordLayout


@pytest.fixture(scope="module")
def golden():
    with np.load(FILE) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def values(bits):
    return bf16.from_bits(bits)


def test_the_inputs_are_the_ones_that_the_script_draws(golden):
    for name, seed in (("x", 1), ("block", 2), ("kv", 3)):
        assert_bitwise(values(golden[name]), inputs(seed, *golden[name].shape, "cpu").float())


@pytest.mark.parametrize("group", [64, 128])
def test_fp8_per_token(golden, group):
    codes, scale = fp8_block.quantise(values(golden["x"]), group)
    assert_bitwise(scale, golden[f"fp8_{group}_scale"])
    assert_bitwise(codes, golden[f"fp8_{group}_codes"])


def test_fp8_per_block(golden):
    x = values(golden["block"])
    tiles = (
        x.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128)).transpose(1, 2).flatten(-2)
    )  # [r, c, 128 * 128]
    codes, scale = fp8_block.quantise(tiles, 128 * 128)
    whole = codes.unflatten(-1, (128, 128)).transpose(1, 2).reshape(x.shape)
    assert_bitwise(scale[..., 0], golden["fp8_block_scale"])
    assert_bitwise(whole, golden["fp8_block_codes"])


def test_fp4_per_token_but_for_ties_and_tiny_groups(golden):
    """DeepGEMM rounds ties to the smaller value and has a floor of 1e-4; ours goes to even and has none."""
    x = values(golden["x"])
    codes, scale = mxfp4.quantise(x)
    above = x.unflatten(-1, (-1, 32)).abs().amax(-1) >= 1e-4
    theirs = golden["fp4_scale"]
    assert_bitwise(scale[above], theirs[above])
    scaled = x.unflatten(-1, (-1, 32)).abs() / theirs[..., None]
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    clear = (above[..., None] & ~torch.isin(scaled, middle)).flatten(-2)
    ours = e2m1.decode(codes)
    assert clear.float().mean() > 0.8
    assert_bitwise(ours[clear] + 0.0, e2m1.decode(e2m1.unpack(golden["fp4_codes"]))[clear] + 0.0)


def test_flash_mla_reads_our_record(golden):
    layout = RecordLayout(NOPE)
    data, scales = layout.encode(values(golden["kv"]))
    page = torch.zeros(1, layout.page_bytes(PAGE), dtype=torch.uint8)
    layout.write(page, torch.arange(TOKENS), data, scales)
    assert_bitwise(page, golden["page"])
    assert_bitwise(layout.decode(data, scales), values(golden["page_values"]))


def test_the_script_refuses_to_run_without_a_gpu(capsys, monkeypatch):
    from kernels.formats.golden import record_golden

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert record_golden.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
