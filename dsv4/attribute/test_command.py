"""The stage: quick where nothing moved; else the reference's own texts, run on refs, beside what was measured."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dsv4 import config as configuration
from dsv4.attribute import __main__ as command
from dsv4.attribute import stage
from dsv4.attribute.words import words
from dsv4.judge._texts import Texts
from dsv4.model.checkpoint import load
from dsv4.prompts import token_sha256
from dsv4.run.setup import Setup
from dsv4.stored import DumpError
from dsv4.text_dump import FILE, Text, TextWriter

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "config.yaml"


@pytest.fixture
def texts(tmp_path):
    """Return made-up texts of a run."""
    return Texts(tmp_path, configuration.load(CONFIG))


def run(texts, name):
    command.write_attribution(CONFIG, texts.results, name)
    return json.loads((texts.folder / "attribution" / f"{name}.json").read_text())


def shifted(texts, by=1e-4):
    table = texts.table(kl=1e-3, noise=1e-4)
    return table.assign(kl_nats=table["kl_nats"] + by)


def test_what_did_not_move_is_said_without_a_run(texts, monkeypatch):
    monkeypatch.setattr(stage, "attribute", None)
    texts.rung("B0_unfused", texts.table(kl=1e-3, noise=1e-4)).rung("P4", texts.table(kl=1e-3, noise=1e-4))
    found = run(texts, "P4")
    assert (found["words"], found["ops"], found["layers"]) == ("did not move", [], [])
    assert (found["schema"], found["variant"], found["parent"]) == (1, "P4", "B0_unfused")
    assert (found["against"], found["backend"], found["label"]) == ("trained", "ref", "emulated on cpu")


def test_a_rung_above_one_without_a_text_is_not_attributed(texts):
    assert (
        run(texts.rung("P4"), "P4")["words"]
        == "not attributed: B0_unfused below has no text to have moved from"
    )


def test_logits_that_are_not_finite_are_not_attributed(texts):
    table = texts.table()
    texts.rung("B0_unfused").rung("P4", table.assign(kl_nats=np.where(table.index == 3, np.nan, 1e-3)))
    assert run(texts, "P4")["words"] == "not attributed: its logits are not finite"


def test_a_text_of_another_run_is_refused(texts):
    with pytest.raises(DumpError, match=r"B0_unfused\.json: not there; no text of B0_unfused"):
        run(texts, "B0_unfused")


def test_what_moved_is_run_where_its_kl_is_and_set_beside_what_was_measured(texts, monkeypatch):
    asked = []

    def attribute(config, results, variant, window):
        asked.append((config, results, variant, window))
        about = {"prompts": list(window), "window": dict(window), "positions": sum(window.values())}
        return about | {"kl_nats": 0.0055, "ops": [], "layers": [], "explained": None, "words": words([], [])}

    monkeypatch.setattr(stage, "attribute", attribute)
    table = shifted(texts)
    table.loc[table["prompt"] == "code", "kl_nats"] = 0.011
    texts.rung("B0_unfused", texts.table(kl=1e-3, noise=1e-4)).rung(
        "P4", table, label="kernels on X", backend="kernel"
    )
    found = run(texts, "P4")
    assert asked == [(CONFIG, texts.results, "P4", {"code": 181})]  # 12 of its prompt and 180 more
    about = found["measured"]
    assert (about["label"], about["backend"]) == ("kernels on X", "kernel")
    assert about["kl_nats"] == pytest.approx(0.011)
    assert about["shown"] == pytest.approx(0.5)
    assert about["window_share"] == pytest.approx(181 * 0.011 / table["kl_nats"].sum())
    assert list(found["groups"]) == ["index_k_store+index_score"]


def test_the_bottom_of_the_ladder_moved_from_trained(texts, monkeypatch):
    said = {"window": {"code": 1}, "kl_nats": None, "words": "said"}
    monkeypatch.setattr(stage, "attribute", lambda *_: said)
    assert run(texts.rung("B0_unfused", texts.table(kl=1e-3, noise=1e-4)), "B0_unfused")["words"] == "said"


def test_the_stage_imports_no_torch_before_it_must():
    code = "import sys; import dsv4.attribute.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.fixture
def setup(tmp_path):
    """Return nano with one short text of its reference, whose logits are made up."""
    config = replace(configuration.load(CONFIG), checkpoint=ROOT / "data/nano", backend="ref")
    prompt, tokens = [256, 10, 20, 30], (40, 50, 60)
    made = Setup(
        config=config,
        results=tmp_path,
        checkpoint=load(config.checkpoint),
        tokens={},
        prompts={},
        texts={"a": prompt},
    )
    attrs = made.origin("text", "trained", None) | {"prompts": ["a"]}
    with TextWriter(tmp_path / FILE, attrs) as writer:
        writer.text("a", Text(tokens=tokens, kind="plain", reason="budget", prompt=token_sha256(prompt)), 320)
        writer.logits("a", 0, np.random.default_rng(0).standard_normal((3, 320)).astype(np.float32))
    return made


def test_texts_are_the_references_as_far_as_the_window_goes(setup):
    found = stage.read_texts(setup, {"a": 2})["a"]
    assert found.tokens.tolist() == [256, 10, 20, 30, 40]
    assert found.truth.shape == (2, 320)
    other = replace(setup, texts={"a": [256, 10, 20, 31]})
    with pytest.raises(DumpError, match=r"trained\.h5: prompt a is not the one of .*prompts\.yaml; delete"):
        stage.read_texts(other, {"a": 2})


def test_a_plan_is_ranked_on_nano(setup):
    plan = setup.config.ladder["B4_head"].plan
    found = stage.rank_plan(setup, plan, list(stage.read_texts(setup, {"a": 2}).values()))
    assert {entry["op"] for entry in found["ops"] if entry["same_bits"]} >= {
        "kv_store",
        "comp_store",
        "index_topk",
    }
    assert found["positions"] == 2
    assert pd.Series([entry["returned"] for entry in found["ops"]]).is_monotonic_decreasing
