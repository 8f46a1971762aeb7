"""No number of a verdict is made from part of what was measured."""

import numpy as np
import pandas as pd
import pytest

from dsv4.judge.evaluate import layer_value
from dsv4.judge.gate import gate
from dsv4.judge.limits import limits
from dsv4.ladder import State

METRICS = sorted({limit.metric for limit in limits()} | {"top1", "rel_l2_worst"})


def spoiled(audit, tap, value, mode):
    """Verdict on a variant with one NaN or Inf in the decode rows of layer 1 (or of the model)."""

    def change(m, phase, layer, spec, array):
        if (m, phase, spec.name) != (mode, "decode", tap) or layer == 0:
            return array
        array = array.copy()
        array[3].reshape(-1)[5] = value
        return array

    audit.variant("B0_unfused", change).measured("B0_unfused")
    return gate(audit.results, audit.config, "B0_unfused")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_layer_with_a_prompt_that_is_not_finite_has_no_cosine(audit, value):
    verdict = spoiled(audit, "attn_out", value, "isolated")
    assert verdict["status"] == State.FAIL
    cos = verdict["cos"]
    assert (cos["min"], cos["mean"]) == (None, None)
    assert cos["per_layer"] == cos["by_tap"]["attn_out"] == [pytest.approx(1, abs=1e-5), None]
    assert None not in cos["by_tap"]["moe_out"]
    assert (cos["worst"]["layer"], cos["worst"]["step"]) == (1, 3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("tap", "metric"), [("logits", "kl_nats"), ("hidden", "rel_l2")])
def test_a_free_run_that_is_not_finite_has_no_distance(audit, tap, metric, value):
    verdict = spoiled(audit, tap, value, "compounded")
    assert verdict["status"] == State.FAIL
    assert (verdict["ledger"]["sum"][metric], verdict["ledger"]["plain"][metric]) == (None, None)
    gone = dict.fromkeys(("kl_nats", "top1", "kl_worst", "kl_plain"))
    assert (verdict["e2e"].items() >= gone.items()) == (tap == "logits")
    if tap == "logits":
        assert verdict["e2e"]["worst"] == {"prompt": "one", "phase": "decode"}


def test_what_moved_to_nan_has_no_distance_to_the_parent(audit):
    def change(mode, phase, layer, tap, array):
        if tap.kind != "value":
            return array
        moved = array * 2
        if tap.name == "qr":
            moved[3] = np.nan
        return moved

    audit.variant("B0_unfused")
    audit.variant("P4", change).measured("P4")
    assert gate(audit.results, audit.config, "P4")["vs_parent"]["rel_l2_max"] is None


@pytest.mark.parametrize("metric", METRICS)
def test_a_layers_value_is_of_all_its_prompts(metric):
    column = "gain" if metric == "gain_error" else metric
    rows = pd.DataFrame({"layer": [0, 0, 1, 1, 2], "rows": 4, "nonfinite": [0.0, 0, 0, 3, np.nan]})
    rows = rows.assign(**{column: [0.5, 0.25, 0.5, np.nan, 0.5]})
    found = layer_value(rows, metric)
    assert found.index.tolist() == [0, 1, 2]
    assert np.isnan(found[1])
    assert np.isfinite(found[[0, 2]]).all()
    whole = layer_value(rows.assign(nonfinite=0.0), metric)  # a value that is not there is left out
    assert np.isfinite(whole).all()
