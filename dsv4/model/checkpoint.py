"""Load a Hugging Face DSV4 folder: every tensor is found, its format told, its values checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.model.config import CheckpointError, ModelConfig, load_config
from dsv4.model.names import expected_shapes
from dsv4.model.weights import (
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
)
from kernels.formats import e2m1, fp8_block, nvfp4
from kernels.linear.ref import Weight, plain_weight

BLOCK = 16  # values a scale in NVFP4
FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "bf16"}


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint.

    Attributes
    ----------
    folder : where it lies.
    config, weights : what the model needs.
    formats : tensor name -> ``nvfp4``, ``fp8``, ``bf16``, ``fp32`` or ``int``.
    """

    folder: Path
    config: ModelConfig
    weights: ModelWeights
    formats: Mapping[str, str]


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint folder.

    Raises
    ------
    CheckpointError
        Missing or truncated shard, missing tensor, wrong shape or dtype, non-finite values: the
        message names file, tensor and what to do.
    """
    config = load_config(folder)
    tensors = Tensors(folder, config)
    weights = build(config, tensors)
    return Checkpoint(folder=folder, config=config, weights=weights, formats=tensors.formats)


class Tensors:
    """Stored tensors by name, each checked when it is taken.

    Parameters
    ----------
    source : Path or mapping
        A checkpoint folder, or tensors already in memory (tests, other loaders).
    config : ModelConfig
    """

    def __init__(self, source: Path | Mapping[str, Tensor], config: ModelConfig) -> None:
        self.shapes = expected_shapes(config)
        self.formats: dict[str, str] = {}
        self._stored = dict(source) if isinstance(source, Mapping) else _read_folder(source)
        self._where = "tensors" if isinstance(source, Mapping) else str(source)

    def vector(self, name: str) -> Tensor:
        """An FP32 tensor: norms, biases, sinks, mHC, embeddings."""
        return self._checked(name).float()

    def table(self, name: str) -> Tensor:
        """An integer tensor."""
        return self._take(name).long()

    def matrix(self, name: str) -> Weight:
        """A linear layer's (or a stack of experts') matrix in the format that it is stored in."""
        return (
            plain_weight(self._checked(name), self.formats[name])
            if not self._quantised(name)
            else self._codes(name)
        )

    def _quantised(self, name: str) -> bool:
        stored = self._take(name, checked=False)
        if stored.dtype == torch.uint8:
            self.formats[name] = "nvfp4"
        elif stored.dtype == torch.float8_e4m3fn:
            self.formats[name] = "fp8"
        elif stored.dtype in FORMATS:
            self.formats[name] = FORMATS[stored.dtype]
            return False
        else:
            raise CheckpointError(f"{self._where}: {name} is stored as {stored.dtype}; not a format of DSV4")
        return True

    def _codes(self, name: str) -> Weight:
        if self.formats[name] == "fp8":
            return self._fp8(name)
        shape, packed = self.shapes[name], self._take(name, checked=False)
        scales, scale_2 = self._take(f"{name}_scale"), self._take(f"{name}_scale_2").double()
        self._expect(name, packed, (*shape[:-1], shape[-1] // 2))
        self._expect(f"{name}_scale", scales, (*shape[:-1], shape[-1] // BLOCK))
        self._expect(f"{name}_scale_2", scale_2, shape[:-2])
        self._finite(f"{name}_scale", scales.float())
        self._finite(f"{name}_scale_2", scale_2)
        values = nvfp4.scaled_values(e2m1.unpack(packed), scales.view(torch.uint8))
        return Weight(values=values.double().transpose(-1, -2).contiguous(), scale=scale_2, format="nvfp4")

    def _fp8(self, name: str) -> Weight:
        codes, scale = self._take(name, checked=False), self._take(f"{name}_scale_inv").float()
        self._expect(name, codes, self.shapes[name])
        self._finite(f"{name}_scale_inv", scale)
        return plain_weight(fp8_block.dequantise_weight(codes.view(torch.uint8), scale), "fp8")

    def _checked(self, name: str) -> Tensor:
        tensor = self._take(name)
        self.formats[name] = FORMATS.get(tensor.dtype, str(tensor.dtype))
        self._expect(name, tensor, self.shapes[name])
        self._finite(name, tensor)
        return tensor

    def _take(self, name: str, *, checked: bool = True) -> Tensor:
        if name not in self._stored:
            raise CheckpointError(f"{self._where}: tensor {name} is missing")
        return self._stored[name]

    def _expect(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._where}: {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )

    def _finite(self, name: str, tensor: Tensor) -> None:
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise CheckpointError(
                f"{self._where}: {name} holds {bad} NaN or Inf of {tensor.numel()}; the file is damaged, fetch it again"
            )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    stored: dict[str, Tensor] = {}
    for shard in shards:
        path = folder / shard
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: shard is missing; fetch it or correct `checkpoint`") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); fetch it again") from None
    return stored


def build(config: ModelConfig, tensors: Tensors) -> ModelWeights:
    """Assemble the weights of a model from its stored tensors."""
    return ModelWeights(
        embed=tensors.vector("model.embed_tokens.weight"),
        layers=tuple(_layer(config, tensors, layer) for layer in range(config.num_hidden_layers)),
        hc_head=HyperWeights(
            **{key: tensors.vector(f"model.hc_head.hc_{key}") for key in ("fn", "base", "scale")}
        ),
        norm=tensors.vector("model.norm.weight"),
        lm_head=plain_weight(tensors.vector("lm_head.weight"), "fp32"),
    )


def _layer(config: ModelConfig, tensors: Tensors, layer: int) -> LayerWeights:
    base = f"model.layers.{layer}"
    attn, mlp = f"{base}.self_attn", f"{base}.mlp"
    kind, hashed = config.kind(layer), layer < config.num_hash_layers
    return LayerWeights(
        attn_hc=_hyper(tensors, f"{base}.attn_hc"),
        input_norm=tensors.vector(f"{base}.input_layernorm.weight"),
        q_a=tensors.matrix(f"{attn}.q_a_proj.weight"),
        q_a_norm=tensors.vector(f"{attn}.q_a_norm.weight"),
        q_b=tensors.matrix(f"{attn}.q_b_proj.weight"),
        kv=tensors.matrix(f"{attn}.kv_proj.weight"),
        kv_norm=tensors.vector(f"{attn}.kv_norm.weight"),
        sinks=tensors.vector(f"{attn}.sinks"),
        compressor=None if kind == "window" else _compressor(tensors, f"{attn}.compressor"),
        indexer=_indexer(tensors, f"{attn}.compressor.indexer") if kind == "csa" else None,
        o_a=_by_group(tensors.matrix(f"{attn}.o_a_proj.weight"), config.o_groups),
        o_b=tensors.matrix(f"{attn}.o_b_proj.weight"),
        ffn_hc=_hyper(tensors, f"{base}.ffn_hc"),
        post_norm=tensors.vector(f"{base}.post_attention_layernorm.weight"),
        router=tensors.vector(f"{mlp}.gate.weight"),
        e_score_bias=None if hashed else tensors.vector(f"{mlp}.gate.e_score_correction_bias"),
        tid2eid=tensors.table(f"{mlp}.gate.tid2eid") if hashed else None,
        experts_gate_up=tensors.matrix(f"{mlp}.experts.gate_up_proj"),
        experts_down=tensors.matrix(f"{mlp}.experts.down_proj"),
        shared_gate=tensors.matrix(f"{mlp}.shared_experts.gate_proj.weight"),
        shared_up=tensors.matrix(f"{mlp}.shared_experts.up_proj.weight"),
        shared_down=tensors.matrix(f"{mlp}.shared_experts.down_proj.weight"),
    )


def _hyper(tensors: Tensors, base: str) -> HyperWeights:
    return HyperWeights(**{key: tensors.vector(f"{base}.{key}") for key in ("fn", "base", "scale")})


def _compressor(tensors: Tensors, base: str) -> CompressorWeights:
    return CompressorWeights(
        kv=tensors.matrix(f"{base}.kv_proj.weight"),
        gate=tensors.matrix(f"{base}.gate_proj.weight"),
        position_bias=tensors.vector(f"{base}.position_bias"),
        norm=tensors.vector(f"{base}.kv_norm.weight"),
    )


def _indexer(tensors: Tensors, base: str) -> IndexerWeights:
    return IndexerWeights(
        compressor=_compressor(tensors, base),
        q_b=tensors.matrix(f"{base}.q_b_proj.weight"),
        weights_proj=tensors.matrix(f"{base}.scorer.weights_proj.weight"),
    )


def _by_group(weight: Weight, groups: int) -> Weight:
    """o_a is stored as one (G*N, K) matrix: give each group its own (K, N)."""
    values = weight.values.unflatten(1, (groups, -1)).transpose(0, 1).contiguous()
    return Weight(values=values, scale=weight.scale, format=weight.format)
