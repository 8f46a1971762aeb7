"""Processes that end with the one that started them, and with all that they started."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any


def die_with_parent(parent: int) -> None:
    """Linux: called in a child, it ends the child once its parent's thread is gone, killed or not.

    Parameters
    ----------
    parent : process that started it, by its id from before; another one now means that it is gone already.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its group, and everything in that; what has ended is no error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
