"""A checkpoint as transformers' model in FP32; an engineer's own loader stands here."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dsv4.config import weight_files
from dsv4.model._oracle import Oracle
from dsv4.model.config import load_config


def load_model(checkpoint: Path) -> Any:
    """``DeepseekV4ForCausalLM`` with the dequantised stored weights."""
    stored = {name: tensor for file in weight_files(checkpoint) for name, tensor in load_file(file).items()}
    return Oracle(load_config(checkpoint), stored).model
