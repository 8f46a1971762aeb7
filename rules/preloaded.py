"""Snakemake for the tests of the rules: loaded once, forked for each call, as which it takes 1 to 2 s less.

Reads calls from stdin, a JSON line each: ``arguments``, ``folder``, ``environment``, and the file that takes the
``output``. Each is a process of its own, whose exit status is answered on stdout.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping

import pandas  # noqa: F401  # what Snakemake loads later
import psutil  # noqa: F401
import smart_open  # noqa: F401
import snakemake.report  # noqa: F401
import yte  # noqa: F401
from snakemake.cli import main


def call(asked: Mapping) -> None:
    """Be ``python -m snakemake``; never returns."""
    status = 1
    try:
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, stream)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[0] = asked["folder"]
        sys.argv = ["snakemake", *asked["arguments"]]
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        call(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
