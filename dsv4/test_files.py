"""Files that appear whole or not at all, and what is said where one cannot be written."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dsv4 import files, preflight
from dsv4.code_inputs import ROOT, closure
from dsv4.config import ConfigError
from dsv4.files import WriteError, write_json, write_parquet, write_whole
from dsv4.judge.enforce import DONE

WRITERS = {
    "bytes": lambda path: write_whole(path, b"new"),
    "json": lambda path: write_json(path, {"new": 1}),
    "parquet": lambda path: write_parquet(path, pa.table({"new": [1]})),
}
STAGES = [
    *(
        f"dsv4.run.{name}"
        for name in ("checkpoint", "reference", "variant", "floor", "noise", "times", "aba")
    ),
    *(f"dsv4.judge.{name}" for name in ("measure", "gate", "collect", "enforce")),
    *("dsv4.report", "dsv4.foreign_build", "dsv4"),
]
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@every_writer
def test_a_file_is_replaced_and_its_folder_made(tmp_path, write):
    path = tmp_path / "new" / "folder" / "a"
    write(path)
    first = path.read_bytes()
    path.write_bytes(b"old")
    write(path)
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def test_what_is_written_is_read(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, None]}
    table = pa.table({"a": [1.5, None]}).replace_schema_metadata({b"dsv4": b"notes"})
    write_parquet(tmp_path / "a.parquet", table)
    assert pq.read_table(tmp_path / "a.parquet").equals(table, check_metadata=True)


@every_writer
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EACCES, "the folder is read-only; make it writable or choose another results folder"),
        (errno.EROFS, "the file system is read-only; choose another results folder"),
        (errno.ENOSPC, "the disk is full; free space and run again, what is finished is kept"),
        (errno.EDQUOT, "the quota is used up; free space and run again"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("fails", ["mkdir", "open", "fsync", "replace"])
def test_a_write_that_the_system_refuses_leaves_the_old_file(
    tmp_path, monkeypatch, write, fails, code, message
):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def refuse(*_args, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os if fails == "fsync" else Path, fails, refuse)
    with pytest.raises(WriteError, match=rf"a: cannot be written: .*{re.escape(message)}"):
        write(path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@every_writer
def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch, write):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def interrupted(_handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@every_writer
def test_a_folder_that_is_a_file_is_named(tmp_path, write):
    (tmp_path / "results").touch()
    with pytest.raises(WriteError, match=r"results/a: cannot be written"):
        write(tmp_path / "results" / "a")


def test_writers_at_the_same_time_do_not_mix(tmp_path):
    path = tmp_path / "a"
    contents = [bytes([letter]) * 300_000 for letter in b"abcd"]
    threads = [threading.Thread(target=write_whole, args=(path, content)) for content in contents * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_writer_are_removed_and_of_a_living_one_kept(tmp_path, monkeypatch):
    living = files.temporary_name(tmp_path / "a")
    dead = tmp_path / f".a.{files.socket.gethostname()}.4194303.00.tmp"
    elsewhere = tmp_path / ".a.another-machine.4194303.00.tmp"
    for path in (living, dead, elsewhere):
        path.touch()
    monkeypatch.setattr(files, "alive", lambda pid: pid != 4194303)
    write_whole(tmp_path / "a", b"")
    assert set(tmp_path.iterdir()) == {tmp_path / "a", living, elsewhere}


def test_a_stage_says_so_in_one_line(tmp_path):
    write_json(
        tmp_path / "gates.json", {"variants": [{"id": "B1", "spine": True, "status": "pass", "parent": None}]}
    )
    no_bytes = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731 (runs in the child)
    command = [sys.executable, "-m", "dsv4.judge.enforce", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=no_bytes)
    line = f"error: {tmp_path / DONE}: cannot be written: [Errno 27] File too large"
    assert (done.returncode, done.stderr.strip()) == (1, line)
    assert [path.name for path in tmp_path.iterdir()] == ["gates.json"]


def test_the_link_to_the_last_run_is_refused_by_name(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match="latest: cannot be written"):
        preflight.point_latest(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_no_stage_writes_a_file_in_another_way():
    own = {"dsv4/files.py", "dsv4/stored.py"}  # a dump's bytes are h5py's, and its hash goes with it
    own |= {"dsv4/engine/tap_writer.py"}  # engines copy it, so it stands alone; it renames too
    own |= {"dsv4/commits/run.py"}  # files in a commit's tree, which is thrown away
    writes = re.compile(
        r"(?<!ast)\.(write_text|write_bytes|to_parquet|to_csv|dump)\(|write_table\(|open\([^)]*[\"'][wax]"
    )
    used = {file for stage in STAGES for file in closure(stage) if file.startswith("dsv4/")} - own
    found = [
        file for file in sorted(used) if file.endswith(".py") and writes.search((ROOT / file).read_text())
    ]
    assert found == []
