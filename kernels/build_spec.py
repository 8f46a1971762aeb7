"""What is compiled ahead of time: every kernel at the real models' shapes.

Each ``kernels/<op>/kernel.py`` has ``builds(sizes) -> list[Build]``; ``python -m kernels.build`` compiles them for
each architecture without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Native = Literal[
    "fp8", "mxfp4", "nvfp4"
]  # tensor-core instructions on narrow operands that the SASS or PTX must show


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one released model: DeepSeek-V4's config.json, fields by its names."""

    name: str
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    n_routed_experts: int
    moe_intermediate_size: int
    index_topk: int
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    o_lora_rank: int = 1024
    num_experts_per_tok: int = 6
    index_n_heads: int = 64
    index_head_dim: int = 128
    sliding_window: int = 128
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20


FLASH = Sizes(
    name="flash",
    hidden_size=4096,
    num_attention_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    n_routed_experts=256,
    moe_intermediate_size=2048,
    index_topk=512,
)
PRO = Sizes(
    name="pro",
    hidden_size=7168,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    n_routed_experts=384,
    moe_intermediate_size=3072,
    index_topk=1024,
)


@dataclass(frozen=True, kw_only=True)
class Build:
    """One specialisation of one kernel.

    Attributes
    ----------
    name : ``op/variant/model``, unique over the project.
    kernel : the ``@triton.jit`` (or Gluon) function.
    signature : argument -> Triton type (``"*fp32"``, ``"*u8"``, ``"i32"``, ``"fp32"``), constexprs left out.
    constants : constexpr argument -> value.
    aligned : pointers and integers known to be multiples of 16, as the launcher finds them.
    options : num_warps, num_stages, enable_fp_fusion, maxnreg.
    native : what the compiled code must hold, on which architectures; see ``kernels.build``.
    only : architectures it exists for; empty: all.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    native: tuple[Native, ...] = ()
    only: tuple[str, ...] = ()
