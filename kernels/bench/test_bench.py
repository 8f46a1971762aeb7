"""The harness without a GPU: statistics, rows, errors, dead workers, merging, tables. Timers are fakes."""

import io
import json
import sys
from itertools import pairwise

import pytest

pytest.importorskip("rich")

from rich.console import Console

from kernels.bench import __main__ as bench
from kernels.bench import page, results, table, targets
from kernels.bench.measure import describe, failed, measure
from kernels.bench.statistics import geometric_mean, order, ratio, spread
from kernels.bench.worker import ContextLostError, run_op
from kernels.bench_case import OURS, REPLACED, Case


class Fake:
    """A path that takes what it is told, one sample after the other."""

    def __init__(self, samples):
        self.samples, self.taken = list(samples), 0

    def replay(self):
        self.taken += 1
        return self.samples[(self.taken - 1) % len(self.samples)]

    def eager(self):
        return 30.0


def prepare(launch, copies):
    """Launching a fake path gives its sampler, or raises."""
    return launch(copies)


def path(*samples):
    return lambda copies: Fake(samples)


def broken(copies):
    raise RuntimeError("no such instruction\nand more")


def case(**fields):
    given = {"group": "topk", "name": "1 x 32K", "copies": 3, "bytes": 4.0e6}
    given["paths"] = {OURS: path(10.0), REPLACED: path(40.0)}
    return Case(**given | fields)


def test_quartiles_are_those_of_the_samples():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "n": 5}
    assert spread([7.0])["q1"] == 7.0
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_a_ratio_is_of_neighbours_so_that_drift_cancels():
    drifting = [1.0, 2.0, 4.0]
    assert ratio(drifting, [2 * t for t in drifting]) == {
        "median": 0.5,
        "q1": 0.5,
        "q3": 0.5,
        "min": 0.5,
        "n": 3,
    }
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_every_path_comes_first_and_after_every_other_one():
    turns = [order(["a", "b", "c"], turn) for turn in range(6)]
    assert {turn[0] for turn in turns} == {"a", "b", "c"}
    pairs = {pair for turn in turns for pair in pairwise(turn)}
    assert len(pairs) == 6


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no geometric mean"):
        geometric_mean([0.0])


def test_a_row_holds_times_ratios_and_absent_peers():
    row = measure("index_topk", case(peers=("deepgemm",), launches={OURS: 1}), prepare)
    assert row["paths"][OURS]["us"]["median"] == 10.0
    assert row["paths"][OURS]["us"]["n"] >= 15
    assert row["paths"][OURS]["eager_us"]["median"] == 30.0
    assert row["ratios"] == {REPLACED: spread([0.25] * 21)}
    assert row["absent"] == ["deepgemm"]
    assert row["error"] is None
    assert json.loads(json.dumps(row)) == row


def test_the_peer_of_a_target_is_absent_without_being_named():
    assert describe("op", case(group="b2_decode"))["absent"] == ["deepgemm"]
    assert (
        describe("op", case(group="b2_decode", paths={OURS: path(1.0), "deepgemm": path(1.0)}))["absent"]
        == []
    )
    assert describe("op", case(group="topk", paths={OURS: path(1.0)}))["absent"] == []
    assert describe("op", case(group="no such group"))["absent"] == []


def test_a_failed_check_times_nothing():
    def wrong():
        raise AssertionError("17 of 32 rows differ")

    row = measure("op", case(check=wrong), prepare)
    assert row["error"] == "check: AssertionError: 17 of 32 rows differ"
    assert row["paths"] == {}


def test_a_peer_that_raises_is_named_and_hides_nothing():
    row = measure("op", case(paths={OURS: path(5.0), "flashmla": broken}), prepare)
    assert row["paths"]["flashmla"] == {"error": "RuntimeError: no such instruction"}
    assert row["paths"][OURS]["us"]["median"] == 5.0
    assert row["error"] is None
    assert (
        measure("op", case(paths={OURS: broken}), prepare)["error"]
        == "ours: RuntimeError: no such instruction"
    )
    assert "no path 'ours'" in measure("op", case(paths={"flashmla": path(1.0)}), prepare)["error"]


def run_all(cases, **options):
    events = []
    given = {"group": None, "skip": 0, "prepare": prepare, "alive": lambda: True} | options
    run_op("op", iter(cases), send=events.append, **given)
    return [event["row"] for event in events if event["event"] == "row"]


def test_cases_that_cannot_be_built_are_a_row():
    def cases():
        yield case(name="first")
        raise MemoryError("out of memory")

    first, second = run_all(cases())
    assert first["name"] == "first"
    assert (second["name"], second["error"]) == ("case 1 and after", "MemoryError: out of memory")


def test_one_group_and_what_was_done_before_are_left_out():
    cases = [case(name=str(n), group="topk" if n % 2 else "b2_whole") for n in range(6)]
    assert [row["name"] for row in run_all(cases, group="topk", skip=2)] == ["3", "5"]


def test_a_lost_context_ends_the_worker_behind_its_row():
    with pytest.raises(ContextLostError):
        run_all([case(), case()], alive=lambda: False)


WORKER = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
for name in ("--op", "--skip", "--events", "--group"):
    parser.add_argument(name, action="append" if name == "--op" else "store")
parser.add_argument("--ceilings", action="store_true")
args = parser.parse_args()
pipe = os.fdopen(int(args.events), "w", buffering=1)
send = lambda **event: pipe.write(json.dumps(event) + "\\n")
send(event="device", device={"name": "card"}, versions={})
if args.ceilings:
    send(event="ceilings", ceilings={})
for number, op in enumerate(args.op):
    for index in range(3):
        send(event="building", op=op, index=index)
        if (op, index) == ("b", 0) and MODE == "build":
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 0 and index < int(args.skip):
            continue
        send(event="case", op=op, index=index, group="g", name=f"{op}{index}")
        if (op, index) == ("b", 1) and MODE == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if (op, index) == ("b", 1) and MODE == "hang":
            time.sleep(60)
        send(event="row", row={"name": f"{op}{index}", "error": None})
        if (op, index) == ("b", 1) and MODE == "lost":
            sys.exit(3)
send(event="end")
"""


@pytest.mark.parametrize(
    ("mode", "row", "error"),
    [
        ("die", "b1", "the worker ended with exit status -9"),
        ("hang", "b1", "the worker was silent for 1 s"),
        ("lost", "b1", None),
        ("build", "case 0, while it was built", "the worker ended with exit status -11"),
        ("well", "b1", None),
    ],
)
def test_a_dead_or_hanging_worker_costs_its_case(tmp_path, mode, row, error):
    (tmp_path / "worker.py").write_text(f"MODE = {mode!r}\n{WORKER}")
    command = [sys.executable, str(tmp_path / "worker.py")]
    events = list(bench.watched(["a", "b", "c"], None, None, command, silent=1.0))
    rows = {event["row"]["name"]: event["row"]["error"] for event in events if event["event"] == "row"}
    of_b = [row] if mode == "build" else ["b0", "b1", "b2"]
    assert list(rows) == ["a0", "a1", "a2", *of_b, "c0", "c1", "c2"]
    assert rows[row] == error
    assert sum(event["event"] == "ceilings" for event in events) == 1


def test_a_worker_that_never_starts_is_one_error(tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit(1)")
    (event,) = bench.watched(["a", "b"], None, None, [sys.executable, str(tmp_path / "worker.py")])
    assert event["row"]["error"] == "the worker ended with exit status 1"


def test_out_of_time_keeps_what_was_measured(tmp_path):
    (tmp_path / "worker.py").write_text(f"MODE = 'hang'\n{WORKER}")
    command = [sys.executable, str(tmp_path / "worker.py")]
    rows = [e["row"] for e in bench.watched(["a", "b"], None, 2.0, command) if e["event"] == "row"]
    assert [row["name"] for row in rows] == ["a0", "a1", "a2", "b0", "cases not reached"]
    assert rows[-1]["error"] == "out of time"


CEILINGS = {
    "copy_bytes_per_s": 4.0e12,
    "copied_bytes": 8_600_000_000,
    "flops_per_s": {"bf16": 7.0e14},
    "errors": {"fp8": "no FP8 here"},
}


def head(device="NVIDIA H200", capability="9.0", date="2026-11-30T10:00:00Z"):
    ptxas = {"version": "12.8.93", "source": "bundled", "trusted": False}
    versions = {"torch": "2.11.0", "triton": "3.6.0", "driver": None, "ptxas": ptxas}
    found = {"device": {"name": device, "capability": capability}, "date": date, "commit": None}
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


def test_a_page_needs_results(tmp_path, capsys):
    assert page.main([str(tmp_path / "bench.json"), str(tmp_path / "docs/bench.md")]) == 1
    assert "run `snakemake bench`" in capsys.readouterr().err
    results.save(tmp_path / "bench.json", EMPTY)
    assert page.main([str(tmp_path / "bench.json"), str(tmp_path / "docs/bench.md")]) == 0
    assert (tmp_path / "docs/bench.md").read_text().startswith("# Kernels: times")


def test_the_committed_page_is_what_the_committed_results_say():
    docs = bench.ROOT.parent / "docs"
    if not (docs / "bench.json").is_file():
        pytest.skip("no results are committed")
    assert (docs / "bench.md").read_text() == page.page(results.load(docs / "bench.json"))


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert bench.main(["--out", str(tmp_path / "bench.json")]) == 2
    assert "interpreted kernels have no time" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path / "bench.json")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "bench.json").exists()


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
