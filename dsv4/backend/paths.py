"""What has no kernel: combinations of plan fields, sizes and stored formats that are refused by name.

Two cases, and no other: every stage of a plan has a kernel, or the plan is refused (:class:`NoKernelError`, before
any work). No stage runs on refs beside kernels, and nothing falls back while it runs. One form is made by torch on the
device, by the formats' own functions: NVFP4 and FP8 rows under norm_quant = fused_launch_gsa, which only shows why a
row must not depend on its launch; its time is no kernel's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dsv4.model.config import CheckpointError, ModelConfig
from dsv4.plan import Plan, flatten


class NoKernelError(CheckpointError):
    """A plan, a size or a stored format that no kernel computes; the message names it."""


# Combinations without a kernel: why, and whether a plan has it.
Refusal = tuple[str, Callable[[Mapping[str, str]], bool]]
REFUSED: tuple[Refusal, ...] = (
    ("rounding = none is refs' or an engine's", lambda plan: plan["rounding"] == "none"),
    (
        "mhc_quant = fused joins the launch of norm_quant = fused",
        lambda plan: plan["mhc_quant"] == "fused" and plan["norm_quant"] != "fused",
    ),
    (
        "q_format = fp8 and fp8x2 read keys in place: kv_read = in_place",
        lambda plan: plan["q_format"] != "bf16" and plan["kv_read"] != "in_place",
    ),
    (
        "rope_format = fp8 and pv_format = fp8 go with q_format = fp8 or fp8x2",
        lambda plan: plan["q_format"] == "bf16" and "fp8" in (plan["rope_format"], plan["pv_format"]),
    ),
    (
        "kv_record = aligned is read by q_format = fp8 or fp8x2 alone",
        lambda plan: plan["kv_record"] == "aligned" and plan["q_format"] == "bf16",
    ),
    (
        "kv_format = nvfp4 is written by kv_norm = unfused and read by kv_read = gather_bf16 alone",
        lambda plan: (
            plan["kv_format"] == "nvfp4" and (plan["kv_norm"] == "fused" or plan["kv_read"] == "in_place")
        ),
    ),
)

# Sizes that kernels are written for; every released model has them.
SIZES: Mapping[str, tuple[int, ...]] = {
    "head_dim": (256, 512),
    "hc_mult": (4,),
    "index_head_dim": (128,),
}
STORED = ("nvfp4", "fp8", "mxfp4")
NARROW = ("q_a", "q_b", "kv", "o_a", "o_b")
NARROW += ("experts_gate_up", "experts_down", "shared_gate", "shared_up", "shared_down")


def check_plan(plan: Plan) -> None:
    """Refuse combinations of :data:`REFUSED`.

    Raises
    ------
    NoKernelError
        Names the plan's fields and values.
    """
    values = flatten(plan)
    for why, holds in REFUSED:
        if holds(values):
            named = ", ".join(f"{name} = {values[name]}" for name in values if name in why)
            raise NoKernelError(f"no kernel for this plan ({named}): {why}; set `backend: ref`")


def check_sizes(config: ModelConfig) -> None:
    """Refuse sizes that no kernel is written for.

    Raises
    ------
    NoKernelError
        Names the key of config.json and its value.
    """
    for name, allowed in SIZES.items():
        if getattr(config, name) not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise NoKernelError(
                f"no kernel for {name} = {getattr(config, name)}: expected {wanted}; set `backend: ref`"
            )


def check_stored(layer: int, weights: Any, config: ModelConfig) -> None:
    """Refuse a layer with a linear or expert stored in a format that no kernel reads, or formats that none joins.

    Raises
    ------
    NoKernelError
        Names layer, matrix and format.
    """
    from kernels.formats.fp8_block import GROUP  # needs torch, which the rules that check a plan do without

    for name in NARROW:
        weight = getattr(weights, name)
        if weight.format not in STORED or not weight.stored:
            expected = " or ".join(STORED)
            raise NoKernelError(
                f"no kernel for layer {layer}, {name} stored as {weight.format}: expected {expected};"
                " set `backend: ref`"
            )
    first, second = weights.experts_gate_up, weights.experts_down
    if first.reads != second.reads:
        raise NoKernelError(
            f"no kernel for layer {layer}, experts_gate_up stored as {first.format} and experts_down as"
            f" {second.format}: one reads {first.reads}, the other {second.reads}; set `backend: ref`"
        )
    if weights.o_a.format == "fp8" and config.o_lora_rank % GROUP:
        raise NoKernelError(
            f"no kernel for layer {layer}, o_a stored as fp8 with o_lora_rank = {config.o_lora_rank}:"
            f" expected a multiple of {GROUP}, so that no scale belongs to two groups; set `backend: ref`"
        )
