"""A plan: the numerics of one decode path, one field per site that a rung may change.

A plan says *where* values are rounded and to *which* format; the refs in ``kernels`` take
those rounding points as arguments, so a plan is the only description of a variant's numerics.
Nothing here imports torch: rules, gates and the report read plans too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args, get_type_hints

Fusion = Literal["unfused", "fused"]
Cast = Literal["bf16", "native"]


@dataclass(frozen=True, kw_only=True)
class Casts:
    """Sites of the cast sweep (B4): ``bf16`` stores what is widened next, ``native`` does not.

    Attributes
    ----------
    router : what the FP32 router reads: the norm's output through BF16, or as computed.
    swiglu : gate and up go through BF16 before SwiGLU and its product again before the
        quantiser, or stay in FP32 from the accumulator to the quantiser.
    attn_out : attention stores BF16 and the inverse RoPE widens it again, or rotates the
        accumulator and rounds once.
    head : the final norm stores BF16 for an FP32 ``lm_head``, or emits FP32.
    """

    router: Cast = "bf16"
    swiglu: Cast = "bf16"
    attn_out: Cast = "bf16"
    head: Cast = "bf16"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every site of the ladder; the defaults are ``B0_unfused`` (design: the plan's start).

    Attributes
    ----------
    norm_quant : RMSNorm and the activation quantiser: two launches with BF16 between, or one
        (``fused``: gsa per row; ``fused_scalar_gsa``: codes made with the row's gsa and undone
        with the launch's maximum, as the plan's GEMM does; ``fused_launch_gsa``: that maximum
        in both places, which ties a row to its batch).
    mhc_quant : the weighted stream sum joins that launch, so its BF16 store goes too.
    q_a_norm : the same fusion between q_a's norm and q_b's quantiser.
    kv_read : gathered records are widened into a BF16 buffer, or read in place.
    kv_format : how a KV record holds its nope part.
    kv_record : seven scales a token (584 bytes at nope 448), or one (aligned).
    q_format : q's nope part in QK: BF16, one FP8 term, or FP8 value + FP8 residual.
    rope_format : both operands of the rope part of QK.
    pv_format : the probabilities that multiply V's nope part.
    index_score : FP8 keys under an FP32 einsum, FP8 x FP8, or Hadamard + FP4 x FP4.
    kv_norm : kv's RMSNorm, RoPE and cache write: BF16 between each, or none.
    casts : see :class:`Casts`.
    residual : the mHC streams as stored between blocks; which layers store FP32: :func:`in_fp32`.
    rounding : ``none``: every site keeps what it computed and the other fields say nothing. What an
        engine in FP32 on the dequantised weights claims; no step of the ladder.
    """

    norm_quant: Literal["unfused", "fused", "fused_scalar_gsa", "fused_launch_gsa"] = "unfused"
    mhc_quant: Fusion = "unfused"
    q_a_norm: Fusion = "unfused"
    kv_read: Literal["gather_bf16", "in_place"] = "gather_bf16"
    kv_format: Literal["fp8", "nvfp4"] = "fp8"
    kv_record: Literal["seven_scales", "aligned"] = "seven_scales"
    q_format: Literal["bf16", "fp8", "fp8x2"] = "bf16"
    rope_format: Literal["bf16", "fp8"] = "bf16"
    pv_format: Literal["bf16", "fp8"] = "bf16"
    index_score: Literal["einsum_fp32", "fp8", "fp4"] = "einsum_fp32"
    kv_norm: Fusion = "unfused"
    casts: Casts = field(default_factory=Casts)
    residual: Literal["bf16", "fp32", "fp32_first_half", "fp32_last_half", "fp32_last"] = "bf16"
    rounding: Literal["plan", "none"] = "plan"


def in_fp32(residual: str, layer: int, layers: int) -> bool:
    """Whether a layer, of ``layers``, stores the streams in FP32 under a value of ``residual``.

    The single layer of ``fp32_last`` is the last: the streams grow with depth, so a BF16 ULP is largest there.
    """
    return {
        "bf16": False,
        "fp32": True,
        "fp32_first_half": layer < layers // 2,
        "fp32_last_half": layer >= layers // 2,
        "fp32_last": layer == layers - 1,
    }[residual]


def choices() -> dict[str, tuple[str, ...]]:
    """Allowed values of each field by dotted name, e.g. ``casts.router -> (bf16, native)``."""
    plain = {name: get_args(hint) for name, hint in get_type_hints(Plan).items() if name != "casts"}
    nested = {f"casts.{name}": get_args(hint) for name, hint in get_type_hints(Casts).items()}
    return plain | nested


def flatten(plan: Plan) -> dict[str, str]:
    """Field values by dotted name, in declaration order."""
    values: dict[str, Any] = asdict(plan)
    casts = values.pop("casts")
    return values | {f"casts.{name}": value for name, value in casts.items()}


def unflatten(values: Mapping[str, str]) -> Plan:
    """Build a plan from dotted names; missing ones keep their default.

    Raises
    ------
    ValueError
        Unknown field or value; the message lists what is allowed.
    """
    return change(Plan(), values)


def change(plan: Plan, values: Mapping[str, str]) -> Plan:
    """Return ``plan`` with the dotted fields in ``values`` set.

    Raises
    ------
    ValueError
        Unknown field or value; the message lists what is allowed.
    """
    allowed = choices()
    for name, value in values.items():
        if name not in allowed:
            raise ValueError(f"plan has no field {name!r}; fields: {', '.join(allowed)}")
        if value not in allowed[name]:
            raise ValueError(f"plan field {name} = {value!r}; allowed: {', '.join(allowed[name])}")
    casts = {
        name.removeprefix("casts."): value for name, value in values.items() if name.startswith("casts.")
    }
    direct = {name: value for name, value in values.items() if not name.startswith("casts.")}
    return replace(plan, casts=replace(plan.casts, **casts), **direct)


def difference(old: Plan, new: Plan) -> dict[str, tuple[str, str]]:
    """Fields that differ, as ``{dotted name: (old value, new value)}``."""
    before, after = flatten(old), flatten(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
