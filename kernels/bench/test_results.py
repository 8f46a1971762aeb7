"""What was measured: floors, merging, targets, tables and the page. Timers are fakes."""

import io
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("rich", reason="no rich: the benchmark prints a table")

from rich.console import Console

from kernels.bench import __main__ as bench
from kernels.bench import page, results, table, targets
from kernels.bench._fakes import case, path, prepare
from kernels.bench.measure import describe, failed, measure
from kernels.bench_case import OURS, REPLACED

CEILINGS = {
    "copy_bytes_per_s": 4.0e12,
    "copied_bytes": 8_600_000_000,
    "flops_per_s": {"bf16": 7.0e14},
    "errors": {"fp8": "no FP8 here"},
}


def head(device="NVIDIA H200", capability="9.0", date="2026-11-30T10:00:00Z", commit=None):
    ptxas = {"version": "12.8.93", "source": "bundled", "trusted": False}
    versions = {"torch": "2.11.0", "triton": "3.6.0", "driver": None, "ptxas": ptxas}
    card = {"name": device, "capability": capability, "l2_bytes": 60_000_000}
    found = {"device": card, "date": date, "commit": commit}
    return found | {
        "versions": versions,
        "ceilings": CEILINGS,
        "tests": None,
        "command": "python -m kernels.bench",
    }


EMPTY = {"schema": 1, "runs": {}, "rows": []}


def test_the_floor_is_the_larger_of_bytes_and_summed_flops():
    row = measure("op", case(bytes=4.0e6), prepare)
    assert results.against_floor(row, CEILINGS)["floor_us"] == pytest.approx(1.0)
    assert results.against_floor(row, CEILINGS)["paths"][OURS]["share"] == pytest.approx(0.1)
    heavy = measure("op", case(flops={"bf16": 1.4e9}), prepare)
    assert results.against_floor(heavy, CEILINGS)["floor_us"] == pytest.approx(2.0)
    unknown = measure("op", case(flops={"bf16": 1.0, "fp8": 1.0}), prepare)
    assert results.against_floor(unknown, CEILINGS) == {"floor_us": None}
    assert results.against_floor(row, None) == {"floor_us": None}


def test_rows_replace_those_of_the_same_device_only():
    def row(name, ours=10.0):
        return measure("op", case(name=name, paths={OURS: path(ours)}), prepare)

    first = results.merged(EMPTY, "h200 1", head(), [row("a"), row("b")])
    both = results.merged(first, "b200 1", head("NVIDIA B200", "10.0"), [row("a", 5.0)])
    assert len(both["rows"]) == 3
    again = results.merged(both, "h200 2", head(date="2026-12-01T10:00:00Z"), [row("a", 7.0)])
    times = {(r["run"], r["name"]): r["paths"][OURS]["us"]["median"] for r in again["rows"]}
    assert times == {("h200 2", "a"): 7.0, ("h200 1", "b"): 10.0, ("b200 1", "a"): 5.0}
    last = results.merged(again, "h200 3", head(), [row("a"), row("b")])
    assert set(last["runs"]) == {"h200 3", "b200 1"}


def test_the_error_of_unreached_cases_goes_when_one_is_measured():
    bad = results.merged(EMPTY, "1", head(), [failed("op", "", "all cases", "no module", cases=True)])
    assert bad["rows"][0]["error"] == "no module"
    good = results.merged(bad, "2", head(), [measure("op", case(), prepare)])
    assert [row["name"] for row in good["rows"]] == ["1 x 32K"]


def test_results_are_read_back_and_another_schema_is_refused(tmp_path):
    file = tmp_path / "bench.json"
    whole = results.merged(EMPTY, "1", head(), [measure("op", case(), prepare)])
    results.save(file, whole)
    assert results.load(file) == whole
    assert results.load(tmp_path / "absent.json") == EMPTY
    file.write_text('{"schema": 99}')
    with pytest.raises(results.ResultsError, match="schema 99, expected 1"):
        results.load(file)


def rows_of(*ratios, group="topk", against=REPLACED):
    given = [
        case(group=group, name=str(r), paths={OURS: path(10.0 * r), against: path(10.0)}) for r in ratios
    ]
    return [measure("op", each, prepare) for each in given]


def test_a_target_is_reached_by_the_worst_row_or_the_mean():
    assert targets.reached(targets.TARGETS["topk"], rows_of(0.1, 0.3)) == "must"
    assert targets.reached(targets.TARGETS["topk"], rows_of(0.1, 0.16)) == "aim"
    assert targets.reached(targets.TARGETS["topk"], rows_of(0.1, 0.4)) == "missed"
    mean = targets.TARGETS["b1_flashmla"]
    assert targets.reached(mean, rows_of(0.9, 1.1, group="b1_flashmla", against="flashmla")) == "must"
    decode = targets.TARGETS["b2_decode"]
    assert targets.reached(decode, rows_of(0.9, 1.05, group="b2_decode", against="deepgemm")) == "must"
    assert targets.reached(decode, rows_of(0.7, 1.2, group="b2_decode", against="deepgemm")) == "missed"
    whole = rows_of(0.2, 0.07)
    whole[1]["name"] = "B=64, 32768 entries"
    assert targets.reached(targets.TARGETS["b2_whole"], whole) == "must"
    whole[1]["ratios"][REPLACED]["median"] = 0.1
    assert targets.reached(targets.TARGETS["b2_whole"], whole) == "missed"
    share = [
        row | results.against_floor(row, CEILINGS) for row in (measure("op", case(bytes=2.8e7), prepare),)
    ]
    assert targets.reached(targets.TARGETS["nvfp4_moe"], share) == "must"
    absent = [*rows_of(0.5), describe("op", case())]
    assert targets.reached(targets.TARGETS["topk"], absent) == "not measured"


def test_tables_show_times_errors_and_absent_peers():
    rows = [*rows_of(0.25), measure("op", case(name="peer", peers=("deepgemm",)), prepare)]
    rows.append(failed("op", "topk", "64 x 32K", "the worker died"))
    whole = results.merged(EMPTY, "1", head(), rows)
    console = Console(width=250, record=True, file=io.StringIO())
    table.show(whole, console=console)
    printed, written = console.export_text(), page.page(whole)
    for text in (printed, written):
        assert "10.0 (10.0-10.0), ours/it 0.25 (0.25-0.25)" in text
        assert "deepgemm: peer absent" in text
        assert "error: the worker died" in text
        assert "copy 4.00 TB/s (8.6 GB moved), bf16 700 TFLOP/s, fp8 not measured" in text
    assert "BLACKWELL: NOT RUN" in written
    assert "12.8.93 (bundled, which miscompiles FP8 round trips)" in written
    whole = results.merged(whole, "2", head("NVIDIA B200", "10.0"), rows_of(0.5))
    assert "NOT RUN" not in page.page(whole)


def test_a_row_names_its_run_and_a_run_its_commit():
    def row(name):
        return measure("op", case(name=name), prepare)

    whole = results.merged(EMPTY, "z", head(commit="aaa"), [row("a"), row("b"), row("c")])
    later = head(date="2026-12-01T10:00:00Z", commit="bbb")
    whole = results.merged(whole, "a", later, [row("b"), failed("op", "topk", "c", "died")])
    whole = results.merged(whole, "other", head("NVIDIA B200", "10.0"), [row("a")])
    assert table.run_numbers(whole) == {"z": 1, "other": 1, "a": 2}
    text = page.page(whole)
    h200 = text[text.index("## NVIDIA H200") :]
    assert "- run 1: 2026-11-30T10:00:00Z, commit aaa, not of the newest run, " in h200
    assert "- run 2: 2026-12-01T10:00:00Z, commit bbb, torch" in h200
    console = Console(width=250, record=True, file=io.StringIO())
    table.show(whole, only="NVIDIA H200", console=console)
    for name, run in (("a", "1"), ("b", "2"), ("c", "2")):
        (line,) = [line for line in h200.splitlines() if line.startswith(f"| {name} |")]
        assert line.endswith(f"| {run} |")
    assert "NVIDIA H200, run 2, 2026-12-01" in console.export_text()


@pytest.mark.parametrize(
    ("copies", "size", "shown"),
    [(64, 4.0e5, "25.2 MB, in L2"), (16, 4.0e6, "60.0 MB, in L2"), (17, 4.0e6, "64.0 MB"), (3, 0.0, "")],
)
def test_what_is_touched_between_two_uses_is_shown(copies, size, shown):
    whole = results.merged(EMPTY, "1", head(), [measure("op", case(copies=copies, bytes=size), prepare)])
    place = table.HEADS.index("reused after")
    assert table.cells(whole["rows"][0], whole)[place] == shown
    assert ("in L2 |" in page.page(whole)) == shown.endswith("in L2")
    own = measure("op", case(bytes=4.0e6, apart=9.0e7), prepare)
    assert own["reused_after"] == 9.0e7
    del own["reused_after"]
    assert table.cells(results.merged(EMPTY, "1", head(), [own])["rows"][0], whole)[place] == "not recorded"


def test_a_page_needs_results(tmp_path, capsys):
    assert page.main([str(tmp_path / "bench.json"), str(tmp_path / "docs/bench.md")]) == 1
    assert "run `snakemake bench`" in capsys.readouterr().err
    results.save(tmp_path / "bench.json", EMPTY)
    assert page.main([str(tmp_path / "bench.json"), str(tmp_path / "docs/bench.md")]) == 0
    assert (tmp_path / "docs/bench.md").read_text().startswith("# Kernels: times")


def test_the_committed_page_is_what_the_committed_results_say():
    docs = bench.ROOT.parent / "docs"
    if not (docs / "bench.json").is_file():
        pytest.skip("no docs/bench.json: no results are committed")
    assert (docs / "bench.md").read_text() == page.page(results.load(docs / "bench.json"))


def test_the_tests_of_a_device_are_counted(tmp_path):
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite tests="10" failures="1" errors="0" skipped="2" timestamp="2026">'
        '<properties><property name="device" value="NVIDIA H200"/></properties></testsuite></testsuites>'
    )
    found = results.tests(file)
    assert page.tests(found, "NVIDIA H200").endswith("7 passed, 1 failed, 2 skipped")
    assert page.tests(found, "NVIDIA B200").endswith("not recorded")
    assert results.tests(tmp_path / "absent.xml") is None


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_device_is_in_the_file_of_the_tests(tmp_path, workers):
    (tmp_path / "conftest.py").write_text("from kernels.conftest import pytest_configure\n")
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    file = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", f"--junitxml={file}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(bench.ROOT.parent)}
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=env, check=True, timeout=180)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    assert results.tests(file)["device"] == here
