"""The audit judges itself: planted faults are caught and located, moved roundings leave "within", noise does not."""

from dataclasses import fields, replace
from functools import cache, partial

import numpy as np
import pytest

from dsv4.dump import DumpReader, DumpWriter
from dsv4.faults import FAULTS
from dsv4.floor.model import FloorModel
from dsv4.judge.compare import compare
from dsv4.judge.gate import gate
from dsv4.judge.measure import measure, write
from dsv4.judge.verdict import Draws, judge
from dsv4.ladder import State
from dsv4.model import numerics
from dsv4.model.numerics import Numerics
from dsv4.model.records import ExactRecord
from dsv4.plan import Plan, change, flatten
from dsv4.run.conftest import _one_thread
from dsv4.run.floor import STATISTICS, write_floor
from dsv4.run.test_isolated import isolated
from dsv4.run.trace import write_trace
from dsv4.run.variant import write_variant
from dsv4.taps import BY_NAME
from kernels.formats import bf16
from kernels.rounding import exact

__all__ = ["_one_thread"]

pytestmark = pytest.mark.xdist_group("nano")
UNFUSED = "B0_unfused"
FUSED = {
    "norm_quant": "fused",
    "mhc_quant": "fused",
    "q_a_norm": "fused",
    "kv_norm": "fused",
    "kv_read": "in_place",
    "casts.router": "native",
    "casts.swiglu": "native",
    "casts.attn_out": "native",
    "casts.head": "native",
    "residual": "fp32",
}


@pytest.fixture(scope="module")
def floors(nano_audit):
    """Noise floors of the unfused plan and of one with no BF16 store left where a rung can remove it."""
    bottom = nano_audit.config.ladder[UNFUSED]
    fused = replace(bottom, id="fused", plan=change(Plan(), FUSED))
    for variant in (bottom, fused):
        for prompt in nano_audit.tokens:
            write_floor(nano_audit, variant, prompt)
    return {UNFUSED: bottom, "fused": fused}


class Floor:
    """A prompt's floor, read once for all that is compared with it."""

    def __init__(self, setup, variant, prompt):
        self.dump = DumpReader(setup.results / "floor" / variant.id / f"{prompt}.h5", keep=True)
        self.attrs = setup.attrs(prompt, "variant", variant.id, variant.plan)
        self.drawn = cache(partial(self.dump.dataset_attrs, "isolated"))


_read: dict[tuple[str, str], Floor] = {}


def outside(setup, variant, model, tmp_path, prompts=("long",)):
    """(layer, stage) of every tap that the verdict puts outside, with the floor of ``variant``."""
    found = set()
    for prompt in prompts:
        if (variant.id, prompt) not in _read:
            _read[variant.id, prompt] = Floor(setup, variant, prompt)
        path, floor = tmp_path / f"{prompt}.h5", _read[variant.id, prompt]
        with DumpWriter(path, floor.attrs) as writer:
            write_trace(writer, "isolated", isolated(setup, prompt, model))
        with DumpReader(path) as test:
            rows = compare(test, floor.dump, modes=("isolated",), against="floor")
        rows = rows[rows["part"] == "all"].reset_index(drop=True)
        at = [(row.phase, "model" if row.layer < 0 else int(row.layer), row.tap) for row in rows.itertuples()]
        draws = Draws(*(np.array([floor.drawn(*where)[name] for where in at]) for name in STATISTICS))
        verdicts = judge(rows, draws, flatten(variant.plan), variants=len(setup.config.ladder.default()))
        flagged = rows[verdicts["verdict"] == "outside"]
        found |= {(int(row.layer), BY_NAME[row.tap].stage) for row in flagged.itertuples()}
    return found


def points(num: Numerics, stored: bool):
    """Names of the rounding points of ``num`` that store BF16, or that store nothing."""
    wanted = bf16.round if stored else exact
    own = [f.name for f in fields(num) if getattr(num, f.name) is wanted]
    attn = [f"attn.{f.name}" for f in fields(num.attn) if getattr(num.attn, f.name) is wanted]
    return own + attn + [f"ffn.{f.name}" for f in fields(num.ffn) if getattr(num.ffn, f.name) is wanted]


def moved(num: Numerics, name: str, point):
    """``num`` with one rounding point replaced."""
    outer, _, inner = name.partition(".")
    if not inner:
        return replace(num, **{outer: point})
    return replace(num, **{outer: replace(getattr(num, outer), **{inner: point})})


def small(plan):
    from dsv4.model.random_model import small_config

    return numerics.of_plan(plan, small_config())


# A gathered FP8 record is exact in BF16, so is k's rope: those stores change nothing, and the verdict says so.
IDLE = {"read", "attn.k_nope", "attn.k_rope"}
DROPPED = [name for name in points(small(Plan()), stored=True) if name not in IDLE]
ADDED = [name for name in points(small(change(Plan(), FUSED)), stored=False) if name not in IDLE]


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_rounding_is_outside(nano_audit, floors, tmp_path, name):
    num = numerics.of_plan(Plan(), nano_audit.checkpoint.config)
    assert outside(nano_audit, floors[UNFUSED], nano_audit.model(moved(num, name, exact)), tmp_path)


@pytest.mark.parametrize("name", ADDED)
def test_an_added_rounding_is_outside(nano_audit, floors, tmp_path, name):
    num = numerics.of_plan(floors["fused"].plan, nano_audit.checkpoint.config)
    assert outside(nano_audit, floors["fused"], nano_audit.model(moved(num, name, bf16.round)), tmp_path)


def through_bf16(model, layers=None):
    """A quantiser that stores BF16 first: its rounding is doubled."""
    for stages in model.stages:
        inner = stages.ops.quantise_activation

        def doubled(x, fmt, *, inner=inner, **options):
            return inner(bf16.round(x), fmt, **options)

        stages.ops = replace(stages.ops, quantise_activation=doubled)
    return model


class DoubledRecord(ExactRecord):
    """A KV record whose writer rounds to BF16 before FP8."""

    def __init__(self, inner):
        object.__setattr__(self, "inner", inner)

    data_bytes = property(lambda self: self.inner.data_bytes)
    scale_bytes = property(lambda self: self.inner.scale_bytes)

    def encode(self, x):
        return self.inner.encode(bf16.round(x))

    def decode(self, data, scales):
        return self.inner.decode(data, scales)


def test_a_doubled_rounding_before_nvfp4_is_outside(nano_audit, floors, tmp_path):
    num = numerics.of_plan(floors["fused"].plan, nano_audit.checkpoint.config)
    found = outside(nano_audit, floors["fused"], through_bf16(nano_audit.model(num)), tmp_path)
    assert {"attn_quant", "moe_quant", "q_quant"} <= {stage for _, stage in found}


@pytest.mark.parametrize(
    ("field", "stage"), [("record", "kv_store"), ("record", "comp_store"), ("index_record", "index_k_store")]
)
def test_a_doubled_rounding_before_the_cache_is_outside(nano_audit, floors, tmp_path, field, stage):
    num = numerics.of_plan(floors["fused"].plan, nano_audit.checkpoint.config)
    num = replace(num, **{field: DoubledRecord(getattr(num, field))})
    assert stage in {
        found for _, found in outside(nano_audit, floors["fused"], nano_audit.model(num), tmp_path)
    }


@pytest.mark.parametrize("build", range(20))
def test_another_build_is_never_flagged(nano_audit, floors, tmp_path, build):
    """A build that accumulates in FP32 in an order of its own: the floor's equations under a fresh dither."""
    variant = floors["fused" if build % 2 else UNFUSED]
    model = FloorModel(
        nano_audit.checkpoint.config, nano_audit.checkpoint.weights, variant.plan, 1_000_003 + build
    )
    assert outside(nano_audit, variant, model, tmp_path, ("short", "long")) == set()


def test_the_refs_are_within(nano_audit, floors, tmp_path):
    for variant in floors.values():
        model = nano_audit.model(numerics.of_plan(variant.plan, nano_audit.checkpoint.config))
        assert outside(nano_audit, variant, model, tmp_path, ("short", "long")) == set()


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_planted_fault_fails_the_gate_and_is_located(nano_audit, floors, name):
    fault, bottom = (FAULTS[name] if name else None), floors[UNFUSED]
    write_variant(nano_audit, bottom, fault.install if fault else None)
    table, notes = measure(nano_audit.results, nano_audit.config.ladder, UNFUSED, nano_audit.tokens)
    write(nano_audit.results / "metrics" / f"{UNFUSED}.parquet", table, notes)
    verdict = gate(nano_audit.results, nano_audit.config, UNFUSED)
    if fault is None:
        assert verdict["status"] == State.PASS, verdict["reasons"]
        return
    assert verdict["status"] == State.FAIL
    assert (verdict["culprit"]["layer"], verdict["culprit"]["stage"]) == (fault.layer, fault.stage), verdict[
        "reasons"
    ]
    if name == "scales_rolled":
        assert "layer 6, kv_bytes (kv_store): scale stored is not the scale applied" in verdict["reasons"][0]
