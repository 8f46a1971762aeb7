"""The panel and the table of quantisation points."""

import json

import pytest
import vl_convert

from dsv4.report import points
from dsv4.report.conftest import read
from dsv4.report.load import load
from dsv4.report.measurements import ReportError
from dsv4.report.page import render
from dsv4.report.samples import CONFIG

pytestmark = pytest.mark.xdist_group("report")


@pytest.fixture(scope="module")
def audit(failing):
    return read(failing)


def drawn(found):
    spec = points.histogram(found).to_dict()
    spec["width"] = 400  # "container" has no size outside a page
    return vl_convert.vegalite_to_svg(json.dumps(spec))


def of(audit, variant):
    found = points.frame(audit)
    return found[found["variant"] == variant]


def test_shares_of_the_bins_add_up(audit):
    found = points.frame(audit)
    assert found[list(points.SHARES)].sum(axis=1).to_numpy() == pytest.approx(1.0)
    worst = of(audit, "P4_scalar_gsa").iloc[0]
    assert (worst["within"], worst["beyond"], worst["largest"]) == (0.5, 0.45, 2.7)
    assert worst["worst"] == "code, decode, row 131"


def test_a_correct_store_has_bars_and_no_mark(audit):
    svg = drawn(of(audit, "B1"))
    assert svg.count('aria-roledescription="rect mark"') == 3 * (3 * 8 + 3)
    assert not {"▲", "≠", "✕"} & set(svg)


def test_further_off_is_a_triangle_and_another_scale_an_unequal_sign(audit):
    assert drawn(of(audit, "P4_scalar_gsa")).count("▲") == 8
    assert drawn(of(audit, "KV_nvfp4")).count("≠") == 1


def test_what_is_not_finite_is_a_cross_and_not_a_number(failing):
    audit = read(failing, "P4")
    line = audit.verdicts["P4"]["quantisation"][0]
    line["largest"][3], line["beyond"][3] = None, 1
    found = of(audit, "P4")
    assert found["bad"].tolist().count("a value") == 1
    assert "✕" in drawn(found)
    lines = points.table(audit, points.frame(audit))
    assert next(row for row in lines if row["variant"] == "P4")["largest"] == "not finite"


def test_the_chart_names_no_colour_of_its_own_and_stands_empty(audit):
    text = json.dumps(points.histogram(of(audit, "B1")).to_dict()["layer"])
    assert "#" not in text
    assert "var(--" in text
    assert points.histogram(points.frame(audit).iloc[:0]).to_dict()["datasets"]["rows"] == []


def test_the_table_says_it_in_words(audit):
    lines = {(row["variant"], row["point"]): row for row in points.table(audit, points.frame(audit))}
    assert lines["B1", "kv_store, nope"] == {
        "variant": "B1",
        "point": "kv_store, nope",
        "format": "e4m3_ue8m0_64",
        "within": "100%",
        "beyond": "0",
        "largest": "0.500",
        "ratio": "1",
        "same": "yes",
    }
    assert lines["KV_nvfp4", "kv_store, nope"]["same"] == "no"
    assert lines["KV_nvfp4", "kv_store, nope"]["ratio"] == "1 to 2"
    assert lines["P4_scalar_gsa", "attn_in_q"]["beyond"] == "45.0%"
    assert lines["P4_scalar_gsa", "attn_in_q"]["same"] == "not dumped"
    assert lines["B1", "kv_store, rope"]["same"] == "no scale"


def test_a_page_without_points_still_stands(failing):
    audit = read(failing, "P4")
    for verdict in audit.verdicts.values():
        verdict.pop("quantisation", None)
    assert "Quantisation points" in render(audit)


def test_points_of_a_wrong_type_are_named(failing, tmp_path):
    gates = json.loads((failing / "gates.json").read_text())
    gates["variants"][0]["quantisation"][0]["bins"] = [[1, 2]]
    (tmp_path / "gates.json").write_text(json.dumps(gates))
    with pytest.raises(ReportError, match="quantisation"):
        load(tmp_path, CONFIG)
