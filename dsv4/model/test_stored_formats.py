"""Every format that a checkpoint may store a matrix in, and which of them may stand side by side."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsv4.model.checkpoint import Tensors, load
from dsv4.model.config import CheckpointError, parse_config
from dsv4.model.names import expected_shapes
from dsv4.model.random_model import SMALL, random_tensors, stored_as
from dsv4.model.test_checkpoint import LAYER, NORM, Q_A, TABLE, Stored, refused, write
from kernels.formats import fp8_block, ue8m0

EXPERTS = f"{LAYER}mlp.experts.gate_up_proj"
WIDE = SMALL | {"hidden_size": 128, "moe_intermediate_size": 128}  # what FP8's groups of 128 divide
CONFIG = parse_config(WIDE)


def written(folder: Path, change: Callable[[Stored], Any]) -> Path:
    """A checkpoint of these sizes, ``change`` applied to its tensors."""
    return write(folder, WIDE, change, CONFIG)


def test_formats_are_told_by_the_stored_dtype(tmp_path):
    def change(stored: Stored) -> None:
        for name in ("q_a_proj", "kv_proj"):
            weight = f"{LAYER}self_attn.{name}.weight"
            codes, scale = fp8_block.quantise_weight(torch.randn(expected_shapes(CONFIG)[weight]))
            stored[weight], stored[f"{weight}_scale_inv"] = codes.view(torch.float8_e4m3fn), scale
        stored[f"{LAYER}self_attn.o_b_proj.weight"] = torch.randn(128, 32).bfloat16()

    checkpoint = load(written(tmp_path, change))
    stored = random_tensors(CONFIG, 0)
    change(stored)
    layer = checkpoint.weights.layers[1]
    formats = [w.format for w in (layer.q_a, layer.kv, layer.q_b, layer.o_b, layer.shared_down)]
    assert formats == ["fp8", "fp8", "nvfp4", "bf16", "nvfp4"]
    assert checkpoint.formats[Q_A] == "fp8"
    assert checkpoint.formats[NORM] == "fp32"
    assert checkpoint.formats[TABLE] == "int"


def as_fp8(stored: Stored, name: str = Q_A) -> None:
    """Store q_a, and kv that reads the same input, in FP8 blocks."""
    for other in (name, f"{LAYER}self_attn.kv_proj.weight"):
        codes, scale = fp8_block.quantise_weight(torch.randn(expected_shapes(CONFIG)[other]))
        stored[other], stored[f"{other}_scale_inv"] = codes.view(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: s[Q_A].view(torch.uint8).fill_(0x7F), f"{Q_A} holds 4096 NaN or Inf of 4096"),
        (lambda s: s[f"{Q_A}_scale_inv"].fill_(torch.inf), f"{Q_A}_scale_inv holds 1 NaN or Inf of 1"),
        (lambda s: s.pop(f"{Q_A}_scale_inv"), f"{Q_A}_scale_inv is missing"),
        (lambda s: s.update({f"{Q_A}_scale_inv": torch.ones(1, 2)}), f"{Q_A}_scale_inv has shape (1, 2)"),
        (lambda s: s.update({f"{Q_A}_scale_inv": torch.ones(1, 1, dtype=torch.uint8)}), "is stored as uint8"),
    ],
    ids=["nan-codes", "inf-scale", "no-scale", "scale-shape", "scale-dtype"],
)
def test_damaged_fp8_is_named(tmp_path, damage, said):
    def change(stored: Stored) -> None:
        as_fp8(stored)
        damage(stored)

    refused(written(tmp_path, change), said)


def test_matrices_that_read_one_input_may_differ_in_format(tmp_path):
    changed = ("self_attn.kv_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")

    def change(stored: Stored) -> None:
        for name in changed:
            value = torch.randn(expected_shapes(CONFIG)[LAYER + name])
            stored.update(stored_as(LAYER + name, value, "bf16"))

    layer = load(written(tmp_path, change)).weights.layers[1]
    assert (layer.q_a.format, layer.kv.format) == ("nvfp4", "bf16")
    assert (layer.experts_gate_up.format, layer.shared_gate.format) == ("bf16", "nvfp4")


def test_gate_and_up_of_a_shared_expert_are_one_gemm(tmp_path):
    gate, up = (f"{LAYER}mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up"))

    def change(stored: Stored) -> None:
        stored[up] = torch.randn(expected_shapes(CONFIG)[up]).bfloat16()

    refused(written(tmp_path, change), f"{gate} is stored as nvfp4 and {up} as bf16", "store")


def as_mxfp4(stored: Stored) -> None:
    """Store the routed experts as the released checkpoints do: two codes a byte, a UE8M0 byte per 32."""
    for name in (EXPERTS, f"{LAYER}mlp.experts.down_proj"):
        value = torch.randn(expected_shapes(CONFIG)[name])
        stored.update(stored_as(name, value * torch.logspace(-6, 6, len(value))[:, None, None], "mxfp4"))


def test_mxfp4_values_are_codes_times_powers_of_two(tmp_path):
    def change(stored: Stored) -> None:
        as_mxfp4(stored)
        stored[EXPERTS][0, 0] = torch.arange(-128, 128, 4).to(torch.int8)  # every high nibble, four times
        stored[f"{EXPERTS}_scale_inv"].view(torch.uint8)[0, 0] = torch.tensor([0, 200, 1, 127])

    checkpoint = load(written(tmp_path, change))
    experts = checkpoint.weights.layers[1].experts_gate_up
    assert (experts.format, experts.reads, checkpoint.formats[EXPERTS]) == ("mxfp4", "fp8", "mxfp4")
    assert (experts.scale == 1).all()
    stored = load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors")
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    grid = torch.tensor(grid + [-value for value in grid], dtype=torch.float64)
    packed = stored[EXPERTS].long() & 255
    values = grid[torch.stack((packed & 15, packed >> 4), -1).flatten(-2)]  # the even index in the low nibble
    exponents = stored[f"{EXPERTS}_scale_inv"].view(torch.uint8).double() - 127
    by_hand = values * torch.exp2(exponents).repeat_interleave(32, -1)
    assert torch.equal(experts.values, by_hand.transpose(-1, -2))


def test_fp8_scales_may_be_stored_as_exponents(tmp_path):
    def floats(stored: Stored) -> None:
        torch.manual_seed(0)
        as_fp8(stored)

    def exponents(stored: Stored) -> None:
        floats(stored)
        for name in [name for name in stored if name.endswith("_scale_inv")]:
            stored[name] = ue8m0.encode(stored[name]).view(torch.float8_e8m0fnu)

    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one = load(written(tmp_path / "one", floats)).weights.layers[1].q_a
    other = load(written(tmp_path / "other", exponents)).weights.layers[1].q_a
    assert one.format == other.format == "fp8"
    assert torch.equal(one.values, other.values)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda s: s[f"{EXPERTS}_scale_inv"].view(torch.uint8)[0, 0].fill_(0xFF),
            f"{EXPERTS}_scale_inv holds 4 NaN or Inf",
        ),
        (
            lambda s: s[f"{EXPERTS}_scale_inv"].view(torch.uint8)[0, 0].fill_(0xFE),
            f"{EXPERTS} holds",  # 6 * 2^127
        ),
        (lambda s: s.pop(f"{EXPERTS}_scale_inv"), f"{EXPERTS}_scale_inv is missing"),
        (
            lambda s: s.update({f"{EXPERTS}_scale_inv": torch.ones(8, 256, 4)}),
            f"{EXPERTS}_scale_inv is stored as float32, not float8_e8m0fnu",
        ),
        (
            lambda s: s.update({f"{EXPERTS}_scale_inv": s[f"{EXPERTS}_scale_inv"][..., :1]}),
            f"{EXPERTS}_scale_inv has shape (8, 256, 1), config.json asks for (8, 256, 4)",
        ),
        (
            lambda s: s.update({EXPERTS: s[EXPERTS][..., :63]}),
            f"{EXPERTS} has shape (8, 256, 63), config.json asks for (8, 256, 64)",
        ),
    ],
    ids=["nan-scale", "overflow", "no-scale", "scale-dtype", "scale-shape", "shape"],
)
def test_damaged_mxfp4_is_named(tmp_path, damage, said):
    def change(stored: Stored) -> None:
        as_mxfp4(stored)
        damage(stored)

    refused(written(tmp_path, change), said)


@pytest.mark.parametrize(
    ("weight_format", "size", "group"), [("fp8", 96, 128), ("mxfp4", 96, 128), ("nvfp4", 24, 16)]
)
def test_inputs_that_no_group_divides_are_refused_before_anything_runs(weight_format, size, group):
    name, config = f"{LAYER}mlp.experts.down_proj", parse_config(WIDE | {"moe_intermediate_size": size})
    tensors = Tensors(stored_as(name, torch.randn(8, 128, 128), weight_format), config)
    with pytest.raises(CheckpointError, match=f"stored as {weight_format} and has {size} inputs.*of {group}"):
        tensors.matrix(name)
