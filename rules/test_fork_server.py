"""A forked stage is what ``python -m`` would have been, and none outlives who asked for it."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from rules.stubs import ROOT, Workflow, without_libraries

FILES = ["rules/fork_client.py", "rules/fork_server.py", "kernels/process.py"]
FORKED = "import sys, pathlib; pathlib.Path('forked').write_text(str(sys.flags.safe_path))\n"  # -P, as the server's
NAMED = "pathlib.Path('server').write_text(os.environ['DSV4_FORK_SERVER'])\n"
ENDS = {
    "arguments": "import sys; print(sys.argv[1:], sys.argv[0], __name__, __spec__.name, sys.path[0])",
    "environment": "import os; print(os.getcwd(), os.environ['TMPDIR'], os.getenv('JE_ARROW_MALLOC_CONF'))",
    "stdin": "print(input().upper())",
    "stderr": "import sys; print('said', file=sys.stderr)",
    "status": "import sys; sys.exit(2)",
    "no status": "import sys; sys.exit()",
    "message": "import sys; sys.exit('error: no such file')",
    "exception": "import json\njson.loads('{')",
    "signal": "import os; os.kill(os.getpid(), 15)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupt": "raise KeyboardInterrupt",
    "at exit": "import atexit; atexit.register(print, 'at exit')",
    "thread": "import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or print('late')).start()",
    "unflushed": "import sys; sys.stdout.write('no end of line')",
}
SLEEP = "import os, pathlib, time; pathlib.Path('started').write_text(str(os.getpid())); time.sleep(60)"


class Forking:
    """A folder with a stage, and a server that belongs to an owner of its own."""

    def __init__(self, folder, without=without_libraries):
        self.folder = folder
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        without(folder)
        self.name = f"dsv4-test-{os.getpid()}-{time.monotonic_ns()}"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        self.environment |= {"DSV4_FORK_SERVER": self.name, "PYTHONPATH": str(folder)}
        self.environment |= {
            "OMP_NUM_THREADS": "1"
        }  # as Snakemake sets it; else libraries start threads as they load
        self.owner = subprocess.Popen(["sleep", "600"])
        command = [sys.executable, "-P", "rules/fork_server.py", self.name, str(self.owner.pid)]
        subprocess.run(command, cwd=folder, env=self.environment, check=True)
        self.server = psutil.Process(next(pid for pid in psutil.pids() if self.name in words(pid)))

    def start(self, source, *arguments, forked=True, **changes):
        """Start a stage through the client, or as Python does."""
        (self.folder / "stage.py").write_text(source)
        (self.folder / "forked").unlink(missing_ok=True)
        client = ["-IS", str(self.folder / "rules/fork_client.py")] if forked else []
        options = {"cwd": self.folder, "env": self.environment, "text": True, "process_group": 0}
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([sys.executable, *client, "-m", "stage", *arguments], **options | changes)

    def run(self, source, *arguments, **changes):
        """Run a stage; return exit status, stdout, stderr, and whether it was a fork of the server."""
        process = self.start(FORKED + source, *arguments, **changes)
        out, err = process.communicate("line\n", timeout=30)
        return process.returncode, out, err, (self.folder / "forked").read_text() == "True"

    def started(self):
        """Wait until a stage of SLEEP runs."""
        path = self.folder / "started"
        until = time.monotonic() + 20
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < until
            time.sleep(0.02)
        stage = psutil.Process(int(path.read_text()))
        path.unlink()
        assert stage.ppid() == self.server.pid
        return stage

    def close(self):
        """End the owner, and so the server."""
        self.owner.kill()
        self.owner.wait()
        assert gone(self.server)


def words(pid):
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def gone(*processes):
    return not psutil.wait_procs(processes, timeout=5)[1]


@pytest.fixture(scope="module")
def forking(tmp_path_factory):
    with closing(Forking(tmp_path_factory.mktemp("forking"))) as forking:
        yield forking


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS)
def test_a_fork_ends_and_speaks_as_python_does(forking, source):
    environment = forking.environment | {"TMPDIR": "/elsewhere"}
    alone = forking.run(source, "--a", "b c", forked=False, env=environment)
    forked = forking.run(source, "--a", "b c", env=environment)
    assert (alone[3], forked[3]) == (False, True)
    assert forked[:2] == alone[:2]
    said = [re.sub(r' *File "<frozen runpy>".*\n', "", result[2]) for result in (forked, alone)]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "DSV4_FORK_SERVER"]
)
def test_another_environment_starts_by_itself(forking, tmp_path, name):
    (tmp_path / "only_there.py").write_text("")
    environment = forking.environment | {name: str(tmp_path)}
    source = "import os\nprint(os.getcwd())" + ("\nimport only_there" if name == "PYTHONPATH" else "")
    assert forking.run(source, env=environment) == (0, f"{forking.folder}\n", "", False)


def test_another_session_starts_by_itself(forking):
    assert forking.run("", process_group=None, start_new_session=True) == (0, "", "", False)


def test_a_client_that_dies_early_harms_no_other(forking):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"\0{forking.name}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped:
        stopped.connect(f"\0{forking.name}")
        assert forking.run("") == (0, "", "", True)


def test_an_edit_is_seen(forking):
    for text in ("one", "two"):
        (forking.folder / "edited.py").write_text(f"TEXT = '{text}'")
        assert forking.run("import edited; print(edited.TEXT)") == (0, f"{text}\n", "", True)


def test_an_interrupt_of_the_group_is_the_stage_s(forking):
    client = forking.start(f"try:\n    exec({SLEEP!r})\nexcept KeyboardInterrupt:\n    raise SystemExit(3)")
    stage = forking.started()
    assert os.getpgid(stage.pid) == client.pid
    os.killpg(client.pid, signal.SIGINT)
    assert client.communicate(timeout=5) == ("", "")
    assert client.returncode == 3


def test_a_killed_client_takes_its_stage_with_it_and_no_other(forking):
    client, other = forking.start(SLEEP), None
    stage = forking.started()
    other = forking.start(SLEEP)
    second = forking.started()
    client.kill()
    assert gone(stage)
    assert second.is_running()
    second.kill()
    assert other.wait(5) == -signal.SIGKILL
    client.wait()
    assert forking.run("", "after it") == (0, "", "", True)


@pytest.mark.parametrize("killed", ["owner", "server"])
def test_a_killed_owner_or_server_leaves_nothing(tmp_path, killed):
    with closing(Forking(tmp_path)) as forking:
        client = forking.start(SLEEP)
        stage = forking.started()
        getattr(forking, killed).kill()
        assert gone(stage, forking.server)
        assert client.wait(5) == -signal.SIGKILL
        assert forking.run("print(1)") == (0, "1\n", "", False)


def test_the_libraries_are_there_and_nothing_of_this_project(tmp_path):
    source = """
    import sys
    print([name for name in ("torch", "h5py", "pandas", "pyarrow.parquet") if name not in sys.modules])
    print([name for name in sys.modules if name.partition(".")[0] in ("dsv4", "kernels", "triton")])
    import torch
    print(torch.cuda.is_initialized())
    """
    source = "\n".join(line.strip() for line in source.splitlines())
    with closing(Forking(tmp_path, without=lambda folder: None)) as forking:
        assert forking.run(source) == (0, "[]\n[]\nFalse\n", "", True)


def test_snakemake_s_stages_are_forked_and_it_leaves_no_server(tmp_path):
    workflow = Workflow(tmp_path)
    workflow.edit("dsv4/run/checkpoint.py", "import time\n", f"import time\n{FORKED}{NAMED}")
    done = workflow.run("P4")
    assert done.returncode == 0, done.text
    assert (tmp_path / "forked").read_text() == "True"
    name = (tmp_path / "server").read_text()
    assert gone(*[psutil.Process(pid) for pid in psutil.pids() if name in words(pid)])


def test_a_run_of_few_jobs_loads_no_libraries(tmp_path):
    workflow = Workflow(tmp_path)
    workflow.edit("dsv4/judge/enforce.py", "import time\n", f"import time\n{FORKED}")
    for forked in ("True", "False"):
        done = workflow.run("P4")
        assert done.returncode == 0, done.text
        assert (tmp_path / "forked").read_text() == forked
        for verdict in tmp_path.glob("results/nano-*/enforced.ok"):  # so that one job is left
            verdict.unlink()
