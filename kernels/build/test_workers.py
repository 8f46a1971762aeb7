"""Compiling processes, with stubs for the compiler: what one that dies, hangs or refuses takes down, and what not."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kernels.build import workers
from kernels.build.architecture import ARCHITECTURES
from kernels.build_spec import Build

BUILDS = [Build(name=f"tiny/{number}", kernel=None, signature={}) for number in range(6)]


def compiled(tmp_path, compiler=None, jobs: int = 1) -> dict[str, dict]:
    """What became of BUILDS; ``compiler`` may do with a Build what it likes before that is made."""

    def compile_stub(build, arch, made, kept):
        if compiler is not None:
            compiler(build.name)
        made.with_suffix(".json").write_text(json.dumps({"process": os.getpid()}))

    found = workers.compile_all([[job(tmp_path, build)] for build in BUILDS], jobs, compile_stub)
    return {done.build.name: facts for done, facts in found}


def job(folder: Path, build: Build, arch: str = "sm_90a") -> workers.Job:
    return workers.Job(build, ARCHITECTURES[arch], folder / f"{arch}__{build.name.replace('/', '__')}")


def failed(found: dict[str, dict]) -> dict[str, str]:
    return {name: facts["error"] for name, facts in found.items() if facts["state"] == "failed"}


def processes(found: dict[str, dict]) -> set[int]:
    return {facts["process"] for facts in found.values() if facts["state"] == "built"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_process_compiles_many_and_ends_after_the_last(tmp_path, jobs):
    found = compiled(tmp_path, lambda _: time.sleep(0.05), jobs)
    assert set(found) == {build.name for build in BUILDS}
    assert not failed(found)
    assert len(processes(found)) == jobs
    for process in processes(found):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("dies", [False, True])
def test_a_group_leaves_what_it_has_in_common_to_its_own_process_alone(tmp_path, jobs, dies):
    """One that dies takes that with it, and the rest of its group is done all the same."""
    arches = ("sm_100a", "sm_103a", "sm_90a")

    def compile_stub(build, arch, made, kept):
        made.with_suffix(".json").write_text(json.dumps({"left": kept.lowered, "process": os.getpid()}))
        if dies and (build.name, arch.name) == ("tiny/2", "sm_103a"):
            os._exit(3)
        kept.lowered = f"{kept.lowered or build.name} {arch.name}"

    groups = [[job(tmp_path, build, arch) for arch in arches] for build in BUILDS]
    found = {
        (done.build.name, done.arch.name): facts
        for done, facts in workers.compile_all(groups, jobs, compile_stub)
    }
    assert len(found) == len(BUILDS) * len(arches)
    left = {at: facts.get("left") for at, facts in found.items()}
    expected = {
        (build.name, arch): " ".join([build.name, *arches[:place]]) if place else None
        for build in BUILDS
        for place, arch in enumerate(arches)
    }
    if dies:
        expected |= {("tiny/2", "sm_103a"): None, ("tiny/2", "sm_90a"): None}
    assert left == expected
    failures = {at: facts["error"] for at, facts in found.items() if facts["state"] == "failed"}
    assert failures == ({("tiny/2", "sm_103a"): "the compiler ended with exit code 3"} if dies else {})


@pytest.mark.parametrize(
    ("death", "code"),
    [(lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM), (lambda: os._exit(3), 3)],
)
def test_a_process_that_dies_takes_only_its_build_down(tmp_path, death, code):
    found = compiled(tmp_path, lambda name: name == "tiny/2" and death())
    assert failed(found) == {"tiny/2": f"the compiler ended with exit code {code}"}
    assert len(processes(found)) == 2


def test_a_build_that_is_refused_ends_no_process_and_has_a_log_of_its_own(tmp_path):
    def refuse(name):
        if name == "tiny/2":
            os.write(2, b"kernel.py:7: error: no such layout\n")
            raise RuntimeError("pass failed")
        if name == "tiny/3":
            raise workers.BuildError("tiny/3: left out: BLOCK")

    found = compiled(tmp_path, refuse)
    assert failed(found) == {
        "tiny/2": "RuntimeError: pass failed | kernel.py:7: error: no such layout",
        "tiny/3": "tiny/3: left out: BLOCK",
    }
    assert len(processes(found)) == 1


def test_a_compiler_that_hangs_is_stopped_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LONGEST", 1)

    def hang(name):
        if name == "tiny/2":
            assembler = subprocess.Popen(["sleep", "60"])
            (tmp_path / "assembler").write_text(str(assembler.pid))
            assembler.wait()

    found = compiled(tmp_path, hang)
    assert failed(found) == {"tiny/2": "the compiler took more than 1 s"}
    assert len(processes(found)) == 2
    assembler = int((tmp_path / "assembler").read_text())
    until = time.monotonic() + 10
    while runs(assembler):
        assert time.monotonic() < until
        time.sleep(0.01)


def runs(process: int) -> bool:
    """Whether a process is there, and not as a zombie: who inherits it may not have collected it yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
