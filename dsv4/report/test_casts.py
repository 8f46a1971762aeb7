"""The casts' section: what is open stands first, and what is missing is said."""

import json
import re
import shutil

import pytest

from dsv4.report import casts
from dsv4.report.document import filled
from dsv4.report.load import load
from dsv4.report.samples import CONFIG
from dsv4.report.samples import casts as sample

pytestmark = pytest.mark.xdist_group("report")


def text(page):
    section = page.partition('aria-labelledby="h-casts"')[2].partition("</section>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", section).split())


def test_open_casts_come_first_with_producer_direction_bytes_and_reason(page):
    said = text(page)
    assert (
        "1 open, 1 marker wrong in 12 files: 1 cast fixed by a rung, 1 exempt, 4 others are no hits" in said
    )
    gate, head, meant = (said.index(f"engine/layers.py:{line}") for line in (60, 41, 52))
    assert gate < head < meant
    assert "? → FP32, dtype not evident not evident 43: head(…) — 0 0 open" in said
    assert "BF16 → FP32, widened after narrow 40: norm(x) 43: head(…) 12 → 8 1,536 0 fixed by B4_head" in said
    assert "0 0 exempt the record is narrow" in said
    assert "stale: no cast on line 9" in said
    assert "engine/old.py:1: not swept" in said
    assert "No cast on engine/layers.py:7" in said
    assert "B0 1,536 1 B3 1,536 1 B4_head 0 0 Free: 4 in registers" in said


def test_a_list_without_a_trace_has_no_bytes_a_step():
    found = sample() | {"rungs": []}
    for cast in found["casts"]:
        cast["step"] = {}
    said = casts.shown(found)
    assert said["steps"] == []
    assert said["last"] == ""
    assert {row["calls"] for row in said["rows"]} == {"not run in a step"}


def test_a_missing_or_broken_list_is_a_gap(failing, tmp_path):
    copy = shutil.copytree(failing, tmp_path / "run")
    (copy / "casts.json").unlink()
    audit = load(copy, CONFIG)
    assert {gap.what: gap.why for gap in audit.gaps} == {
        "casts.json": "the decode path was not swept for casts"
    }
    section = filled(casts.TEMPLATE, {"casts": casts.shown(audit.casts)})
    assert "The decode path was not swept." in section
    for broken, why in (("{", "cannot be read"), (json.dumps({"schema": 2}), "is not of schema 1")):
        (copy / "casts.json").write_text(broken)
        assert why in load(copy, CONFIG).gaps[0].why
