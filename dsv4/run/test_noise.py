"""Free runs under noise: none is the plan's own run; some drifts from it, the further the deeper."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from dsv4.floor.dither import Dither
from dsv4.floor.model import FloorModel
from dsv4.model import numerics
from dsv4.model.ops import REFS
from dsv4.run.floor import distance
from dsv4.run.noise import OWN, measure_draw, read_inputs, write_noise
from dsv4.run.noisy import with_noise
from dsv4.run.test_isolated import isolated
from dsv4.run.variant import write_variant
from dsv4.taps import BY_NAME

# Results that a plan keeps in FP32: there the noise itself is seen, not the few values that it moves by a step.
pytestmark = pytest.mark.xdist_group("nano")
UNSTORED = (
    "attn_pre",
    "attn_post",
    "attn_comb",
    "comp",
    "index_k",
    "index_scores",
    "router_scores",
    "logits",
)


@pytest.fixture(scope="module")
def bottom(nano_audit):
    """Return the lowest rung, its dumps written."""
    variant = nano_audit.config.ladder["B0_unfused"]
    write_variant(nano_audit, variant)
    return variant


@pytest.fixture(scope="module")
def table(nano_audit, bottom):
    """Return the rows of two draws."""
    write_noise(nano_audit, bottom, draws=2)
    return pd.read_parquet(nano_audit.results / "noise" / f"{bottom.id}.parquet")


def test_a_run_without_noise_is_the_variants_own_in_every_bit(nano_audit, bottom):
    found = measure_draw(nano_audit, bottom, read_inputs(nano_audit), None)
    assert found["equal"].all()
    assert set(found["prompt"]) == set(nano_audit.tokens)


def test_a_free_run_drifts_the_further_the_deeper(table):
    assert sorted(table["draw"].unique()) == [0, 1]
    assert set(table["against"]) == {OWN}
    assert set(table["mode"]) == {"compounded"}
    whole = table[(table["step"] == -1) & table["tap"].isin(["attn_out", "moe_out"])]
    by_layer = whole.groupby(["draw", "tap", "layer"])["rel_l2"].max().unstack()
    assert (by_layer > 0).all(axis=None)
    first, last = by_layer[0], by_layer[by_layer.columns[-3:]].min(axis=1)
    assert (last > 3 * first).all()
    assert by_layer.to_numpy().max() < 1  # a free run stays the same model's


def test_draws_differ_and_a_draw_can_be_repeated(nano_audit, bottom, table):
    sizes = [table.loc[table["draw"] == draw, "rel_l2"].to_numpy() for draw in (0, 1)]
    assert not np.array_equal(*sizes, equal_nan=True)
    again = measure_draw(nano_audit, bottom, read_inputs(nano_audit), 1)
    np.testing.assert_array_equal(again["rel_l2"], sizes[1])


def test_steps_of_the_logits_are_there(table):
    steps = table[(table["tap"] == "logits") & (table["step"] >= 0)]
    assert steps["kl_nats"].notna().all()
    assert set(steps["step"]) == {0, 1, 2, 3, 4}


def test_noise_has_the_size_that_the_floor_draws(nano_audit, bottom):
    """Op by op on the same inputs: the refs under noise move as far as the second opinion when dithered."""
    config, weights = nano_audit.checkpoint.config, nano_audit.checkpoint.weights
    model = nano_audit.model(numerics.of_plan(bottom.plan, config))
    ours = [replace(model, ops=with_noise(REFS, Dither(seed, normals=torch.float32))) for seed in (None, 7)]
    theirs = [FloorModel(config, weights, bottom.plan, seed) for seed in (None, 7)]
    still, moved, floor, drawn = (isolated(nano_audit, "long", one) for one in (*ours, *theirs))
    for name in UNSTORED:
        layers = [layer for layer, tap in still.taps() if tap == name]
        ratios = [_far(moved, still, layer, name) / _far(drawn, floor, layer, name) for layer in layers]
        assert 0.4 < np.exp(np.mean(np.log(ratios))) < 2.5, (name, ratios)


def _far(one, other, layer, name):
    return distance(one.get(layer, name)[1], other.get(layer, name)[1], BY_NAME[name].kind)["draw_distance"]
