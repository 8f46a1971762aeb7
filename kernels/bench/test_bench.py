"""Measuring without a GPU: statistics, rows, errors, dead workers. Timers are fakes."""

import json
import sys
from itertools import pairwise

import pytest

pytest.importorskip("rich", reason="no rich: the benchmark prints a table")

from kernels.bench import __main__ as bench
from kernels.bench._fakes import case, path, prepare
from kernels.bench.measure import describe, measure
from kernels.bench.statistics import geometric_mean, order, ratio, spread
from kernels.bench.worker import ContextLostError, run_op
from kernels.bench_case import OURS, REPLACED


def broken(copies):
    raise RuntimeError("no such instruction\nand more")


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


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert bench.main(["--out", str(tmp_path / "bench.json")]) == 2
    assert "interpreted kernels have no time" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path / "bench.json")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], ""),
        (
            ["--out", "/some/where/bench.json", "--tests=/some/tests.xml", "--seconds", "270"],
            " --seconds 270",
        ),
        (["--op", "hc", "--op=linear", "--group", "P4 and P5"], " --op hc --op linear --group 'P4 and P5'"),
        (["--seconds", "0.5", "--out", "other.json"], " --seconds 0.5"),
    ],
)
def test_the_recorded_command_names_no_file_of_the_machine(given, said):
    assert bench.command(bench._arguments(given)) == f"python -m kernels.bench{said}"


def test_an_op_without_cases_is_refused_before_anything_is_measured(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--op", "gather_dequantise", "--out", str(tmp_path / "bench.json")])
    assert ended.value.code == 2
    assert "invalid choice: 'gather_dequantise'" in capsys.readouterr().err
    assert not (tmp_path / "bench.json").exists()
