"""What is kept, and what is due, after a crash."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4 import salvage
from dsv4.config import load
from dsv4.files import write_json

ROOT = Path(__file__).resolve().parent.parent
RUNG, PROMPT = "B0_unfused", "one"
IN_ORDER = (
    "text/trained.h5",
    f"variants/{RUNG}/{PROMPT}.h5",
    f"metrics/{RUNG}.parquet",
    f"gates/{RUNG}.json",
    f"text/{RUNG}.parquet",
    f"text/{RUNG}.json",
    "gates.json",
    "index.html",
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run of one rung, each file a second newer than the one before."""
    monkeypatch.setattr(salvage, "PAGE", tmp_path / "index.html")
    for second, name in enumerate(IN_ORDER):
        write_json(tmp_path / name, {"status": "pass"})
        os.utime(tmp_path / name, (second, second))
    config = replace(load(ROOT / "config.yaml"), prompts=ROOT / "data/prompts.yaml")
    return tmp_path, config


def complete(run):
    return salvage.complete(*run, [PROMPT], RUNG)


def test_a_run_is_complete_once_its_verdicts_and_texts_are_on_the_page(run):
    assert complete(run)


def test_a_rung_that_passed_is_not_complete_without_its_text(run):
    folder, _ = run
    text = folder / f"text/{RUNG}.json"
    os.utime(text, (99, 99))  # made again, and not collected
    assert not complete(run)
    text.unlink()
    assert not complete(run)
    (folder / f"gates/{RUNG}.json").write_text('{"status": "fail"}')
    os.utime(folder / f"gates/{RUNG}.json", (3, 3))
    assert complete(run)  # a rung that failed has none


@pytest.mark.parametrize("newer", ["text/trained.h5", f"variants/{RUNG}/{PROMPT}.h5"])
def test_a_text_older_than_what_it_rests_on_is_not_kept(run, newer):
    folder, config = run
    texts = [folder / f"text/{RUNG}{suffix}" for suffix in (".json", ".parquet")]
    salvage.drop_stale(folder, config, [PROMPT])
    assert all(path.exists() for path in texts)
    os.utime(folder / newer, (99, 99))
    salvage.drop_stale(folder, config, [PROMPT])
    assert not any(path.exists() for path in texts)
