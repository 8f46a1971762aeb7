"""An engine that crashes, hangs or is not there gives a verdict with its last words, never a traceback."""

import subprocess
import sys
import time

import psutil
import pytest

from dsv4.engine.conftest import ROOT, verdict, with_rungs
from dsv4.engine.process import run
from dsv4.engine.spec import EngineError, parse_engine
from dsv4.engine.variant import write_engine_variant
from dsv4.ladder import State

pytestmark = pytest.mark.xdist_group("engine")


def engine(code, **more):
    return {"command": [sys.executable, "-c", code], **more}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            engine("import sys; print('layer 3'); sys.exit('out of memory')"),
            "engine mine ended with exit status 1; its last lines: layer 3 | out of memory; to run it again by hand",
        ),
        (
            engine("import os; os.kill(os.getpid(), 11)"),
            "engine mine ended with signal 11; its last lines: nothing",
        ),
        (
            engine("import time; time.sleep(60)", timeout=0.5),
            "did not end within 0.5 s (engines.mine.timeout)",
        ),
        ({"command": ["no-such-engine"]}, "no-such-engine cannot be started in"),
        (engine("pass"), "manifest.json is missing: it did not finish"),
    ],
    ids=["status", "signal", "timeout", "not there", "nothing"],
)
def test_a_broken_engine_cannot_be_measured(tiny, content, said):
    setup = with_rungs(tiny, {"mine": content}, {"Mine": {"engine": "mine"}})
    write_engine_variant(setup, setup.config.ladder["Mine"])
    found = verdict(setup, "Mine")
    assert found["status"] == State.CANNOT_MEASURE
    (reason,) = found["reasons"]
    assert said in reason
    assert "Traceback" not in reason
    assert (setup.results / "engines" / "Mine" / "job.json").exists()  # kept, to run it again


def test_it_is_started_in_its_repository_with_the_job_as_its_last_argument(tmp_path, capfd):
    repo = tmp_path / "repo"
    repo.mkdir()
    code = "import os, sys; print(os.getcwd(), sys.argv[1:])"
    run(parse_engine("mine", engine(code, repo=str(repo))), tmp_path / "job")
    assert f"mine: {repo} ['{tmp_path / 'job'}']" in capfd.readouterr().err


def gone(pid, seconds=10):
    until = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_it_dies_with_an_audit_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    code = (
        f"import os, time, pathlib; pathlib.Path({str(pids)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    audit = (
        "import pathlib, sys; from dsv4.engine.process import run; from dsv4.engine.spec import parse_engine;"
        f"run(parse_engine('mine', {engine(code)!r}), pathlib.Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", audit], cwd=ROOT) as process:
        until = time.monotonic() + 30
        while not (pids.exists() and pids.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
    gone(int(pids.read_text()))


def test_no_child_outlives_it(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import subprocess, sys, time, pathlib;"
        f"child = subprocess.Popen(['sleep', '60']); pathlib.Path({str(pids)!r}).write_text(str(child.pid));"
        "time.sleep(60)"
    )
    with pytest.raises(EngineError, match="did not end within"):
        run(parse_engine("mine", engine(code, timeout=1.5)), tmp_path)
    gone(int(pids.read_text()))
