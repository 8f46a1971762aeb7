"""Time of a decode step on the page: the ladder's column, the chart's rows, the stages that changed."""

import json
import re

import pytest

from dsv4.report import step_time
from dsv4.report.load import load
from dsv4.report.page import render
from dsv4.report.samples import CONFIG, write

pytestmark = pytest.mark.xdist_group("report")


def spread(us):
    return {"median": us, "q1": us - 1, "q3": us + 1, "min": us - 2, "n": 41}


TIME = {
    "parent": "B1a",
    "step_us": spread(820.0),
    "parent_us": spread(900.0),
    "ratio": {"median": 0.911, "q1": 0.910, "q3": 0.913, "min": 0.9, "n": 41},
    "stages": {"attend": [100.0, 175.0], "q_b": [45.0, 41.0], "kv": [20.0, 20.2]},
}


@pytest.fixture
def audit(tmp_path):
    results = write(tmp_path / "results" / "nano", failing=False)
    path = results / "gates.json"
    gates = json.loads(path.read_text())
    for verdict in gates["variants"]:
        if verdict["id"] == "B1":
            verdict["cost"] = verdict["cost"] | {"time": TIME}
        elif verdict["id"] == "B0_unfused":
            verdict["cost"] = verdict["cost"] | {
                "time": TIME | {"parent_us": None, "ratio": None, "stages": {}}
            }
    path.write_text(json.dumps(gates))
    return load(results, CONFIG)


def test_a_line_says_what_the_step_took_and_where_it_changed(audit):
    lines = {line["variant"]: line for line in step_time.table(audit)}
    assert lines["B1"]["ratio"] == "0.91×"
    assert lines["B1"]["where"] == "attend −75 of 175, q_b +4 of 41"  # under a microsecond is not said
    assert lines["B0_unfused"]["parent"] == lines["B0_unfused"]["ratio"] == "—"


def test_the_chart_has_both_sides(audit):
    rows = step_time.frame(audit)
    assert rows[rows["variant"] == "B1"]["us"].tolist() == [820.0, 900.0]
    assert rows[rows["variant"] == "B0_unfused"]["what"].tolist() == [step_time.OWN]


def test_the_page_shows_a_column_only_where_something_was_timed(audit, page):
    assert not re.search(r">step time<", page)
    page = render(audit)
    assert 'title="820 us (819 to 821); parent 900 us; ratio 0.910 to 0.913">0.91×' in page
    assert "not measured on this device" not in page
    assert 'id="p-times"' in page
