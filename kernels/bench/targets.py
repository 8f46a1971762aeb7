"""What each group of rows must reach and aims at: `kernels/bench_case.py`'s ``group`` names one.

A target is of one of two kinds: our time over another path's (at most), or the share of the floor (at least).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.bench.results import Row, ours
from kernels.bench.statistics import geometric_mean
from kernels.bench_case import REPLACED


@dataclass(frozen=True, kw_only=True)
class Target:
    """One line of the project's table.

    Attributes
    ----------
    title : what is measured against what.
    against : the other path; None: the floor.
    must, aim : ours / other at most, or share at least.
    average : whether the geometric mean of the group counts, rather than every row.
    each : with ``average``: what every single row must reach, too.
    rows : beginning of a row's name -> its own ``must`` and ``aim``.
    of : what the name of a row that counts must hold; other rows of the group stand beside.
    """

    title: str
    against: str | None
    must: float
    aim: float
    average: bool = False
    each: float | None = None
    rows: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    of: str = ""


TARGETS: dict[str, Target] = {
    "b0": Target(title="B0's own share of its floor, whole", against=None, must=0.6, aim=0.6, of=", whole"),
    "b1_b0": Target(
        title="B1 against our own B0, q_b's output to attn_out", against=REPLACED, must=1 / 2.5, aim=1 / 4
    ),
    "b1_q2_b0": Target(title="B1 with two q terms against B0", against=REPLACED, must=1 / 1.8, aim=1 / 4),
    "b1_flashmla": Target(
        title="B1 on the 584-byte record against FlashMLA, q quantisation included",
        against="flashmla",
        must=1.0,
        aim=0.75,
        average=True,
    ),
    "b1_aligned_flashmla": Target(
        title="B1 on the aligned record against FlashMLA", against="flashmla", must=1.0, aim=0.6
    ),
    "b1_q2_flashmla": Target(
        title="B1 with two q terms against FlashMLA", against="flashmla", must=1.1, aim=0.8
    ),
    "b2_prefill": Target(
        title="B2 logits, prefill, against DeepGEMM", against="deepgemm", must=1 / 0.95, aim=1.0
    ),
    "b2_decode": Target(
        title="B2 logits, decode over a paged cache, against DeepGEMM",
        against="deepgemm",
        must=1.0,
        aim=0.95,
        average=True,
        each=1.1,
    ),
    "topk": Target(title="top-k 512 against torch.topk", against=REPLACED, must=1 / 3, aim=1 / 6),
    "b2_whole": Target(
        title="B2 whole against FP32 einsum + torch.topk",
        against=REPLACED,
        must=1 / 4,
        aim=1 / 8,
        rows={"B=64": (1 / 12, 1 / 18)},
    ),
    "mhc_gemm": Target(
        title="mHC mixing GEMM + Sinkhorn against DeepGEMM's GEMM alone",
        against="deepgemm",
        must=1.0,
        aim=0.8,
    ),
    "p4_p5_prefill": Target(title="P4, P5 at T = 4096: share of the floor", against=None, must=0.75, aim=0.9),
    "p4_p5_decode": Target(
        title="P4, P5 at T = 1 against the unfused path of torch's ops; our own unfused kernels beside",
        against=REPLACED,
        must=1 / 3,
        aim=1 / 3,
    ),
    "nvfp4_moe": Target(
        title="NVFP4 MoE, weight bytes: share of the floor", against=None, must=0.65, aim=0.85
    ),
    "nvfp4_linear": Target(
        title="NVFP4 q_b, o_b, weight bytes: share of the floor", against=None, must=0.5, aim=0.85
    ),
}


def reached(target: Target, rows: Sequence[Row]) -> str:
    """Return ``aim``, ``must``, ``missed`` or ``not measured`` for the rows of one group on one device."""
    rows = [row for row in rows if target.of in row["name"]]
    values = [measured(target, row) for row in rows]
    found = [value for value in values if value is not None]
    if not found or len(found) < len(rows):
        return "not measured"
    if target.average:
        single = all(_meets(target, value, target.each) for value in found) if target.each else True
        mean = geometric_mean(found)
        met = [_meets(target, mean, limit) and single for limit in (target.must, target.aim)]
    else:
        limits = [_limits(target, row["name"]) for row in rows]
        met = [all(_meets(target, v, pair[i]) for v, pair in zip(found, limits, strict=True)) for i in (0, 1)]
    return "aim" if met[1] else "must" if met[0] else "missed"


def _limits(target: Target, name: str) -> tuple[float, float]:
    own = (pair for begin, pair in target.rows.items() if name.startswith(begin))
    return next(own, (target.must, target.aim))


def _meets(target: Target, value: float, limit: float) -> bool:
    """Shares are to be large, ratios small."""
    return value >= limit if target.against is None else value <= limit


def measured(target: Target, row: Row) -> float | None:
    """What a target looks at in a row: ours / other, or the share of the floor."""
    if target.against is not None:
        found: Any = row["ratios"].get(target.against)
        return found["median"] if found else None
    path = ours(row)
    return path.get("share") if path else None
