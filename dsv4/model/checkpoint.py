"""Load a Hugging Face DSV4 folder: every tensor is found, its format told, its values checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.config import FETCH, CheckpointError, weight_files
from dsv4.model.config import ModelConfig, load_config
from dsv4.model.names import expected_shapes
from dsv4.model.weights import (
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
)
from kernels.formats import e2m1, fp8_block, mxfp4, nvfp4, ue8m0
from kernels.linear.ref import GROUPS, READS, ActivationFormat, Weight, WeightFormat, plain_weight

FORMATS: dict[torch.dtype, WeightFormat] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
PACKED: dict[torch.dtype, WeightFormat] = {  # matrices that are stored as codes, told by their dtype
    torch.uint8: "nvfp4",
    torch.int8: "mxfp4",
    torch.float8_e4m3fn: "fp8",
}
INTEGERS = (torch.int64, torch.int32)
CONVERT = "convert the checkpoint to a format of DSV4 (NVFP4, MXFP4, FP8 in blocks, BF16, FP32)"


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint.

    Attributes
    ----------
    folder : where it lies.
    config, weights : what the model needs.
    formats : tensor name -> ``nvfp4``, ``mxfp4``, ``fp8``, ``bf16``, ``fp32`` or ``int``.
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
        self._experts = config.n_routed_experts
        self.formats: dict[str, str] = {}
        self._stored = dict(source) if isinstance(source, Mapping) else _read_folder(source)
        self._where = "tensors" if isinstance(source, Mapping) else str(source)

    def vector(self, name: str) -> Tensor:
        """An FP32 tensor: norms, biases, sinks, mHC, embeddings."""
        return self._checked(name).float()

    def table(self, name: str) -> Tensor:
        """The token-id to experts table: ``num_experts_per_tok`` different experts a token."""
        tensor = self._take(name)
        self.formats[name] = "int"
        self._stored_as(name, tensor, INTEGERS)
        self._expect(name, tensor, self.shapes[name])
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= self._experts:
            self._refuse(name, f"names experts {low} to {high}, n_routed_experts is {self._experts}", FETCH)
        repeated = (tensor.sort(-1).values.diff(dim=-1) == 0).any(-1).nonzero().flatten()
        if len(repeated):
            self._refuse(name, f"gives token {int(repeated[0])} the same expert twice", FETCH)
        return tensor.long()

    def matrix(self, name: str) -> Weight:
        """A linear layer's (or a stack of experts') matrix in the format that it is stored in."""
        packed = PACKED.get(self._take(name).dtype)
        if packed is not None:
            self.formats[name] = packed
            self._grouped(name, READS[packed])
            return {"nvfp4": self._nvfp4, "mxfp4": self._mxfp4, "fp8": self._fp8}[packed](name)
        tensor = self._checked(name)
        return plain_weight(tensor, FORMATS[tensor.dtype])

    def _grouped(self, name: str, reads: ActivationFormat) -> None:
        size, group = self.shapes[name][-1], GROUPS[reads]
        if size % group:
            what = f"is stored as {self.formats[name]} and has {size} inputs"
            self._refuse(
                name, f"{what}, which groups of {group} ({reads} activations) do not divide", CONVERT
            )

    def check_one_gemm(self) -> None:
        """Refuse a shared expert whose gate and up read different formats: one GEMM computes both."""
        for gate in [name for name in self.formats if name.endswith("shared_experts.gate_proj.weight")]:
            up = gate.replace("gate_proj", "up_proj")
            if self.formats[gate] != self.formats[up]:
                self._refuse(
                    gate,
                    f"is stored as {self.formats[gate]} and {up} as {self.formats[up]}, but one GEMM computes both",
                    "store both in one format",
                )

    def _nvfp4(self, name: str) -> Weight:
        shape, packed = self.shapes[name], self._take(name)
        scales, scale_2 = self._take(f"{name}_scale"), self._take(f"{name}_scale_2")
        self._stored_as(f"{name}_scale", scales, (torch.float8_e4m3fn,))
        self._stored_as(f"{name}_scale_2", scale_2, tuple(FORMATS))
        self._expect(name, packed, (*shape[:-1], shape[-1] // 2))
        self._expect(f"{name}_scale", scales, (*shape[:-1], shape[-1] // nvfp4.GROUP))
        self._expect(f"{name}_scale_2", scale_2, shape[:-2])
        self._finite(f"{name}_scale", scales.float())
        self._finite(f"{name}_scale_2", scale_2)
        stored = packed, scales.view(torch.uint8), scale_2
        values = nvfp4.scaled_values(e2m1.unpack(packed), stored[1])
        return Weight(
            values=values.double().transpose(-1, -2).contiguous(),
            scale=scale_2.double(),
            format="nvfp4",
            stored=stored,
        )

    def _mxfp4(self, name: str) -> Weight:
        shape, packed = self.shapes[name], self._take(name)
        self._expect(name, packed, (*shape[:-1], shape[-1] // 2))
        scale = self._scale_inv(name, (*shape[:-1], shape[-1] // mxfp4.GROUP), dtypes=(torch.float8_e8m0fnu,))
        values = mxfp4.dequantise(e2m1.unpack(packed.view(torch.uint8)), scale)
        self._finite(name, values)
        stored = packed.view(torch.uint8), ue8m0.encode(scale)
        return replace(plain_weight(values, "mxfp4"), stored=stored)

    def _fp8(self, name: str) -> Weight:
        shape, codes = self.shapes[name], self._take(name)
        self._expect(name, codes, shape)
        scale = self._scale_inv(
            name,
            (*shape[:-2], *(-(-size // fp8_block.GROUP) for size in shape[-2:])),
            dtypes=(torch.float8_e8m0fnu, *FORMATS),
        )
        values = fp8_block.dequantise_weight(codes.view(torch.uint8), scale)
        self._finite(name, values)
        return replace(plain_weight(values, "fp8"), stored=(codes, scale))

    def _scale_inv(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """Scales of a matrix, which multiply its codes despite their name: FP32, from UE8M0 bytes or floats."""
        name = f"{name}_scale_inv"
        stored = self._take(name)
        self._stored_as(name, stored, dtypes)
        self._expect(name, stored, shape)
        exponents = stored.dtype == torch.float8_e8m0fnu
        scale = ue8m0.decode(stored.view(torch.uint8)) if exponents else stored.float()
        self._finite(name, scale)
        return scale

    def _checked(self, name: str) -> Tensor:
        tensor = self._take(name)
        self._stored_as(name, tensor, tuple(FORMATS))
        self.formats[name] = FORMATS[tensor.dtype]
        self._expect(name, tensor, self.shapes[name])
        self._finite(name, tensor)
        return tensor

    def _take(self, name: str) -> Tensor:
        if name not in self._stored:
            self._refuse(name, "is missing", FETCH)
        return self._stored[name]

    def _stored_as(self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self._refuse(
                name, f"is stored as {str(tensor.dtype).removeprefix('torch.')}, not {wanted}", CONVERT
            )

    def _expect(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            self._refuse(
                name,
                f"has shape {tuple(tensor.shape)}, config.json asks for {shape}",
                "config.json and the weights are not of one model: " + FETCH,
            )

    def _finite(self, name: str, tensor: Tensor) -> None:
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            self._refuse(name, f"holds {bad} NaN or Inf of {tensor.numel()}", "the file is damaged: " + FETCH)

    def _refuse(self, name: str, what: str, remedy: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: {name} {what}; {remedy}")


def _read_folder(folder: Path) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); {FETCH}") from None
    return stored


def build(config: ModelConfig, tensors: Tensors) -> ModelWeights:
    """Assemble the weights of a model from its stored tensors; see :func:`load` for what is refused."""
    weights = ModelWeights(
        embed=tensors.vector("model.embed_tokens.weight"),
        layers=tuple(_layer(config, tensors, layer) for layer in range(config.num_hidden_layers)),
        hc_head=HyperWeights(
            **{key: tensors.vector(f"model.hc_head.hc_{key}") for key in ("fn", "base", "scale")}
        ),
        norm=tensors.vector("model.norm.weight"),
        lm_head=plain_weight(tensors.vector("lm_head.weight"), "fp32"),
    )
    tensors.check_one_gemm()
    return weights


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
    return Weight(values=values, scale=weight.scale, format=weight.format, stored=weight.stored)
