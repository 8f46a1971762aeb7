import json
import re
import shutil
from copy import deepcopy
from html import unescape

import numpy as np
import pandas as pd
import pytest

from dsv4.report import payload, residual, text, text_cells, text_findings, text_frames
from dsv4.report.load import load
from dsv4.report.page import render
from dsv4.report.sample_texts import LINE, NEAR_TIE, RESIDUAL, told
from dsv4.report.samples import CONFIG

pytestmark = pytest.mark.xdist_group("report")


@pytest.fixture(scope="module")
def written(passing, tmp_path_factory):
    """Results of an audit whose ladder passes, without measurements: they take most of a page's time."""
    copy = shutil.copytree(passing, tmp_path_factory.mktemp("c") / passing.name)
    pd.read_parquet(copy / "metrics.parquet").head(0).to_parquet(copy / "metrics.parquet")
    return copy


@pytest.fixture(scope="module")
def read(written):
    return load(written, CONFIG)


@pytest.fixture
def audit(read):
    """An audit that a test may change."""
    return deepcopy(read)


@pytest.fixture
def copy(written, tmp_path):
    """A results folder that a test may spoil."""
    return shutil.copytree(written, tmp_path / written.name)


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def section(page):
    """The section's text, without tags."""
    found = page.partition('<h2 id="h-text">')[2].partition("</section>")[0]
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found)))


def said(audit):
    return {(topic, line) for _, topic, line in text_findings.findings(audit)}


def test_findings_name_the_rung_that_did_it_and_not_those_that_inherit_it(audit):
    lines = dict(said(audit))
    assert lines["Text"] == (
        "changed by B0_unfused in opposites from step 245 (near tie); B1 in code from step 276;"
        " B4_swiglu in capital from step 31."
    )
    assert lines["Repetition"] == (
        "sets in early: B1 and 6 above it in code from step 267, the reference from 342."
    )
    assert (
        lines["Ends"]
        == "B4_swiglu and 2 above it ends capital with <|eos|> (257), the reference with <|end_of_turn|> (260)."
    )
    assert "B1, +7.2e-6 ± 6e-7 (layer 5, attend: 61% of the KL)" in lines["KL"]


def test_no_change_is_said_as_such(audit):
    for document in audit.texts.documents.values():
        for entry in document["prompts"].values():
            entry["divergence"], entry["own"] = None, entry["own"] and entry["reference"]
    assert [(tone, topic) for tone, topic, _ in text_findings.findings(audit)][:3] == [
        ("pass", "Text"),
        ("pass", "Repetition"),
        ("pass", "Ends"),
    ]
    assert text_findings.chosen(audit)[1] == "code"  # the longest


def test_a_rung_that_writes_the_references_text_again_is_no_new_difference(audit):
    entry = audit.texts.documents["B4_head"]["prompts"]["code"]
    entry["own"], entry["divergence"] = entry["reference"], None
    (change,) = [one for one in text_findings.changed(audit) if one.variant == "B4_head"]
    assert str(change) == "code (the reference's again)"
    assert text_findings.chosen(audit) == ("B1", "code")


def test_a_parent_without_a_text_is_looked_through(audit):
    del audit.texts.documents["B2"]
    assert {change.variant for change in text_findings.changed(audit)} == {"B0_unfused", "B1", "B4_swiglu"}
    assert text_findings.missing(audit) == ["Passed, and has no text: B2. Run snakemake B2."]


def test_page_of_an_audit_without_texts_says_what_to_run(copy):
    shutil.rmtree(copy / "text")
    (copy / "residual.json").unlink()
    words = section(render(load(copy, CONFIG)))
    assert "No rung's text was looked at" in words
    assert "run snakemake all, or snakemake B1" in words
    assert "not run" in words
    assert "snakemake B5" in words
    assert "Which text" not in words


def test_page_of_leaves_alone_says_that_they_were_forced_only(copy):
    for path in (copy / "text").glob("*.json"):
        if json.loads(path.read_text())["free"]:
            path.unlink()
    audit = load(copy, CONFIG)
    assert [topic for _, topic, _ in text_findings.findings(audit)] == ["KL"]
    assert "forced only" in section(render(audit))
    rows = text_frames.texts(audit)
    assert set(rows.loc[rows["whose"] == "reference", "said"]) == {text_frames.FORCED_ONLY}


def test_one_rung_is_compared_with_the_reference(written):
    audit = load(written, CONFIG, "B0_unfused")
    assert list(audit.texts.documents) == ["B0_unfused"]
    assert dict(said(audit))["Text"] == "changed by B0_unfused in opposites from step 245 (near tie)."
    (row,) = text.shown(audit)["rows"]
    assert (row.change, row.moved) == ("—", None)


def test_text_that_is_empty_or_broken_is_said_and_drawn(copy):
    broken = {"tokens": [], "text": "", "reason": "not_finite", "stop": None, "length": 0, "loop": None}

    def spoil(document):
        document["prompts"]["code"]["own"] |= broken
        document["prompts"]["code"]["divergence"] = None

    edit(copy / "text/B1.json", spoil)
    rows = pd.read_parquet(copy / "text/B1.parquet")
    rows.loc[(rows["prompt"] == "code") & (rows["step"] == 20), "kl_nats"] = np.nan
    rows.to_parquet(copy / "text/B1.parquet")
    audit = load(copy, CONFIG)
    assert "Nothing was written" in text_frames.pair_said(
        "B1", audit.texts.documents["B1"]["prompts"]["code"]
    )
    assert ("Ends", "B1 ends code with logits not finite, the reference with budget used up.") in said(audit)
    (row,) = [row for row in text.shown(audit)["rows"] if row.id == "B1"]
    assert row.cells[1].lines == (("from 0", True), ("ends: logits not finite", True))
    assert (row.cells[1].look, row.cells[1].end) == ("broken", 3)
    bins = text_frames.positions(audit).query("variant == 'B1' and prompt == 'code' and what == 'KL'")
    assert bins.set_index("step").loc[16, "bad"] == "1 not finite"
    assert (
        bins["bad"].ne("").tolist()
        == bins["kl_mean"].isna().tolist()
        == [first == 16 for first in bins["step"]]
    )


def test_what_texts_say_is_escaped(copy):
    evil = "</script><img src=x onerror=alert(1)>"

    def spoil(document):
        document["prompts"]["code"]["own"]["text"] = evil
        document["prompts"]["capital"]["own"]["stop_name"] = evil
        document["label"] = evil

    edit(copy / "text/B1.json", spoil)
    edit(copy / "residual.json", lambda data: data.update(words=evil))
    page = render(load(copy, CONFIG))
    assert "<img src=x" not in page
    assert "&lt;img" in page


def test_first_difference_is_where_tokens_differ_or_one_text_ends():
    one, other = ({"tokens": tokens} for tokens in ([1, 2, 3], [1, 2, 4]))
    assert text_cells.first_difference(one, one) is None
    assert text_cells.first_difference(one, other) == 2
    assert text_cells.first_difference(one, {"tokens": [1, 2]}) == 2


def test_difference_is_counted_in_characters_and_not_in_tokens():
    mine, theirs = (
        told("opposites", NEAR_TIE, 260),
        told("opposites", NEAR_TIE.replace("silent", "quiet"), 260),
    )
    step, place = text_cells.first_difference(mine, theirs), text_frames.difference(mine, theirs)
    assert mine["text"][place:].startswith("silent")
    assert step == len(mine["text"][:place].encode())  # each dash takes three tokens
    assert step > place
    assert text_frames.difference(mine, mine) == -1


def test_texts_that_differ_in_their_stop_differ_at_the_end():
    mine, theirs = told("capital", "Paris.", 257), told("capital", "Paris.", 260)
    assert text_frames.difference(mine, theirs) == 6


def test_loop_of_characters_is_that_of_tokens():
    found = told("code", "a🙂b\n" + LINE * 20, None)
    onset, period = text_frames.loop(found)
    assert period == found["loop"]["period"] == len(LINE)
    assert len(found["text"][:onset].encode()) == found["loop"]["onset"]
    cut = told("code", "é" * 400, None)  # 576 bytes: whole characters; one less cuts the last
    cut["text"] = cut["text"][:-1] + "\ufffd"
    assert text_frames.loop(cut) == (0, 1)


def test_bins_hold_mean_median_and_band_of_their_positions(audit):
    forced = audit.texts.forced
    mine = forced[(forced["variant"] == "B1") & (forced["prompt"] == "code")].set_index("step")["kl_nats"]
    frame = text_frames.positions(audit).query("variant == 'B1' and prompt == 'code' and what == 'KL'")
    row = frame.set_index("step").loc[32]
    assert row["last"] == 47
    assert row["kl_mean"] == pytest.approx(mine.loc[32:47].mean(), rel=1e-12)
    assert row["kl_median"] == pytest.approx(mine.loc[32:47].median(), rel=1e-12)
    assert row["kl_high"] == pytest.approx(mine.loc[32:47].quantile(0.975), rel=1e-12)


def test_the_same_text_is_stored_once(audit):
    frame = text_frames.texts(audit)
    stored = payload.table(frame, *payload.TABLES["texts"])["texts"]["text"]
    assert len(stored) == len(set(stored)) == len(set(frame["text"])) < 10 < len(frame)


def test_rungs_that_the_page_has_no_room_for_cannot_be_chosen(audit):
    found = text.shown(audit, left_out=["B1", "P4"])
    assert {"B1", "P4"}.isdisjoint(found["rungs"])
    assert found["rung"] in found["rungs"]


def test_how_texts_end_is_counted_by_kind(audit):
    ends = text.shown(audit)["ends"]
    assert ends["columns"][0] == ("plain text", "budget used up")
    lines = {
        name: (dict(zip(ends["columns"], counts, strict=True)), other)
        for name, counts, other in ends["lines"]
    }
    chats = ("chat", "<|end_of_turn|> (260)"), ("chat", "<|eos|> (257)")
    assert [lines["reference"][0][key] for key in chats] == [2, 0]
    assert [lines["B4_swiglu"][0][key] for key in chats] == [1, 1]
    assert lines["B4_swiglu"][1]
    assert not lines["B3"][1]


@pytest.mark.parametrize("verdict", list(residual.TONES))
def test_every_verdict_of_b5_has_a_word(verdict):
    found = residual.shown(RESIDUAL | {"verdict": verdict})
    assert found["word"].lower() == verdict.replace("_", " ")


def test_residual_under_256_is_said_not_to_be_exercised():
    found = residual.shown(RESIDUAL)
    assert found["word"] == "NOT EXERCISED"
    assert found["words"].startswith("Max abs X is 41.8, and a BF16 ULP reaches 2 from 256 on")
    large = {"by_layer": [{"layer": 0, "absmax": 300.0, "ulp": 2.0}], "by_step": [], "verdict": "ruled_out"}
    found = residual.shown(RESIDUAL | large)
    assert found["exercised"] == "Max |X| is 300, beyond the 256 from which on a BF16 ULP is 2."
    assert residual.shown({})["exercised"] == ""
    assert residual.shown({})["word"] == "not run"


def test_rungs_cost_and_mixing_of_b5_are_shown():
    found = residual.shown(RESIDUAL)
    assert [line[:3] for line in found["rungs"]["lines"]] == [
        ("B4_head", "9.1e-6", "—"),
        ("B5_all", "8.8e-6", "−3.0e-7 ± 4e-7"),
        ("B5_single", "9.0e-6", "−1.0e-7 ± 4e-7"),
    ]
    cost = dict(zip(found["cost"]["names"], found["cost"]["lines"][0], strict=True))
    assert cost["bytes per token"] == "32,768"
    assert cost["B5_single: bytes per step"] == "131,072"
    assert "by rung" not in cost
    assert found["mixing"] == (
        "mHC's mixing matrices: row sums 0.99991 to 1.00012, column sums 0.99999 to 1, spectral norm at most"
        " 1.0001: mixing does not amplify."
    )


def test_a_broken_text_comes_first_in_the_judges_words(audit):
    said = "plain `code`: a stop id was passed at step 12"
    audit.verdicts["B2"]["e2e"]["text"] |= {"broken": True, "reasons": [said, "more"]}
    assert text_findings.findings(audit)[0] == ("fail", "Broken", f"B2: {said}.")
    (row,) = [row for row in text.shown(audit)["rows"] if row.id == "B2"]
    assert row.broken == said


def test_a_text_that_its_judge_refused_is_not_shown_and_the_page_says_why(copy):
    note = "text/B2.json is of another plan; delete it"
    verdicts = {"text": None, "text_note": note}
    edit(copy / "gates.json", lambda d: [v["e2e"].update(verdicts) for v in d["variants"] if v["id"] == "B2"])
    audit = load(copy, CONFIG)
    assert "B2" not in audit.texts.documents
    assert text_findings.missing(audit) == [f"Passed, and has no text: B2: {note}"]


def test_attribution_lists_what_was_run_and_draws_nothing_that_is_not_finite(audit):
    found = audit.verdicts["B1"]["e2e"]["text"]["attribution"]
    found["ops"][1] |= {"returned": None}
    found["ops"].append({"op": "head", "returned": 0.0, "same_bits": True})
    (shown,) = [each for each in text.shown(audit)["attributions"] if each["id"] == "B1"]
    assert [name for name, _, _ in shown["ops"]] == ["attend", "index_topk", "route", "moe"]
    assert shown["ops"][0] == ("attend", "86.0%", 86.0)
    assert shown["ops"][1] == ("index_topk", "—", 0.0)
    assert shown["layers"][0] == ("attend, layer 5", "61.0%", 61.0)
