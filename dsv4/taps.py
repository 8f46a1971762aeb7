"""The taps: every named tensor that the stages of a layer write and that a dump can hold.

One table for the model (what to record), the dumps (what to expect), the judge (how to
compare) and the faults (where to inject). Imports nothing of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["row", "entry"]
Kind = Literal["value", "bytes", "ids", "scores", "lse"]
Split = Literal["none", "nope_rope", "head", "stream"]
Where = Literal["layer", "compressed", "csa", "model"]

MODES = ("isolated", "compounded")
HISTORY = "history"  # third group of a reference dump: what isolated mode needs of every row, not only the judged ones
PHASES = ("prefill", "decode")
MODEL = "model"  # the group beside the layer numbers: what belongs to no layer


@dataclass(frozen=True, kw_only=True)
class Tap:
    """One tensor.

    Attributes
    ----------
    name : dataset name in a dump.
    stage : the op of the layer that writes it, in the order of :data:`STAGES`.
    shape : trailing axes in config names; axis 0 is the row (token) or the compressed entry.
    axis : what axis 0 counts.
    kind : ``value`` (compared by cosine and the like), ``lse`` (absolute differences),
        ``ids`` (choices, -1 padded), ``scores`` (-inf where not visible), ``bytes`` (codes).
    split : how it is taken apart before it is compared.
    where : which layers have it.
    against : the reference's tap it is compared with; None: the reference has no such thing,
        it is compared with the parent and the floor alone.
    replay : in isolated mode the reference's value replaces this one for the next stage.
        False for what a format stores: the next op must read the variant's own codes, made
        from the reference's values.
    compounded : dumped in compounded mode too. False for what an op reads a moment later or
        what isolated mode judges better: dumps of a whole ladder stay small.
    """

    name: str
    stage: str
    shape: str
    axis: Axis = "row"
    kind: Kind = "value"
    split: Split = "none"
    where: Where = "layer"
    against: str | None = "same"
    replay: bool = True
    compounded: bool = True

    @property
    def reference(self) -> str | None:
        """Name of the reference's tap that this one is compared with, or None."""
        return self.name if self.against == "same" else self.against


TAPS: tuple[Tap, ...] = (
    Tap(name="attn_pre", stage="attn_mhc", shape="hc_mult", compounded=False),
    Tap(name="attn_post", stage="attn_mhc", shape="hc_mult", compounded=False),
    Tap(name="attn_comb", stage="attn_mhc", shape="hc_mult hc_mult"),
    Tap(name="attn_in", stage="attn_mhc", shape="hidden_size", compounded=False),
    Tap(
        name="attn_in_q",
        stage="attn_quant",
        shape="hidden_size",
        against="attn_in",
        replay=False,
        compounded=False,
    ),
    Tap(name="qr", stage="q_a", shape="q_lora_rank", compounded=False),
    Tap(name="qr_q", stage="q_quant", shape="q_lora_rank", against="qr", replay=False, compounded=False),
    Tap(name="q", stage="q_b", shape="num_attention_heads head_dim", split="nope_rope", compounded=False),
    Tap(name="kv", stage="kv", shape="head_dim", split="nope_rope", compounded=False),
    Tap(
        name="kv_store", stage="kv_store", shape="head_dim", split="nope_rope", replay=False, compounded=False
    ),
    Tap(
        name="kv_bytes",
        stage="kv_store",
        shape="record_bytes",
        kind="bytes",
        against=None,
        replay=False,
        compounded=False,
    ),
    Tap(
        name="comp",
        stage="compress",
        shape="head_dim",
        axis="entry",
        split="nope_rope",
        where="compressed",
        compounded=False,
    ),
    Tap(
        name="comp_store",
        stage="comp_store",
        shape="head_dim",
        axis="entry",
        split="nope_rope",
        where="compressed",
        replay=False,
        compounded=False,
    ),
    Tap(
        name="comp_bytes",
        stage="comp_store",
        shape="record_bytes",
        axis="entry",
        kind="bytes",
        where="compressed",
        against=None,
        replay=False,
        compounded=False,
    ),
    Tap(name="index_q", stage="index_q", shape="index_n_heads index_head_dim", where="csa", compounded=False),
    Tap(name="index_w", stage="index_q", shape="index_n_heads", where="csa", compounded=False),
    Tap(name="index_k", stage="index_k", shape="index_head_dim", axis="entry", where="csa", compounded=False),
    Tap(
        name="index_k_store",
        stage="index_k_store",
        shape="index_head_dim",
        axis="entry",
        where="csa",
        replay=False,
        compounded=False,
    ),
    Tap(
        name="index_scores",
        stage="index_score",
        shape="entries",
        kind="scores",
        where="csa",
        compounded=False,
    ),
    Tap(name="topk", stage="index_topk", shape="index_topk", kind="ids", where="csa"),
    Tap(name="lse", stage="attend", shape="num_attention_heads", kind="lse"),
    Tap(name="attn_out", stage="attend", shape="num_attention_heads head_dim", split="nope_rope"),
    Tap(name="attn_proj", stage="attn_proj", shape="hidden_size"),
    Tap(name="streams_mid", stage="attn_mix", shape="hc_mult hidden_size", split="stream", compounded=False),
    Tap(name="moe_pre", stage="moe_mhc", shape="hc_mult", compounded=False),
    Tap(name="moe_post", stage="moe_mhc", shape="hc_mult", compounded=False),
    Tap(name="moe_comb", stage="moe_mhc", shape="hc_mult hc_mult"),
    Tap(name="moe_in", stage="moe_mhc", shape="hidden_size", compounded=False),
    Tap(
        name="moe_in_q",
        stage="moe_quant",
        shape="hidden_size",
        against="moe_in",
        replay=False,
        compounded=False,
    ),
    Tap(name="router_scores", stage="route", shape="n_routed_experts", compounded=False),
    Tap(name="expert_ids", stage="route", shape="num_experts_per_tok", kind="ids"),
    Tap(name="expert_weights", stage="route_weights", shape="num_experts_per_tok", compounded=False),
    Tap(name="routed", stage="experts", shape="hidden_size", compounded=False),
    Tap(name="shared", stage="shared", shape="hidden_size", compounded=False),
    Tap(name="moe_out", stage="moe_sum", shape="hidden_size"),
    Tap(name="streams", stage="moe_mix", shape="hc_mult hidden_size", split="stream", compounded=False),
    Tap(name="hidden", stage="head", shape="hidden_size", where="model"),
    Tap(name="logits", stage="lm_head", shape="vocab_size", where="model"),
)

BY_NAME: dict[str, Tap] = {tap.name: tap for tap in TAPS}
RESIDUAL = tuple(
    tap.name for tap in TAPS if tap.stage in ("attn_mix", "moe_mix")
)  # the streams X, twice a layer
STAGES: tuple[str, ...] = tuple(dict.fromkeys(tap.stage for tap in TAPS))


def layer_taps(compress_ratio: int, mode: str = "isolated") -> tuple[Tap, ...]:
    """Taps that a dump of ``mode`` holds for a layer with this compress ratio (0 window, 4 CSA, else HCA)."""
    has = (
        {"layer"}
        | ({"compressed"} if compress_ratio else set())
        | ({"csa"} if compress_ratio == 4 else set())
    )
    return tuple(tap for tap in TAPS if tap.where in has and (tap.compounded or mode == "isolated"))


def span(layers: Sequence[int]) -> str:
    """Layer numbers as text: ``3 to 7`` for three or more in a row, else each."""
    whole = len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
