"""The second opinion and the refs agree: on every field of the plan, on nano and on random models."""

from functools import cache

import numpy as np
import pytest
import torch

from dsv4.floor import equations as eq
from dsv4.floor.dither import Dither
from dsv4.floor.model import FloorModel
from dsv4.model import numerics
from dsv4.plan import Plan, change, choices
from dsv4.run.floor import distance
from dsv4.run.test_isolated import isolated
from dsv4.taps import BY_NAME

FIELDS = [(name, value) for name, values in choices().items() for value in values[1:]]
ULP = 2.0**-23
pytestmark = pytest.mark.xdist_group("nano")


class Traces:
    """The long prompt's traces under a plan, each run once: of the refs, and of the second opinion."""

    def __init__(self, setup):
        self.setup, self.config = setup, setup.checkpoint.config
        self.refs, self.floor = cache(self._refs), cache(self._floor)

    def _refs(self, plan):
        return isolated(self.setup, "long", self.setup.model(numerics.of_plan(plan, self.config)))

    def _floor(self, plan):
        return isolated(
            self.setup, "long", FloorModel(self.config, self.setup.checkpoint.weights, plan, None)
        )


@pytest.fixture(scope="module")
def traces(nano_audit):
    return Traces(nano_audit)


def agree(traces, plan):
    ours, theirs = traces.refs(plan), traces.floor(plan)
    assert ours.taps() == theirs.taps()
    for layer, name in ours.taps():
        one, other = ours.get(layer, name)[1], theirs.get(layer, name)[1]
        assert one.shape == other.shape, (layer, name)
        found = distance(one, other, BY_NAME[name].kind)
        # FP32 results may differ by their last bit, and a stored code may flip where that bit decides.
        unit = np.abs(other).max() if BY_NAME[name].kind == "lse" else 1.0  # lse's distance is no ratio
        assert found["draw_changed"] < 1e-3 or found["draw_worst"] <= 4 * ULP * unit, (
            plan,
            layer,
            name,
            found,
        )


@pytest.mark.parametrize(("field", "value"), [("norm_quant", "unfused"), *FIELDS])
def test_every_plan_field_is_read_alike(traces, field, value):
    agree(traces, change(Plan(), {field: value}))


def test_everything_at_once_is_read_alike(traces):
    agree(traces, change(Plan(), dict(FIELDS) | {"rounding": "plan"}))


@pytest.mark.parametrize(
    "field", ["norm_quant", "mhc_quant", "q_a_norm", "kv_norm", "casts.swiglu", "q_format"]
)
def test_the_other_reading_is_not_agreement(traces, field):
    """The comparison above can fail: the refs under one value are far from the floor under the other."""
    ours, theirs = traces.refs(change(Plan(), {field: choices()[field][1]})), traces.floor(Plan())
    found = [
        distance(ours.get(*key)[1], theirs.get(*key)[1], BY_NAME[key[1]].kind)["draw_changed"]
        for key in ours.taps()
    ]
    assert max(found) > 0.01


def test_dither_has_the_size_of_fp32_accumulation():
    """Summing K products in FP32, in random order, errs by what the dither says, within a factor of 2."""
    generator = np.random.default_rng(5)
    terms = 1024
    a = generator.standard_normal((400, terms)).astype(np.float32)
    b = generator.standard_normal((400, terms)).astype(np.float32)
    products = (a * b).astype(np.float32)
    in_fp32 = np.add.accumulate(products, axis=1, dtype=np.float32)[:, -1].astype(np.float64)
    exact = products.astype(np.float64).sum(1)
    measured = np.sqrt(np.mean((in_fp32 - exact) ** 2) / np.mean(exact**2))
    row = torch.from_numpy(exact)
    noise = Dither(0)(row, terms) - row
    modelled = float((noise.square().mean() / row.square().mean()).sqrt())
    assert 0.5 < measured / modelled < 2.0


def test_no_seed_no_dither():
    x = torch.randn(5, 7, dtype=torch.float64)
    assert torch.equal(Dither(None)(x, 100), x)
    assert not torch.equal(Dither(1)(x, 100), x)
    assert torch.equal(Dither(1)(x, 100), Dither(1)(x, 100))


def test_choice_takes_the_smaller_index_at_a_tie():
    assert eq.largest(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 2]
    assert eq.largest(torch.tensor([1.0]), 3).tolist() == [0, -1, -1]
