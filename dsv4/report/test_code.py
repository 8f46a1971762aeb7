"""The section on code that runs."""

import json
import shutil

import pytest

from dsv4.config import load as load_config
from dsv4.judge.reached import reached
from dsv4.report import code
from dsv4.report.document import filled
from dsv4.report.load import load
from dsv4.report.samples import CODE, CONFIG

pytestmark = pytest.mark.xdist_group("report")


def test_archived_files_are_shown_with_verdict_and_chain():
    rows = code.shown(CODE)["archived"]
    assert [(row["word"], row["tone"], row["by"]) for row in rows] == [
        ("not ruled out", "cannot_measure", "B2"),
        ("dead", "pass", ""),
    ]
    assert rows[0]["why"] == "dsv4/run/variant.py:9 → dsv4/old/index.cu"


def test_counts_say_what_may_be_reached_and_what_was_left_out():
    assert code.shown(CODE)["status"] == (
        "A variant's stage, dsv4.run.variant, reaches 170 files; the whole workflow 170 of 224, 2 more may be,"
        " 52 are dead. Left out: tests 149."
    )


def test_a_page_without_it_says_so(failing, tmp_path):
    copy = shutil.copytree(failing, tmp_path / failing.name, ignore=shutil.ignore_patterns("closure.json"))
    audit = load(copy, CONFIG)
    assert [(gap.what, gap.why) for gap in audit.gaps] == [
        ("closure.json", "which code runs was not looked at")
    ]
    text = filled(code.TEMPLATE, {"code": code.shown(audit.code)})
    assert "closure.json was not written" in text


def test_this_project_is_followed_to_its_kernels():
    found = reached(load_config(CONFIG))
    live = {row["file"]: code.chain(row["chain"]) for row in found["variant"]["live"]}
    assert {"dsv4/model/transformer.py", "kernels/sparse_attn/kernel.py"} <= set(live)
    assert live["kernels/sparse_attn/ref.py"].startswith("dsv4/run/variant.py:")
    workflow = found["workflow"]
    assert {
        "dsv4/report/page.py",
        "dsv4/run/aba.py",
        "kernels/bench/__main__.py",
        "kernels/sparse_attn/kernel.py",
    }.isdisjoint(workflow["dead"])
    assert "dsv4/report/page.py" not in live  # no variant draws
    assert {"rules/stubs.py", "data/nano/train.py"} <= set(workflow["dead"])
    assert workflow["broken"] == []
    assert [row["verdict"] for row in found["archived"]] == ["no file"]
    assert code.shown(json.loads(json.dumps(found)))["notes"]
