"""Processes that end with the one that started them."""

import os
import sys


def die_with_parent() -> None:
    """Linux: called in a child, it ends the child once its parent's thread is gone, killed or not."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            os._exit(1)
