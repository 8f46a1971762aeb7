import base64
import gzip
import json
import re
from functools import cache

import numpy as np
import pandas as pd
import pytest
from markupsafe import escape

from dsv4.report import frames, payload
from dsv4.report import page as page_module
from dsv4.report.__main__ import main
from dsv4.report.behind import guards, identity
from dsv4.report.conftest import read
from dsv4.report.load import ReportError, load
from dsv4.report.page import render
from dsv4.report.samples import CONFIG

pytestmark = pytest.mark.xdist_group("report")


def own(page):
    """The page without Vega's bundle, whose code holds names of XML namespaces."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_page_names_no_external_address(page):
    assert not re.search(r"https?://|//cdn|url\(|@import|<link|<img|<iframe", own(page))
    assert not re.search(r"<script[^>]*\bsrc=", page)


def test_policy_lets_nothing_load(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_page_is_under_4_mb(page):
    assert len(page.encode()) < 4_000_000


def test_first_screen_says_it_in_words(page):
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", own(page)))
    for said in (
        "B2 fails in layer 4, index_topk (topk)",
        "time: not measured on this device",
        "keep BF16 rope",
        "safe to stack",
        "it stands on B2, which is fail",
        "snakemake B5_all",
        "emulated on cpu",
        "trained nano weights",
        "36 of 37",
        "3 non-finite",
        "clamp: never reached in layers 0, 1",
        "0b6ca0d4c1",
        "does not",
    ):
        assert str(escape(said)) in text, said


def test_identity_says_each_thing_of_the_run_once(failing):
    audit = read(failing)
    run, told = audit.head["run"], identity(audit)
    assert len(dict(told)) == len(told)
    shown = dict(told)
    for name in ("date", "commit", "device", "config sha256", "prompts sha256"):
        assert shown[name] == run[name.replace(" ", "_")], name
    assert shown["dirty"] == "no"
    assert shown["checkpoint"] == run["checkpoint_sha256"]
    assert shown["versions"] == "torch 2.13.0, numpy 2.4.6"
    assert shown["to repeat"] == "snakemake all"
    assert "trained nano weights" in shown["labels"]


def test_a_rung_measured_at_an_earlier_commit_does_not_name_the_run(failing):
    audit = read(failing)
    audit.labels = {"commit": "f" * 40, "seed": 0}
    shown = dict(identity(audit))
    assert (shown["commit"], shown["seed"]) == ("0b6ca0d4c1", "0")


def test_the_guard_of_each_tree_stands_on_the_page(failing):
    """Formats as the checkpoint has them; batched prefill absent, of our own model, and of an engine."""
    audit = read(failing)
    (row,) = guards(audit)
    assert set(row["rungs"].split(", ")) == {
        name for name, found in audit.verdicts.items() if "guard" in found
    }
    engine = {"entry_point": "serve.prefill", "prompts": ["a", "b"], "bit_equal": False, "rel_l2": 0.00123}
    ours = {"entry_point": "dsv4.model.prefill.prefill", "compared": "bit for bit by its tests"}
    for name, batched in (("B0", ours), ("B1", engine), ("B1a", engine | {"bit_equal": True})):
        audit.verdicts[name]["guard"] = audit.verdicts[name]["guard"] | {"batched_prefill": batched}
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", own(render(audit))))
    for said in (
        "B0 nvfp4 72 fp8 40 dsv4.model.prefill.prefill, against single prompts: bit for bit by its tests",
        "B1 nvfp4 72 fp8 40 serve.prefill, a and b at once against each alone: relative L2 0.0012",
        "serve.prefill, a and b at once against each alone: the same bits",
        "nvfp4 72 fp8 40 absent",
    ):
        assert said in text, said


def test_what_artefacts_say_is_escaped(failing):
    audit = read(failing, "B2")
    audit.verdicts["B2"]["reasons"] = ["<script>alert(1)</script>"]
    audit.claims[0]["measured"] = "<b>x</b>"
    page = render(audit)
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page


def test_same_artefacts_give_the_same_page(failing, page):
    first, second = (re.sub(r"page made.*", "", each) for each in (page, render(load(failing, CONFIG))))
    assert first == second


def test_index_is_a_copy_of_the_named_page(failing, tmp_path):
    options = [
        "--results",
        str(failing),
        "--config",
        str(CONFIG),
        "--reports",
        str(tmp_path),
        "--target",
        "P4",
    ]
    assert main(options) == 0
    index, named = sorted(tmp_path.iterdir(), key=lambda path: path.name != "index.html")
    assert named.name.startswith(f"{failing.name}-20")
    assert index.read_bytes() == named.read_bytes()


def test_rows_survive_packing(failing):
    cells = frames.heat(frames.cells(read(failing).metrics)).assign(floor=float("nan"), limit=1e-4)
    one = cells[(cells["variant"] == "B1") & (cells["mode"] == "isolated") & (cells["against"] == "trained")]
    columns = ("layer", "tap", "err", "bad", "floor", "limit")
    packed = payload.pack({"cells": payload.table(one, ("variant", "mode", "against"), columns)})
    back = json.loads(gzip.decompress(base64.b64decode(packed)))["cells"]
    layer, tap, err, _, floor, limit = back["rows"]["B1|isolated|trained"]
    assert layer == one["layer"].tolist()
    assert [back["texts"]["tap"][number] for number in tap] == one["tap"].tolist()
    assert np.allclose(np.array(err, float), one["err"], rtol=5e-3, equal_nan=True)
    assert set(floor) == {None}
    assert set(limit) == {1e-4}


def test_page_that_would_be_too_heavy_drops_the_least_interesting(monkeypatch, failing):
    audit = read(failing, "B2")
    monkeypatch.setattr(payload, "LIMIT", 100_000)
    page = render(audit)
    assert len(re.search(r'id="data">([^<]*)<', page)[1]) <= payload.LIMIT
    dropped = re.search(r"Left out to keep the page under 4 MB: ([^;]*);", page)[1].split(", ")
    assert "B2" not in dropped
    assert set(dropped) < set(pd.unique(audit.metrics["variant"]))


def test_code_that_runs_is_shown_with_archived_files_and_what_is_not_known(page):
    section = own(page).partition('id="h-code"')[2].partition("</section>")[0]
    assert "import_module of &lt;a&gt; name" in section
    assert re.search(r"dsv4/old/\*\.cu.*not ruled out.*dsv4/run/variant\.py:9 → dsv4/old/index\.cu", section)
    assert "kernels/sanitize.py" in section


def test_a_page_without_its_chart_library_is_no_page(failing, monkeypatch):
    monkeypatch.setattr(page_module, "BUNDLE", "raise SystemExit('no bundle here')")
    monkeypatch.setattr(page_module, "_bundling", cache(page_module._bundling.__wrapped__))
    monkeypatch.setattr(page_module, "_script", cache(page_module._script.__wrapped__))
    monkeypatch.setattr(page_module, "_context", lambda *_: {})
    with pytest.raises(ReportError, match=r"vl_convert gave no script \(exit 1\)"):
        render(read(failing))
