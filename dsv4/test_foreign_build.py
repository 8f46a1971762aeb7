"""Foreign lock files: which go and which stay; and the build of the audited tree."""

import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from dsv4 import foreign_build, stale_locks

OLD = stale_locks.OLD + 60
filesystem, started_here = stale_locks.filesystem, stale_locks._started  # the others pretend them


@pytest.fixture
def lock(tmp_path):
    """Make a lock file of an age in seconds."""

    def make(text: str, age: float):
        path = tmp_path / "cache" / "lock"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - age,) * 2)
        return path

    return make


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Pretend a start of this machine in seconds ago, and a file system; by default long ago, and a disk."""

    def pretend(ago: float = 1e6, filesystem: str = "ext4") -> None:
        monkeypatch.setattr(stale_locks, "_started", lambda: time.time() - ago)
        monkeypatch.setattr(stale_locks, "filesystem", lambda _: filesystem)

    pretend()
    return pretend


@pytest.fixture
def dead():
    """Process id of a process that ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def kept(tmp_path) -> str:
    (line,) = stale_locks.clear(tmp_path, ["**/lock"])
    return line.partition(": ")[2]


def test_an_old_lock_of_a_dead_owner_goes(lock, dead, tmp_path):
    path = lock(f"{dead}\n", OLD)
    assert kept(tmp_path) == "removed: older than 10 minutes, and its owner is dead"
    assert not path.exists()


def test_a_young_lock_of_a_dead_owner_stays(lock, dead, tmp_path):
    path = lock(str(dead), 60)
    assert kept(tmp_path).startswith("kept: 60 s old") or kept(tmp_path).startswith("kept: 61 s old")
    assert path.exists()


def test_an_old_lock_with_a_live_owner_stays(lock, tmp_path):
    path = lock(str(os.getpid()), 0)
    (line,) = stale_locks.clear(tmp_path, ["**/lock"], now=time.time() + OLD)
    assert line.endswith(f"kept: its owner lives, process {os.getpid()}")
    assert path.exists()


def test_a_live_process_with_the_number_of_a_dead_owner_does_not_keep_it(lock, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lock(str(process.pid), OLD)
        assert kept(tmp_path).startswith("removed")
    finally:
        process.communicate(b"\n")


def test_an_old_lock_that_names_nobody_stays_while_a_process_has_it_open(lock, tmp_path):
    path = lock("", OLD)
    code = f"file = open({str(path)!r}); print('open', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert kept(tmp_path) == f"kept: process {process.pid} has it open"
    finally:
        process.communicate(b"\n")
    if os.geteuid() == 0:
        assert kept(tmp_path).startswith("removed")


def test_an_owner_on_another_machine_keeps_its_lock(lock, dead, tmp_path):
    lock(f"{dead}\nelsewhere\n", OLD)
    assert kept(tmp_path) == "kept: its owner ran on elsewhere"
    lock(f"{dead}\n{socket.gethostname()}\n", OLD)
    assert kept(tmp_path).startswith("removed")


@pytest.mark.parametrize("named", [True, False])
def test_an_owner_that_may_be_another_machines_keeps_its_lock(
    lock, dead, started, tmp_path, monkeypatch, named
):
    lock(str(dead) if named else "", OLD)
    started(ago=OLD - 60)
    assert kept(tmp_path) == "kept: it is older than this machine's start, and names no host"
    for shared in ("nfs4", "cifs", "fuse.sshfs", "virtiofs", "unknown"):
        started(filesystem=shared)
        assert kept(tmp_path) == f"kept: it is on {shared}, which other machines may share, and names no host"
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    lock(f"{dead}\nhere\n", OLD)
    assert kept(tmp_path).startswith("removed")


def test_a_lock_that_is_taken_while_it_is_judged_stays(lock, dead, tmp_path, monkeypatch):
    path, holders = lock(str(dead), OLD), stale_locks._holders

    def replaced(path):
        path.unlink()
        lock(str(os.getpid()), OLD)
        return holders(path)

    def touched(path):
        os.utime(path)
        return holders(path)

    def removed(path):
        path.unlink()
        return holders(path)

    for meanwhile in (replaced, touched, removed):
        monkeypatch.setattr(stale_locks, "_holders", meanwhile)
        assert kept(tmp_path) == "kept: another build took it meanwhile"
        assert path.exists() == (meanwhile is not removed)
        lock(str(dead), OLD)


def test_the_file_system_of_a_file_is_the_innermost_mounts(tmp_path, monkeypatch):
    mounts = [("/", "ext4"), (tmp_path, "xfs"), (tmp_path / "shared", "nfs"), (tmp_path / "shared", "nfs4")]
    found = [SimpleNamespace(mountpoint=str(folder), fstype=kind) for folder, kind in mounts]
    monkeypatch.setattr(stale_locks.psutil, "disk_partitions", lambda all: found)
    assert filesystem(tmp_path / "lock") == "xfs"
    assert filesystem(tmp_path / "shared/cache/lock") == "nfs4"
    assert filesystem(tmp_path / "sharedish/lock") == "xfs"


def test_this_machine_started_before_this_process():
    assert started_here() < time.time()


@pytest.fixture
def config(tmp_path):
    """Write a config.yaml with a build command."""

    def make(command: str):
        content = yaml.safe_load((foreign_build.Path(__file__).parents[1] / "config.yaml").read_text())
        content["build"] = {"command": command, "folder": str(tmp_path), "locks": ["**/lock"]}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        return ["--config", str(tmp_path / "config.yaml"), "--results", str(tmp_path / "results")]

    return make


def test_a_foreign_build_is_recorded_and_only_enforce_fails(config, lock, dead, tmp_path, capfd):
    lock(str(dead), OLD)
    arguments = config("test ! -e cache/lock && echo compiled; exit 3")
    assert foreign_build.main(arguments) == 0
    record = json.loads((tmp_path / "results/foreign_build.json").read_text())
    assert record["log"] == ["compiled"]
    assert record["exit_status"] == 3
    assert "removed" in record["locks"][0]
    assert "compiled" in capfd.readouterr().out
    assert foreign_build.main([*arguments, "--enforce"]) == 1
    assert foreign_build.main(config("true")) == 0
    assert foreign_build.main([*arguments, "--enforce"]) == 0
