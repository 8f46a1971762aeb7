import json

import numpy as np
import pandas as pd
import pytest
import vl_convert

from dsv4.report import bounds, charts, frames, heat, ladder_charts, panels, step_time, text_charts
from dsv4.report.measurements import empty_metrics

pytestmark = pytest.mark.xdist_group("report")


def rows(**columns):
    """Three measurements: layers 0 to 2, unless a column says otherwise."""
    base = {
        "variant": "B1",
        "mode": "isolated",
        "phase": "decode",
        "prompt": ["code", "chat", "code"],
        "layer": [0, 1, 2],
        "tap": "attn_out",
        "part": "all",
        "against": "trained",
        "rows": 4,
        "cos": [0.99, 0.999, 1.0],
        "cos_min": [0.9, 0.99, 1.0],
        "worst_row": 7,
        "gain": 1.0,
        "rel_l2": [0.1, 0.03, 0.0],
        "nonfinite": 0,
        "changed": [0.5, 0.1, 0.0],
    }
    return pd.concat([empty_metrics(), pd.DataFrame(base | columns)], ignore_index=True)


def cells(**columns):
    found = frames.heat(frames.cells(rows(**columns)))
    return bounds.with_noise(bounds.with_limits(bounds.with_floor(found), {}), NOISE)


def drawn(**columns):
    """Two draws of a plan's free runs."""
    free = {"variant": "B0", "mode": "compounded", "against": "own run"} | columns
    draws = [
        rows(rel_l2=size, cos=1 - size**2 / 2, **free).assign(draw=draw)
        for draw, size in ((0, 0.1), (1, 0.2))
    ]
    return pd.concat(draws, ignore_index=True)


NOISE = empty_metrics()
IDS = {
    "tap": "topk",
    "cos": np.nan,
    "rel_l2": np.nan,
    "overlap": [0.9, 1.0, 0.5],
    "overlap_min": [0.5, 1.0, 0.1],
}
LOGITS = {"tap": "logits", "layer": -1, "mode": "compounded", "kl_nats": [1e-3, 1e-4, 0.0], "top1": 1.0}
STEPS = {"step": [0, 1, 2], "mode": "compounded"}
LEDGER = pd.DataFrame(
    [("kl_nats", "B1", "own cost", 0.0, 1e-9, 1e-3), ("kl_nats", "B1", "sum so far", 2e-4, 2e-4, None)],
    columns=["measure", "variant", "what", "value", "shown", "budget"],
)
KL = pd.DataFrame(
    {
        "variant": "B1",
        "what": ["KL", "KL", "reference stops", "first difference"],
        "step": [0.0, 16.0, 30.0, 20.0],
        "last": [15.0, 29.0, 30.0, 20.0],
        "kl_mean": [1e-4, 0.0, None, None],
        "kl_median": [1e-5, 0.0, None, None],
        "kl_low": [1e-6, 0.0, None, None],
        "kl_high": [1e-3, 1e-12, None, None],
        "at_least": [1e-4, 1e-9, None, None],
        "bad": "",
    }
)
CLASSES = pd.DataFrame(
    {
        "variant": ["B0", "B1", "B1"],
        "name": ["letter", "letter", "chat"],
        "top1": [1.0, 0.9, 0.8],
        "n": 9,
        "kl_nats": 0.1,
    }
)
TIMES = pd.DataFrame(
    [
        ("B1", what, us, us - 1, us + 1, 0.9)
        for what, us in ((step_time.OWN, 820.0), (step_time.PARENT, 900.0))
    ],
    columns=list(step_time.COLUMNS),
)
LAYERS = [{"layer": layer, "absmax": 3.0**layer, "ulp": 2.0**-6} for layer in range(3)]
BUILT = {
    "layer_cosine": lambda: charts.layer_cosine(cells()),
    "gain": lambda: charts.gain(cells()),
    "heat_excess": lambda: heat.heat_excess(cells(against="floor", excess=[0.1, 0.9, 3.0])),
    "heat_error": lambda: heat.heat_error(cells()),
    "choices": lambda: charts.choices(cells(**IDS)),
    "codes": lambda: charts.codes(frames.codes(rows(tap="kv_bytes", against="parent"))),
    "drift": lambda: charts.drift(bounds.with_step_noise(frames.drift(rows(**STEPS)), NOISE)),
    "end_to_end": lambda: ladder_charts.end_to_end(frames.end_to_end(rows(**LOGITS)), ["B0", "B1"]),
    "by_position": lambda: text_charts.by_position(KL),
    "by_class": lambda: text_charts.by_class(CLASSES),
    "magnitude": lambda: text_charts.magnitude(text_charts.magnitudes(LAYERS, "layer"), "layer"),
    "step_times": lambda: ladder_charts.step_times(TIMES, ["B0", "B1"]),
    "ledger": lambda: ladder_charts.ledger(LEDGER, ["B0", "B1"]),
}


@pytest.mark.parametrize("name", BUILT)
def test_chart_draws_three_rows(name):
    spec = BUILT[name]().to_dict()
    assert spec["datasets"]["rows"]
    assert spec["description"]
    spec["width"] = 300  # "container" has no size outside a page
    svg = vl_convert.vegalite_to_svg(json.dumps(spec))
    assert svg.count('role="graphics-symbol"') >= 2


@pytest.mark.parametrize("name", BUILT)
def test_chart_names_no_colour_of_its_own(name):
    text = json.dumps(BUILT[name]().to_dict()["layer"])
    assert "#" not in text
    assert "var(--" in text


def test_chart_of_no_rows_builds():
    empty = cells().iloc[:0]
    for build in (charts.layer_cosine, charts.gain, charts.choices, heat.heat_error, heat.heat_excess):
        assert build(empty).to_dict()["datasets"]["rows"] == []


def chosen(chart, rung):
    """Drawing of a chart with a rung chosen."""
    spec = chart.to_dict() | {"width": 300}
    for param in spec["params"]:
        if param["name"] == "rung":
            param["value"] = rung
    return vl_convert.vegalite_to_svg(json.dumps(spec))


def test_chosen_rung_has_its_band_and_the_marks_of_its_texts():
    mine, other = chosen(text_charts.by_position(KL), "B1"), chosen(text_charts.by_position(KL), "B0")
    for said in ("reference stops", "first difference"):
        assert f">{said}<" in mine
        assert f">{said}<" not in other
    assert mine.count("mark-area") > 0
    assert ">1e-9<" in mine  # a KL of 0 is drawn there


def test_kl_that_is_no_number_is_a_cross():
    broken = KL.assign(bad=["", "2 not finite", "", ""])
    assert "✕" in chosen(text_charts.by_position(broken), "B1")


def test_non_finite_is_a_cross_and_not_a_number():
    found = cells(nonfinite=[0, 3, 0], cos=[0.99, np.nan, 1.0], rel_l2=[0.1, np.nan, 0.0])
    assert found["bad"].tolist() == ["", "3 non-finite", ""]
    spec = charts.layer_cosine(found).to_dict()
    spec["width"] = 300
    assert "✕" in vl_convert.vegalite_to_svg(json.dumps(spec))


def test_worst_prompt_is_kept():
    found = frames.cells(rows(layer=0, prompt=["a", "b", "c"], rel_l2=[0.1, 0.3, 0.2], cos=[0.99, 0.98, 0.9]))
    assert len(found) == 1
    assert found.loc[0, "cos"] == 0.9
    assert found.loc[0, "rel_l2"] == 0.3
    assert found.loc[0, "at"] == "b, decode, row 7"


def test_one_bad_prompt_is_not_hidden_by_good_ones():
    found = frames.cells(rows(layer=0, rel_l2=[0.1, np.inf, 0.2]))
    assert found["bad"].tolist() == ["infinite"]


def test_no_rows_of_a_phase_is_nothing_bad():
    assert frames.cells(rows(rows=0, cos=np.nan, rel_l2=np.nan))["bad"].eq("").all()


def test_steps_stay_out_of_the_aggregates():
    both = pd.concat([rows(layer=0), rows(layer=0, step=[0, 1, 2], rel_l2=9.0)], ignore_index=True)
    assert frames.cells(both).loc[0, "rel_l2"] == 0.1


def test_level_counts_edges_from_below():
    found = frames.level(pd.Series([np.nan, 0.0, 1e-6, 2e-6, 1.0]), frames.ERROR_EDGES)
    assert found.tolist() == [-1, 0, 0, 1, 6]


def test_scale_bytes_stand_apart_from_codes():
    metrics = rows(tap="kv_bytes", against="parent", part=["all", "scale", "rope"], layer=0)
    assert frames.codes(metrics)["point"].tolist() == ["kv_bytes", "kv_bytes, scales"]


def test_floor_is_the_distance_at_which_it_would_have_tripped():
    both = pd.concat([rows(), rows(against="floor", rel_l2=0.01, excess=0.5)], ignore_index=True)
    found = bounds.with_floor(frames.cells(both))
    assert np.allclose(found["floor"], 1 - np.sqrt(1 - 0.02**2))


def test_noise_band_spans_the_draws_of_a_plan_and_is_drawn():
    free = frames.heat(frames.cells(rows(mode="compounded", rel_l2=[0.1, 0.3, 0.0])))
    found = bounds.with_noise(bounds.with_limits(bounds.with_floor(free), {}), drawn())
    assert np.allclose(found["noise_low"], 0.005)
    assert np.allclose(found["noise_high"], 0.02)
    assert np.allclose(found["over_noise"], [0.5, 1.5, 0.0])
    assert set(found["noise_of"]) == {"plan B0, 2 draws"}
    spec = charts.layer_cosine(found).to_dict()
    spec["width"] = 300
    svg = vl_convert.vegalite_to_svg(json.dumps(spec))
    assert svg.count("mark-area") > 0
    assert "plan B0, 2 draws" in svg

    steps = bounds.with_step_noise(frames.drift(rows(**STEPS)), drawn(step=[0, 1, 2]))
    assert np.allclose(steps["noise_high"], 0.02)


def test_noise_of_free_runs_is_not_drawn_over_isolated_cells_or_where_there_is_none():
    isolated = bounds.with_noise(cells(), drawn())
    assert isolated[["noise_low", "noise_high", "over_noise"]].isna().all(axis=None)
    assert set(isolated["noise_of"]) == {""}
    assert bounds.with_noise(cells(mode="compounded"), NOISE)["noise_high"].isna().all()
    assert bounds.with_step_noise(frames.drift(rows(**STEPS)), NOISE)["noise_high"].isna().all()


def test_limit_on_relative_l2_is_one_on_cosine():
    limit = {"tap": "attn_out", "metric": "rel_l2", "against": "trained", "mode": "isolated", "value": 0.6}
    found = bounds.with_limits(cells(), {"B1": [limit, limit | {"value": 0.8}, limit | {"part": "rope"}]})
    assert np.allclose(found["limit"], 1 - 0.8)
    assert bounds.with_limits(cells(), {"B2": [limit]})["limit"].isna().all()


def test_specs_cannot_close_their_script_element():
    panel = panels.Panel(id="x", title="", lead="", chart=charts.gain(cells(prompt="</script>")), columns=())
    assert "<" not in panels.specs([panel])
