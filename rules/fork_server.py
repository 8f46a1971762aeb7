"""Stages as forks of one process that has loaded the libraries, which takes a stage 1 to 4 s of CPU time.

``python -P rules/fork_server.py NAME PID`` listens on the abstract Unix socket ``NAME`` and returns; what listens ends,
and every stage that it forked, when process ``PID`` does, which is Snakemake, however that ends. Nothing of this
project is loaded here: a stage imports the sources as they are when it starts. Nor is Triton, which reads the
environment as it loads.

``rules/fork_client.py`` asks. A stage is forked if it would have started as this process did: in its folder, with its
interpreter, in its session, and in its environment, which libraries read as they load and glibc before that. One that
would not starts by itself.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LIBRARIES = ["torch", "h5py", "pandas", "pyarrow.parquet", "safetensors.torch", "tokenizers", "filelock"]
LIBRARIES += ["jinja2.sandbox", "jsonschema", "rich.console", "rich.progress", "statistics", "yaml"]
NOT_READ = {"_", "SHLVL", "TMPDIR", "TEMPDIR", "TMP", "TEMP"}  # by any library as it loads: these may differ
NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # of the allocator that loads with Arrow
ROOT = Path(__file__).resolve().parent.parent


class Stage(NamedTuple):
    """A fork at work: its process, a descriptor that can be read when it ended, and who asked for it."""

    process: int
    ended: int
    client: socket.socket


class Server:
    """One thread, for a fork keeps one: a selector says which descriptor can be read, and ``data`` what to do then."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self.listener, self.loaded, self.stages = listener, False, set[Stage]()
        self.environment = dict(os.environ)
        self.die_with_parent = runpy.run_path(str(ROOT / "kernels/process.py"))["die_with_parent"]
        self.selector = selectors.DefaultSelector()
        self.watch(os.pidfd_open(owner), partial(os._exit, 0))  # stages die with their parent
        self.watch(listener, self.accept)

    def watch(self, what: int | socket.socket, then: Callable[[], Any]) -> None:
        """Call ``then`` whenever there is something to read."""
        self.selector.register(what, selectors.EVENT_READ, then)

    def serve(self) -> NoReturn:
        """Fork stages, until the owner is gone."""
        while True:
            for key, _ in self.selector.select():
                key.data()

    def accept(self) -> None:
        """Fork what a client asks for, or hang up: it then starts by itself."""
        client, _ = self.listener.accept()
        client.settimeout(1)  # one that is stopped stops no other
        message, files = b"", list[int]()
        with suppress(OSError):
            message, files, *_ = socket.recv_fds(client, 1 << 20, 3)
        user = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        asked = json.loads(message) if message and user == os.getuid() else None
        if not (asked and self.would_start_alike(asked) and self.fork(asked, client, files)):
            client.close()
        for file in files:
            os.close(file)

    def would_start_alike(self, asked: Mapping[str, Any]) -> bool:
        """Whether in the client's place this process would have become what it is."""
        own = {"folder": str(Path.cwd()), "python": sys.executable, "session": os.getsid(0)}
        differ = {name for name, _ in self.environment.items() ^ asked["environment"].items()}
        return own.items() <= asked.items() and differ <= NOT_READ

    def load(self) -> None:
        """Import the libraries when the first stage asks, which waits no longer than its own imports would take."""
        if self.loaded:
            return
        os.environ.update(NO_THREAD)
        for name in LIBRARIES:
            importlib.import_module(name)
        threads = len(list(Path("/proc/self/task").iterdir()))
        fresh = {"dsv4", "kernels", "triton"} & set(sys.modules)
        if threads > 1 or fresh:
            sys.exit(
                f"stages start by themselves: libraries have {threads} threads, and load {fresh or 'no Triton'}"
            )
        gc.collect()
        gc.freeze()  # or a collection in a stage would write to, and so copy, all pages of what was loaded
        self.loaded = True

    def fork(self, asked: Mapping[str, Any], client: socket.socket, files: Sequence[int]) -> bool:
        """Start a stage with a client's files, and watch both; False: there is no room for another process."""
        self.load()
        server = os.getpid()
        try:
            process = os.fork()
        except OSError:
            return False
        if process == 0:
            status = 1
            try:
                for stream, file in enumerate(files):
                    os.dup2(file, stream)
                self.die_with_parent(server)
                os.setpgid(0, asked["group"])  # what a terminal sends there is for the stage too
                for file in [client.fileno(), *files, *self.selector.get_map()]:
                    os.close(file)
                self.selector.close()
                status = run(asked)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        stage = Stage(process, os.pidfd_open(process), client)
        with suppress(OSError):  # gone: seen below
            client.send(b"forked")
        self.stages.add(stage)
        self.watch(stage.ended, partial(self.end, stage))
        self.watch(client, partial(self.end, stage))  # it says nothing more, so this is its own end
        return True

    def end(self, stage: Stage) -> None:
        """Tell a client how its stage ended; kill one whose client is gone."""
        if stage not in self.stages:  # both ended at once
            return
        self.stages.remove(stage)
        os.kill(stage.process, signal.SIGKILL)  # nothing to one that ended
        status = os.waitstatus_to_exitcode(os.waitpid(stage.process, 0)[1])
        with suppress(OSError):
            stage.client.send(str(status).encode())
        for watched in (stage.client, stage.ended):
            self.selector.unregister(watched)
        stage.client.close()
        os.close(stage.ended)


def run(asked: Mapping[str, Any]) -> int:
    """Be ``python -m module arguments``; return the exit status.

    What is left out is to take the interpreter apart module by module: 0.3 to 0.5 s, most of it to copy pages that
    were the server's.
    """
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path.insert(0, asked["folder"])
    sys.argv = list(asked["arguments"])
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = int(stop.code is not None) if not isinstance(stop.code, int) else stop.code
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        stages = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error.with_traceback(stages), stages)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # as at any end: threads are waited for, what registered itself is called
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status == -signal.SIGINT:  # so that the shell sees an interrupt, as Python lets it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


def main(name: str, owner: int) -> None:
    """Return when clients find the socket; a child of this process serves it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)  # an interrupt is for the stages; it ends when Snakemake has seen to their ends
    for stream in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    Server(listener, owner).serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
