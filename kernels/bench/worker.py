"""The process that touches the GPU: times cases one after the other and tells what it does, a JSON line each.

A kernel that faults takes the whole CUDA context with it; the parent (``kernels.bench``) then starts another worker
behind the case that did it.
"""

import argparse
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kernels.bench.measure import Prepare, failed, measure, text
from kernels.bench_case import Case

Send = Callable[[Mapping[str, Any]], None]
DEAD = 3  # exit status: the CUDA context is lost


class ContextLostError(RuntimeError):
    """Nothing more can be launched in this process."""


def run_op(
    op: str,
    cases: Iterator[Case],
    group: str | None,
    skip: int,
    prepare: Prepare,
    alive: Callable[[], bool],
    send: Send,
) -> None:
    """Time the cases of one op behind the first ``skip``; errors become rows.

    Raises
    ------
    ContextLostError
        After the row that says so was sent.
    """
    index = -1
    while True:
        index += 1
        send({"event": "building", "op": op, "index": index})
        try:
            case = next(cases, None)
        except Exception as error:
            send(
                {
                    "event": "row",
                    "row": failed(op, group or "", f"case {index} and after", text(error), cases=True),
                }
            )
            case = None
            if not alive():
                raise ContextLostError from error
        if case is None:
            return
        if index < skip or (group is not None and case.group != group):
            continue
        send({"event": "case", "op": op, "index": index, "group": case.group, "name": case.name})
        try:
            row = measure(op, case, prepare)
        except Exception as error:
            row = failed(op, case.group, case.name, text(error))
        del case
        send({"event": "row", "row": row})
        if not alive():
            raise ContextLostError
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    """Run ops; events go to the file descriptor ``--events``."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.worker", description=__doc__)
    parser.add_argument("--op", action="append", required=True, help="folder below kernels/, in this order")
    parser.add_argument("--skip", type=int, default=0, help="cases of the first op that are done")
    parser.add_argument("--group")
    parser.add_argument("--ceilings", action="store_true", help="measure the card first")
    parser.add_argument("--events", type=int, required=True)
    args = parser.parse_args(argv)
    pipe = os.fdopen(args.events, "w", buffering=1)

    def send(event: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(event) + "\n")

    import torch

    from kernels.bench import gpu
    from kernels.toolchain import select

    ptxas = select(blackwell=torch.cuda.get_device_capability() >= (10, 0))
    send({"event": "device", "device": gpu.device(), "versions": gpu.versions(ptxas)})
    if args.ceilings:
        send({"event": "ceilings", "ceilings": gpu.ceilings()})

    def alive() -> bool:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    for number, op in enumerate(args.op):
        try:
            cases = iter(importlib.import_module(f"kernels.{op}.bench").cases(torch.device("cuda", 0)))
        except Exception as error:
            send({"event": "row", "row": failed(op, args.group or "", "all cases", text(error), cases=True)})
            continue
        try:
            run_op(op, cases, args.group, 0 if number else args.skip, gpu.GraphSampler, alive, send)
        except ContextLostError:
            return DEAD
    send({"event": "end"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
