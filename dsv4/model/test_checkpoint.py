"""A checkpoint that cannot be audited is refused with file, key and what to do; a good one is read exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4.model.checkpoint import Tensors, build, load
from dsv4.model.config import CheckpointError, ModelConfig, load_config, parse_config
from dsv4.model.random_model import SMALL, random_tensors, small_config
from kernels.formats import e2m1, e4m3, nvfp4

LAYER = "model.layers.1."
Q_A = f"{LAYER}self_attn.q_a_proj.weight"
NORM = f"{LAYER}input_layernorm.weight"
TABLE = "model.layers.0.mlp.gate.tid2eid"
Stored = dict[str, Tensor]


def write(
    folder: Path,
    config: dict[str, Any] | None = None,
    change: Callable[[Stored], Any] | None = None,
    sizes: ModelConfig | None = None,
) -> Path:
    """Write a checkpoint of small sizes, or ``sizes``, in two shards, ``change`` applied to its tensors."""
    stored = random_tensors(sizes or small_config(), 0)
    if change is not None:
        change(stored)
    (folder / "config.json").write_text(json.dumps(SMALL if config is None else config))
    names = sorted(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: stored[name].contiguous() for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refused(folder: Path, *said: str) -> str:
    """Message of the refusal; it must hold every string of ``said``."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    missing = [text for text in (str(folder), *said) if text not in message]
    assert not missing, f"{message!r} does not say {missing}"
    return message


def test_shards_and_one_file_give_the_same_weights(tmp_path):
    sharded = load(write(tmp_path))
    one = tmp_path / "one"
    one.mkdir()
    save_file(
        load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors"),
        one / "model.safetensors",
    )
    (one / "config.json").write_text(json.dumps(SMALL))
    single = load(one)
    assert single.config == sharded.config == small_config()
    assert single.formats == sharded.formats
    for a, b in zip(single.weights.layers, sharded.weights.layers, strict=True):
        assert torch.equal(a.q_b.values, b.q_b.values)
        assert torch.equal(a.experts_down.scale, b.experts_down.scale)


def test_values_are_the_stored_codes_times_their_scales(tmp_path):
    weights = load(write(tmp_path)).weights
    stored = random_tensors(small_config(), 0)
    codes, scales = e2m1.unpack(stored[Q_A]), stored[f"{Q_A}_scale"].view(torch.uint8)
    by_hand = e2m1.decode(codes).double() * e4m3.decode(scales).double().repeat_interleave(16, -1)
    assert torch.equal(weights.layers[1].q_a.values, by_hand.T)
    assert torch.equal(weights.layers[1].q_a.scale, stored[f"{Q_A}_scale_2"].double())
    name = f"{LAYER}mlp.experts.gate_up_proj"
    whole = nvfp4.dequantise(
        e2m1.unpack(stored[name]),
        stored[f"{name}_scale"].view(torch.uint8),
        stored[f"{name}_scale_2"][:, None, None],
    )
    expert = weights.layers[1].experts_gate_up[3]
    assert expert.values.shape == (64, 64)
    torch.testing.assert_close((expert.values * expert.scale).float(), whole[3].T, rtol=2e-7, atol=0)


def test_o_a_is_cut_into_groups_of_output_rows():
    config = small_config()
    stored = random_tensors(config, 0, quantise=False)
    o_a = build(config, Tensors(stored, config)).layers[2].o_a
    matrix = stored["model.layers.2.self_attn.o_a_proj.weight"]  # (G * N, K)
    for group, rows in enumerate(matrix.split(config.o_lora_rank)):
        assert torch.equal(o_a.values[group], rows.double().T)


@pytest.mark.parametrize("name", ["config.json", "b.safetensors"])
def test_missing_file_is_named(tmp_path, name):
    (write(tmp_path) / name).unlink()
    refused(tmp_path, str(tmp_path / name), "missing", "`checkpoint`")


def test_missing_only_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, str(tmp_path / "model.safetensors"), "missing", "fetch")


@pytest.mark.parametrize("keep", [0, 4, 2000, -1])
def test_truncated_shard_is_named(tmp_path, keep):
    path = write(tmp_path) / "a.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, str(path), "truncated or damaged", "fetch")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": ', '{"weight_map": {"a": 1, "b": "c"}}']
)
def test_damaged_index_is_named(tmp_path, text):
    (write(tmp_path) / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json", "fetch")


@pytest.mark.parametrize(
    "name",
    [
        Q_A,
        f"{Q_A}_scale",
        f"{Q_A}_scale_2",
        NORM,
        TABLE,
        "lm_head.weight",
        f"{LAYER}self_attn.compressor.indexer.scorer.weights_proj.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path, name):
    refused(write(tmp_path, change=lambda stored: stored.pop(name)), f"{name} is missing", "fetch")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (Q_A, (32, 31), "(32, 32)"),  # packed: two values a byte
        (f"{Q_A}_scale", (32, 3), "(32, 4)"),
        (f"{Q_A}_scale_2", (1,), "()"),
        (f"{LAYER}mlp.experts.down_proj_scale_2", (7,), "(8,)"),
        (NORM, (65,), "(64,)"),
        (TABLE, (64, 3), "(64, 2)"),
        (f"{LAYER}attn_hc.fn", (24, 64), "(24, 256)"),
        (f"{LAYER}self_attn.compressor.position_bias", (8, 256), "(4, 256)"),
    ],
)
def test_wrong_shape_is_named_with_the_wanted_one(tmp_path, name, shape, wanted):
    def change(stored: Stored) -> None:
        stored[name] = torch.zeros(shape).to(stored[name].dtype)

    refused(
        write(tmp_path, change=change), f"{name} has shape {shape}, config.json asks for {wanted}", "fetch"
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (Q_A, torch.int16),
        (Q_A, torch.float16),
        (Q_A, torch.float64),
        (f"{Q_A}_scale", torch.uint8),
        (f"{Q_A}_scale", torch.float32),
        (f"{Q_A}_scale_2", torch.int32),
        (NORM, torch.int32),
        (NORM, torch.float8_e4m3fn),
        (NORM, torch.uint8),
        (TABLE, torch.float32),
    ],
)
def test_wrong_dtype_is_named(tmp_path, name, dtype):
    def change(stored: Stored) -> None:
        stored[name] = stored[name].float().to(dtype)

    refused(write(tmp_path, change=change), f"{name} is stored as {str(dtype)[6:]}, not", "convert")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", [NORM, f"{Q_A}_scale_2", f"{LAYER}self_attn.sinks", "model.embed_tokens.weight"]
)
def test_non_finite_value_is_named_and_counted(tmp_path, name, value):
    def change(stored: Stored) -> None:
        stored[name].view(-1)[0] = value

    refused(write(tmp_path, change=change), f"{name} holds 1 NaN or Inf of", "damaged", "fetch")


def test_nan_in_block_scales_is_named(tmp_path):
    def change(stored: Stored) -> None:
        stored[f"{Q_A}_scale"].view(torch.uint8)[3, 1] = 0x7F

    refused(write(tmp_path, change=change), f"{Q_A}_scale holds 1 NaN or Inf of 128")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s[TABLE].__setitem__((0, 0), 8),
            f"{TABLE} names experts 0 to 8, n_routed_experts is 8",
        ),
        (lambda s: s[TABLE].__setitem__((0, 0), -1), f"{TABLE} names experts -1 to 7"),
        (lambda s: s[TABLE].__setitem__(5, 3), f"{TABLE} gives token 5 the same expert twice"),
    ],
    ids=["too-large", "negative", "twice"],
)
def test_table_of_impossible_experts_is_named(tmp_path, change, said):
    refused(write(tmp_path, change=change), said, "fetch")


def test_config_that_is_no_object_is_refused(tmp_path):
    for text, said in (("[1]", "not an object"), ("{", "no valid JSON"), ('"x"', "not an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=said):
            load_config(tmp_path)


@pytest.mark.parametrize("key", [key for key in SMALL if key != "rope_scaling"])
def test_missing_config_key_is_named(tmp_path, key):
    config = {name: value for name, value in SMALL.items() if name != key}
    refused(write(tmp_path, config), "config.json", f"key {key} is missing", "DeepSeek-V4")


@pytest.mark.parametrize("key", SMALL["rope_scaling"])
def test_missing_rope_key_is_named(tmp_path, key):
    rope = {name: value for name, value in SMALL["rope_scaling"].items() if name != key}
    refused(
        write(tmp_path, SMALL | {"rope_scaling": rope}), "config.json", f"key rope_scaling.{key} is missing"
    )
    for none in (None, "yarn", []):
        with pytest.raises(CheckpointError, match=r"key rope_scaling\.factor is missing"):
            parse_config(SMALL | {"rope_scaling": none})


def test_sizes_of_config_and_weights_must_agree(tmp_path):
    refused(write(tmp_path, SMALL | {"hidden_size": 128}), "config.json asks for", "not of one model")
    refused(
        write(tmp_path, SMALL | {"num_hidden_layers": 5, "compress_ratios": [0, 4, 8, 4, 0]}),
        "layers.4",
        "missing",
    )
