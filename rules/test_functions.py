"""Functions of the rules that need no Snakemake to be called."""

import json
import os
from functools import cache
from types import SimpleNamespace

import pytest

from dsv4.files import write_json
from rules.stubs import ROOT


def test_a_verdict_is_read_once_while_it_stands_and_again_when_it_was_replaced(tmp_path):
    path, asked, read = tmp_path / "B1.json", [], []

    def get(variant):
        asked.append(variant)
        if len(asked) == 1:
            raise LookupError("not judged yet")
        return SimpleNamespace(output=[str(path)])

    load = SimpleNamespace(dumps=json.dumps, load=lambda file: read.append(file.name) or json.load(file))
    of_snakemake = {"checkpoints": SimpleNamespace(gate=SimpleNamespace(get=get))}
    names = {"json": load, "os": os, "cache": cache} | of_snakemake
    exec((ROOT / "rules/functions.smk").read_text(), names)

    write_json(path, {"status": "pass"})
    with pytest.raises(LookupError):
        names["status"]("B1")
    assert [names["status"]("B1") for _ in range(3)] == ["pass"] * 3
    assert (asked, len(read)) == (["B1", "B1"], 1)
    write_json(path, {"status": "fail"})
    assert names["status"]("B1") == "fail"
