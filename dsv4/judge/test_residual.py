"""``residual.json`` and ``repetition.json`` from the files of a made-up run."""

import json
import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dsv4.files import write_json
from dsv4.judge import repetition as repetition_module
from dsv4.judge import residual as residual_module
from dsv4.judge._texts import Texts, continuation, generation
from dsv4.judge.collect import collect, published
from dsv4.judge.compare import COLUMNS
from dsv4.judge.conftest import Audit
from dsv4.judge.gate import header
from dsv4.judge.launches import FLASH, PRO
from dsv4.judge.measure import Notes, read_notes, write
from dsv4.judge.residual import cost, judge
from dsv4.ladder import Ladder
from dsv4.salvage import drop_stale, due
from dsv4.taps import BY_NAME

FOUR = ["B5_all", "B5_first_half", "B5_last_half", "B5_single"]


RUNGS = {
    "B0": {"spine": True},
    "B4_head": {"parent": "B0", "set": {"casts.head": "native"}, "spine": True},
    **{
        name: {"parent": "B4_head", "set": {"residual": value}, "on_request": True}
        for name, value in zip(FOUR, ("fp32", "fp32_first_half", "fp32_last_half", "fp32_last"), strict=True)
    },
}


class Run(Audit):
    """A run in which the rungs of the spine passed and have texts that do not repeat early."""

    def __init__(self, results):
        super().__init__(results)
        self.config = replace(self.config, ladder=Ladder(RUNGS))
        self.texts = Texts(self.results, self.config)
        for rung in self.config.ladder.spine():
            self.passed(rung.id).text(rung.id)

    def passed(self, name, status="pass", peaks=(300.0, 400.0)):
        rung = self.config.ladder[name]
        notes = Notes(exercised={"one": {"residual_absmax": list(peaks)}})
        write(self.results / "metrics" / f"{name}.parquet", pd.DataFrame(columns=list(COLUMNS)), notes)
        write_json(
            self.results / "gates" / f"{name}.json", header(rung) | {"status": status, "reasons": ["why"]}
        )
        return self

    def text(self, name, own=None, reference=None, kl=1e-2, spread=0.0, **head):
        """A rung's texts with these onsets on ``chat``; ``spread``: of blocks of 32 positions, in turns up and down."""
        table = self.texts.table()
        table["kl_nats"] = kl + spread * (1 - 2 * (table["step"] // 32 % 2))
        loops = [
            None if onset is None else {"onset": onset, "period": 3, "copies": 9.0}
            for onset in (own, reference)
        ]
        ours = {"chat": generation(continuation("chat"), loop=loops[0])}
        self.texts.rung(name, table, ours, **head)
        path = self.results / "text" / f"{name}.json"
        account = json.loads(path.read_text())
        account["prompts"]["chat"]["reference"]["loop"] = loops[1]
        write_json(path, account)
        return self

    def judged(self, target=None):
        """``residual.json``, with ``repetition.json`` written before it as the rules do."""
        for module in (repetition_module, residual_module):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "load", lambda path: self.config)
                patch.setattr(
                    "sys.argv",
                    ["x", "--results", str(self.results), *(["--target", target] if target else [])],
                )
                assert module.main() == 0
        return json.loads((self.results / "residual.json").read_text())

    def states(self, target=None):
        return {each["id"]: each for each in collect(self.results, self.config, target)["variants"]}


def onsets(chat):
    return dict.fromkeys(("capital", "code", "opposites")) | {"chat": chat}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_texts_that_do_not_repeat_early_need_nothing(run):
    run.text("B4_head", own=100, reference=100)
    found = run.judged()
    assert (found["verdict"], found["asked_by"], found["rungs"]) == ("not_needed", [], {})
    assert found["parent"]["onsets"] == onsets(100)
    assert [row["absmax"] for row in found["by_layer"]] == [300.0, 400.0]
    assert [row["ulp"] for row in found["by_layer"]] == [2.0, 2.0]
    for name in FOUR:
        state = run.states()[name]
        assert (state["status"], state["reasons"][0][:25]) == ("not_needed", "not needed: no passing ru")


def test_a_rung_of_the_spine_that_repeats_early_asks_for_it(run):
    run.text("B0", own=99, reference=100)
    found = run.judged()
    assert found["verdict"] == "not_run"
    assert found["asked_by"] == [{"variant": "B0", "prompt": "chat", "onset": 99, "reference_onset": 100}]
    assert "B0 repeats from token 99 of chat on" in run.states()["B5_all"]["reasons"][0]
    assert [rung.id for rung in due(run.results, run.config, None)[-4:]] == FOUR
    run.passed("B0", "fail")  # a text of an earlier run, of a rung that did not pass
    assert run.judged()["asked_by"] == []


def test_a_text_of_another_plan_or_rung_asks_for_nothing(run):
    run.text("B0", own=9, reference=None, plan={"q_format": "fp8"})
    assert run.judged()["asked_by"] == []
    run.text("B0", own=9, reference=None)
    assert [each["reference_onset"] for each in run.judged()["asked_by"]] == [None]


@pytest.mark.parametrize(
    ("own", "kl", "verdict"),
    [
        (40, 1e-2, "ruled_out"),
        (100, 1e-2, "contributor"),
        (None, 1e-2, "contributor"),
        (40, 9e-3, "contributor"),
    ],
)
def test_what_the_ab_moves_is_read_from_its_texts(run, own, kl, verdict):
    run.text("B4_head", own=40, reference=100)
    for name in FOUR:
        run.passed(name).text(name, own=own, reference=100, kl=kl, spread=1e-3)
    found = run.judged("B5")
    assert (found["verdict"], list(found["rungs"])) == (verdict, FOUR)
    rung = found["rungs"]["B5_all"]
    assert rung["onsets"] == onsets(own)
    assert rung["kl_nats"] == pytest.approx(kl, abs=1e-4)
    assert rung["change"]["moved"] == (kl < 1e-2)
    assert set(run.states("B5")) == {each.id for each in run.config.ladder.about("B5")}
    assert "B5_all" in {name for name, each in run.states().items() if each["status"] == "pass"}


def test_rungs_that_cannot_be_measured_say_so_and_a_small_residual_says_nothing(run):
    for rung in run.config.ladder.spine():
        run.passed(rung.id, peaks=(80.0, 90.0))
    for name in FOUR:
        run.passed(name, "cannot_measure", peaks=(80.0, 91.0))
    found = run.judged("B5")
    assert found["verdict"] == "not_exercised"
    assert "max abs X is 91, and" in found["words"]
    assert found["stopped"] == dict.fromkeys(FOUR, "cannot_measure")
    assert found["by_layer"][1] == {"layer": 1, "absmax": 91.0, "ulp": 0.5}


def test_missing_files_are_what_was_not_run(run):
    for path in (run.results / "text").iterdir():
        path.unlink()
    found = run.judged()
    assert (found["verdict"], found["parent"], found["mixing"], found["by_step"]) == (
        "not_run",
        None,
        None,
        [],
    )
    run.texts.reference()
    run.text("B4_head", own=40, reference=100)
    run.passed("B5_all").text("B5_all", own=40, reference=100)
    (run.results / "text" / "B4_head.parquet").unlink()
    found = run.judged("B5")
    assert found["rungs"]["B5_all"]["change"] is None
    assert found["verdict"] == "not_run"
    empty = judge(run.results / "empty", run.config)
    assert (empty["verdict"], empty["by_layer"]) == ("not_run", [])


def test_steps_and_mixing_come_from_dumps(run):
    run.references().variant("B4_head")
    found = run.judged()
    largest = max(
        np.abs(run.correct("isolated", "decode", layer, BY_NAME[tap])).max()
        for layer in (0, 1)
        for tap in ("streams_mid", "streams")
    )
    assert len(found["by_step"]) == 8
    assert max(row["absmax"] for row in found["by_step"]) == largest
    assert not found["mixing"]["non_expansive"]  # these combs are Gaussian


def test_along_a_text_the_residual_is_looked_at_in_every_step(run):
    table = run.texts.table()
    table.loc[at_step(table, "chat", 9), "residual_absmax"] = 270.0
    table.loc[at_step(table, "code", 11), "residual_absmax"] = np.nan
    run.passed("B4_head")
    run.texts.rung("B4_head", table, residual_absmax=[310.0, 90.0])
    found = run.judged()
    assert [row["absmax"] for row in found["by_layer"]] == [310.0, 400.0]  # the free runs' are 300 and 400
    assert len(found["by_step"]) == table["step"].max() + 1
    assert [found["by_step"][step]["absmax"] for step in (8, 9, 11)] == [81.0, 270.0, None]


def at_step(table, prompt, step):
    return (table["prompt"] == prompt) & (table["step"] == step)


def test_verdicts_of_the_ab_count_in_all_where_a_text_asks(run):
    run.text("B4_head", own=40, reference=100)
    run.passed("B5_all")
    rung = run.config.ladder["B5_all"]
    path = run.results / "gates" / "B4_head.json"
    os.utime(path, (path.stat().st_atime + 9, path.stat().st_mtime + 9))
    assert published(run.results, run.config, rung) is None  # nothing renewed it
    run.judged()
    assert published(run.results, run.config, rung)["status"] == "pass"


def test_a_crash_leaves_nothing_that_is_older_than_a_verdict(run):
    run.judged()
    prompts = []
    drop_stale(run.results, run.config, prompts)
    assert (run.results / "residual.json").exists()
    path = run.results / "gates" / "B4_head.json"
    os.utime(path, (path.stat().st_atime + 9, path.stat().st_mtime + 9))
    drop_stale(run.results, run.config, prompts)
    assert not (run.results / "residual.json").exists()
    assert not (run.results / "repetition.json").exists()


@pytest.mark.parametrize(("sizes", "layers", "a_token"), [(FLASH, 43, 32768), (PRO, 61, 57344)])
def test_an_fp32_residual_costs_two_bytes_a_value_of_each_stream(run, sizes, layers, a_token):
    found = cost(sizes, run.config.ladder.residuals())
    assert (found["layers"], found["bytes_per_token"], found["persistent_bytes"]) == (layers, a_token, 0)
    assert found["bandwidth_bytes_per_step"] == layers * 4 * a_token
    assert found["by_rung"] == {
        "B5_all": layers * 4 * a_token,
        "B5_first_half": layers // 2 * 4 * a_token,
        "B5_last_half": (layers - layers // 2) * 4 * a_token,
        "B5_single": 4 * a_token,
    }


def test_notes_are_read_without_their_table(run):
    path = run.results / "metrics" / "B0.parquet"
    assert read_notes(path) == Notes(exercised={"one": {"residual_absmax": [300.0, 400.0]}})
