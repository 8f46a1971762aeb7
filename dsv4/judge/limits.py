"""Every limit of the audit, and nowhere else one.

A limit's value is what the number formats on its path cost, derived by
``dsv4/judge/derive_limits.py`` into ``limits.json`` beside it (a test recomputes it), never
read off the rungs that it judges. ``config.yaml`` may tighten a limit; loosening one is refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from dsv4.taps import BY_NAME

FILE = Path(__file__).with_name("limits.json")
SOURCE = "dsv4/judge/derive_limits.py"

When = tuple[tuple[str, tuple[str, ...]], ...]


class LimitError(ValueError):
    """A limit in the configuration that is unknown or looser than ours; names it and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One bound on one measured number.

    Attributes
    ----------
    name : ``tap[.part].metric.against[.case]``; the key of ``config.tighten``.
    tap, part, metric : columns of the metrics table; ``gain_error`` is ``|gain - 1|``.
    direction : "max": the value may not exceed ``value``; "min": may not fall below it.
    value : the bound, on a layer: see :func:`dsv4.judge.evaluate.layer_value`.
    against : "trained", "plain", "parent" or "B0".
    mode : "isolated" or "compounded".
    source : script and entry of its output that give the value.
    when : plan fields and the values for which the limit holds; empty: always.
    """

    name: str
    tap: str
    part: str = "all"
    metric: str
    direction: Literal["max", "min"]
    value: float
    against: str = "trained"
    mode: str = "isolated"
    source: str
    when: When = ()

    def applies(self, plan: Mapping[str, str]) -> bool:
        """Whether the limit holds for a flattened plan."""
        return all(plan[field] in values for field, values in self.when)

    def exceeded(self, value: float) -> bool:
        """Whether ``value`` is beyond the limit; NaN is."""
        return not (value <= self.value if self.direction == "max" else value >= self.value)


@cache
def derived() -> Mapping[str, float]:
    """Values that the script derived, by entry."""
    return json.loads(FILE.read_text())["values"]


def _limit(entry: str, tap: str, metric: str, *, case: str = "", when: When = (), **where: str) -> Limit:
    key = entry if entry in derived() else f"{entry}.{metric.replace('gain_error', 'gain')}"
    part, against = where.get("part", "all"), where.get("against", "trained")
    middle = (*(() if part == "all" else (part,)), metric, against, *((case,) if case else ()))
    return Limit(
        name=".".join((tap, *middle)),
        tap=tap,
        metric=metric,
        direction="max",
        value=derived()[key],
        source=f"{SOURCE}: {key}",
        when=when,
        **where,
    )


def _stored() -> Iterator[Limit]:
    """What a format stores, against what it was given."""
    for entry, tap in (("nvfp4", "attn_in_q"), ("nvfp4_lora", "qr_q"), ("nvfp4", "moe_in_q")):
        for metric in ("rel_l2", "rel_l2_worst", "gain_error"):
            yield _limit(entry, tap, metric)
    for tap in ("kv_store", "comp_store"):  # the FP8 record is the budget, whatever a plan stores
        for metric in ("rel_l2", "rel_l2_worst", "gain_error"):
            yield _limit("fp8_nope", tap, metric, part="nope", against="plain")
        yield _limit("bf16_rope", tap, "rel_l2", part="rope", against="plain")
    fp8, fp4 = (("index_score", ("einsum_fp32", "fp8")),), (("index_score", ("fp4",)),)
    for metric in ("rel_l2", "gain_error"):
        yield _limit("index_key_fp8", "index_k_store", metric, against="plain", case="fp8", when=fp8)
        yield _limit("index_key_fp4", "index_k_store", metric, against="plain", case="fp4", when=fp4)


def _computed() -> Iterator[Limit]:
    """Ops that read rounded inputs or store rounded outputs, on the reference's inputs."""
    entries = {
        **dict.fromkeys(("attn_in", "moe_in", "hidden"), "bf16_norm_bf16"),
        **{name: name for name in ("qr", "q", "kv", "index_q", "index_w", "router_scores", "attn_proj")},
        **dict.fromkeys(("comp", "index_k"), "pooled"),
        **dict.fromkeys(("routed", "shared"), "expert"),
        **dict.fromkeys(("streams_mid", "streams", "moe_out"), "bf16"),
        **dict.fromkeys(("attn_pre", "attn_post", "moe_pre", "moe_post"), "gate"),
        **dict.fromkeys(("attn_comb", "moe_comb"), "comb"),
    }
    for tap, entry in entries.items():
        yield _limit(entry, tap, "rel_l2")
        if entry in ("bf16", "bf16_norm_bf16", "qr", "q", "kv", "attn_proj", "expert"):
            yield _limit(entry, tap, "gain_error")


def _attention() -> Iterator[Limit]:
    """Attention with q in BF16, and with q's nope part in one E4M3 term; against B0 by name too.

    Who rounds nothing reads other keys than ``trained``: it is held to BF16's bound against ``plain``.
    """
    rounds, exact = ("rounding", ("plan",)), (("rounding", ("none",)),)
    bf16, fp8 = (rounds, ("q_format", ("bf16",))), (rounds, ("q_format", ("fp8", "fp8x2")))
    yield _limit("attn_bf16", "attn_out", "rel_l2", against="plain", case="exact", when=exact)
    yield _limit("attn_bf16.lse", "lse", "max_abs", against="plain", case="exact", when=exact)
    for entry, case, when in (("attn_bf16", "q_bf16", bf16), ("attn_fp8", "q_fp8", fp8)):
        yield _limit(entry, "attn_out", "rel_l2", case=case, when=when)
        yield _limit(entry, "attn_out", "gain_error", case=case, when=when)
        lse = _limit(f"{entry}.lse", "lse", "max_abs", case=case, when=when)
        yield lse
    in_place = ("kv_read", ("in_place",))
    yield _limit("bf16", "attn_out", "rel_l2", against="B0", case="q_bf16", when=(in_place, *bf16))
    far = _limit("attn_fp8_b0", "attn_out", "rel_l2", against="B0", case="q_fp8", when=(in_place, *fp8))
    yield far
    # A vector moved by r of its length keeps a cosine of at least sqrt(1 - r^2).
    near = (1.0 - far.value**2) ** 0.5
    yield replace(far, name="attn_out.cos.B0.q_fp8", metric="cos", direction="min", value=near)


def _choices() -> Iterator[Limit]:
    """Selections: what FP8 scores may lose against the FP4 of training; FP4 must select the same."""
    fp8, fp4 = (("index_score", ("einsum_fp32", "fp8")),), (("index_score", ("fp4",)),)
    missed = _limit("index_missed", "index_scores", "overlap", case="fp8", when=fp8)
    yield replace(missed, direction="min", value=1.0 - missed.value)
    yield _limit("index_mass_lost", "index_scores", "mass_lost", case="fp8", when=fp8)
    yield _limit("index_scores", "index_scores", "rel_l2", case="fp8", when=fp8)
    yield _limit("fp32_sum", "index_scores", "margin_flipped", case="fp4", when=fp4)
    flips = _limit("experts_missed", "expert_ids", "overlap")
    yield replace(flips, direction="min", value=1.0 - flips.value)


def _ledger() -> Iterator[Limit]:
    """Budgets of the free run: a rung's own cost, and the sum of all rungs so far."""
    rounds = (("rounding", ("plan",)),)  # what taking all rounding away moves is no cost
    yield _limit("kl_own", "logits", "kl_nats", against="parent", mode="compounded", when=rounds)
    yield _limit("kl_sum", "logits", "kl_nats", against="trained", mode="compounded")


@cache
def limits() -> tuple[Limit, ...]:
    """All limits, as derived."""
    found = (*_stored(), *_computed(), *_attention(), *_choices(), *_ledger())
    names = [limit.name for limit in found]
    assert len(set(names)) == len(names)
    assert all(limit.tap in BY_NAME for limit in found)
    return found


def tightened(tighten: Mapping[str, float]) -> tuple[Limit, ...]:
    """All limits with those of ``config.tighten`` in place.

    Raises
    ------
    LimitError
        Unknown name, or a value that is looser than ours.
    """
    known = {limit.name: limit for limit in limits()}
    for name, value in tighten.items():
        if name not in known:
            raise LimitError(f"config.yaml: tighten: no limit {name!r}; limits: {', '.join(sorted(known))}")
        limit = known[name]
        if limit.exceeded(float(value)):
            way = "at most" if limit.direction == "max" else "at least"
            raise LimitError(
                f"config.yaml: tighten.{name} = {value:g} is looser than {way} {limit.value:g} ({limit.source});"
                " the configuration may only tighten: a looser limit is a change of the script that derives it"
            )
        known[name] = replace(limit, value=float(value), source="config.yaml: tighten")
    return tuple(known.values())
