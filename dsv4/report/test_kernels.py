"""The section on kernels: what is said with nothing built, with builds, and with times of one device or two."""

import json

import pytest
import yaml

from dsv4.ladder import Ladder
from dsv4.report import kernels
from dsv4.report.load import load
from dsv4.report.page import render
from dsv4.report.samples import CONFIG

pytestmark = pytest.mark.xdist_group("report")

PTXAS = {"version": "13.0.88", "source": "wheel", "trusted": True}
ROW = {
    "state": "built",
    "registers": 168,
    "shared_bytes": 65536,
    "spill_store_bytes": 0,
    "spill_load_bytes": 0,
    "tensor": ["wgmma e4m3"],
    "faults": [],
    "remarks": [],
}
FAILED = {"state": "failed", "error": "<no> such thing", "faults": ["not built"], "remarks": [], "tensor": []}
SPREAD = {"median": 27.6, "q1": 27.4, "q3": 28.0, "min": 27.3, "n": 21}
BENCH_ROW = {
    "op": "sparse_attn",
    "group": "b1_flashmla",
    "name": "B=128",
    "run": "1",
    "error": None,
    "absent": ["deepgemm"],
    "floor_us": 10.0,
    "paths": {"ours": {"us": SPREAD, "eager_us": SPREAD, "share": 0.36}},
    "ratios": {"flashmla": {"median": 0.63}, "replaced": {"median": 0.4}},
}
CEILINGS = {"copy_bytes_per_s": 4.26e12, "flops_per_s": {"bf16": 7.07e14}}


@pytest.fixture
def folder(tmp_path):
    """Write evidence beside ``results/run``."""
    (tmp_path / "run").mkdir()

    def write(arch=None, rows=(), device=None, capability="9.0", **files):
        if arch:
            path = tmp_path / "build" / arch / "build.json"
            path.parent.mkdir(parents=True)
            summary = {"schema": 1, "arch": arch, "triton": "3.6.0", "ptxas": PTXAS, "rows": list(rows)}
            path.write_text(json.dumps(summary))
        if device:
            run = {"device": {"name": device, "capability": capability}, "date": "2026-11-30T10:00:00Z"}
            bench = {"schema": 1, "runs": {"1": run | {"ceilings": CEILINGS}}, "rows": [BENCH_ROW]}
            (tmp_path / "bench.json").write_text(json.dumps(bench))
        for name, text in files.items():
            (tmp_path / f"{name}.json").write_text(text)
        return tmp_path / "run"

    return write


def said(results):
    ladder = Ladder(yaml.safe_load(CONFIG.read_text())["ladder"])
    return kernels.shown(kernels.load(results), ladder)


def test_nothing_built_and_nothing_timed_is_said(folder):
    shown = said(folder())
    assert shown["status"] == [
        "No kernel is built: run snakemake build, which needs no GPU.",
        "No kernel was timed: run snakemake bench on a machine with a GPU.",
        "BLACKWELL: NOT RUN.",
    ]
    assert shown["rungs"] == []


def test_what_is_built_has_not_run_until_a_device_of_its_architecture_ran_it(folder):
    rows = [ROW | {"name": "sparse_attn/b1/flash"}, FAILED | {"name": "sparse_attn/b1a/flash"}]
    folder("sm_90a", rows)
    results = folder("sm_100a", rows[:1], device="NVIDIA H200")
    shown = said(results)
    assert shown["status"] == [
        "Kernels ran on NVIDIA H200, 2026-11-30.",
        "BLACKWELL: NOT RUN (sm_100a: built, not run).",
    ]
    rungs = {row["id"]: dict(zip(shown["names"], row["states"], strict=True)) for row in shown["rungs"]}
    assert rungs["B1"] == {"sm_100a": "built, not run", "sm_90a": "ran on NVIDIA H200"}
    assert rungs["B1a"] == {"sm_100a": "no kernel of its own", "sm_90a": "not built"}
    assert shown["builds"][0]["name"] == "sparse_attn/b1a/flash"  # the fault comes first
    assert [row["built"] for row in shown["architectures"]] == [1, 1]
    (device,) = shown["devices"]
    assert device["rows"][0]["us"] == "27.6 (27.4–28.0)"
    assert device["rows"][0]["peers"] == "flashmla 0.63, deepgemm: peer absent"


def test_a_blackwell_run_takes_the_label_away(folder):
    shown = said(
        folder("sm_100a", [ROW | {"name": "sparse_attn/b1/flash"}], device="NVIDIA B200", capability="10.0")
    )
    assert shown["status"] == ["Kernels ran on NVIDIA B200, 2026-11-30."]
    assert {row["id"]: row["states"] for row in shown["rungs"]}["B1"] == ["ran on NVIDIA B200"]


def test_a_file_that_cannot_be_read_is_said_and_stops_nothing(folder):
    assert said(folder(bench="{"))["status"][0].startswith("bench.json cannot be read")
    assert said(folder(bench='{"schema": 7}'))["status"][0] == "bench.json is not of schema 1: make it again"


def test_the_page_shows_builds_times_and_the_foreign_log(failing, tmp_path):
    root = failing.resolve().parent
    build = root / "build/sm_90a/build.json"
    build.parent.mkdir(parents=True)
    row = FAILED | {"name": "sparse_attn/b1/flash"}
    build.write_text(
        json.dumps({"schema": 1, "arch": "sm_90a", "triton": "3.6.0", "ptxas": PTXAS, "rows": [row]})
    )
    foreign = {"schema": 1, "command": "make <all>", "folder": "tree", "exit_status": 2, "seconds": 1.0}
    (failing / "foreign_build.json").write_text(
        json.dumps(foreign | {"locks": ["lock file x: kept"], "log": ["no"]})
    )
    try:
        page = render(load(failing, CONFIG))
    finally:
        build.unlink()
        (failing / "foreign_build.json").unlink()
    assert "BLACKWELL: NOT RUN" in page
    assert "&lt;no&gt; such thing" in page
    assert "make &lt;all&gt;" in page
    assert "lock file x: kept" in page
