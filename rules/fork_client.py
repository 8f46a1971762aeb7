"""Be ``python -m module …`` as a fork of ``rules/fork_server.py``, or where none listens or takes it, as it is.

The shell lines of the rules run this for ``python`` (``rules/common.smk``), with ``-IS``: 20 ms. Exit status, streams,
signals and process group are those of the stage.
"""

import json
import os
import signal
import socket
import sys


def forked(words: list[str], server: str) -> int | None:
    """Exit status of a stage, negative for a signal; None: it was not started."""
    asked = {"arguments": words, "environment": dict(os.environ), "python": sys.executable}
    asked |= {"folder": os.getcwd(), "group": os.getpgrp(), "session": os.getsid(0)}
    message = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(f"\0{server}")
            socket.send_fds(connection, [message], [0, 1, 2])
            if not connection.recv(64):
                return None
        except OSError:  # another machine, another system, or the server is gone
            return None
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stage has it too, and says how it ends
        status = connection.recv(64)
    return int(status) if status else -signal.SIGKILL  # as the server died, and so the stage with it


def main(words: list[str]) -> None:
    """Run Python with these arguments; never returns."""
    server = os.environ.get("DSV4_FORK_SERVER")
    status = forked(words[1:], server) if server and words[:1] == ["-m"] else None
    if status is None:
        os.execv(sys.executable, [sys.executable, *words])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


main(sys.argv[1:])
