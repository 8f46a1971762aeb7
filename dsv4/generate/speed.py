"""Tokens a second of generation: prefill batched beside one by one, decode steps eager beside one CUDA graph.

Prompts are read from the configuration, of unequal length; sequence i of a batch begins with prompt i modulo their
number. What is compared runs in turns in one process. Without a GPU there is no graph, and refs emulate: the numbers
say what batching saves there, and nothing of a device.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dsv4.console import main_guard, progress
from dsv4.files import write_json
from dsv4.generate.steps import steps_of
from dsv4.identity import git_state, versions
from dsv4.model.prefill import prefill
from dsv4.model.transformer import Transformer, greedy
from dsv4.run.setup import Setup, prepare
from kernels.bench.statistics import order, spread

ROUNDS = 5
Run = Callable[[], float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.generate.speed [--rung ID] [--batches 1 64] [--tokens 128] [--out FILE]``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="the audit's config.yaml")
    parser.add_argument("--rung", default="B4_head", help="whose plan is run (default: B4_head)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="sequences of a decode batch")
    parser.add_argument("--tokens", type=int, default=128, help="decode steps of a timed run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed runs of each")
    parser.add_argument("--out", type=Path, help="a JSON file beside what is printed")
    options = parser.parse_args(arguments)
    setup = prepare(options.config, Path())
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = shlex.join(["python", "-m", "dsv4.generate.speed", *given])
    found = head(setup, options.rung, options.rounds)
    found["command"] = command
    print(heading(found), flush=True)
    for row_ in measured(setup, options.rung, options.batches, options.tokens, options.rounds):
        found["rows"].append(row_)
        print(table_lines(row_), flush=True)
        if options.out:
            write_json(options.out, found)


def head(setup: Setup, rung: str, rounds: int) -> dict[str, Any]:
    """What is known before a measurement: device, date, commit, versions, rung, prompts' lengths."""
    commit, dirty = git_state()
    return {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setup.backend.name,
        "backend": setup.backend.kind,
        "commit": commit,
        "dirty": dirty,
        "versions": versions(),
        "rung": rung,
        "rounds": rounds,
        "prompts": [len(prompt) for prompt in setup.tokens.values()],
        "rows": [],
    }


def measured(
    setup: Setup, rung: str, batches: Sequence[int], tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Tokens a second of one rung's model, each a spread over ``rounds``; a row as soon as it is measured.

    Yields
    ------
    dict
        ``what`` (prefill, decode), ``batch``, ``tokens`` of a run, and ``ways``: how -> spread.

    Raises
    ------
    LadderError
        No such rung.
    NoKernelError
        The backend is kernels, and the plan, a size or a stored format has none.
    """
    plan = setup.config.ladder[rung].plan
    model = setup.variant_model(plan)
    graphed = setup.variant_model(plan) if model.device.type == "cuda" else None
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in setup.tokens.values()]
    yield row("prefill", len(prompts), sum(map(len, prompts)), prefill_ways(model, prompts), rounds)
    for batch in progress([str(size) for size in batches], "batch"):
        begun = list(islice(cycle(prompts), int(batch)))
        ways = decode_ways(model, graphed, begun, tokens, rounds)
        yield row("decode", len(begun), len(begun) * tokens, ways, rounds)


def row(what: str, batch: int, tokens: int, ways: Mapping[str, Run], rounds: int) -> dict[str, Any]:
    """Time each way ``rounds`` times in turns, after one run that is not counted (it compiles)."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for turn in range(rounds):
        for name in order(list(ways), turn):
            taken[name].append(tokens / ways[name]())
    return {
        "what": what,
        "batch": batch,
        "tokens": tokens,
        "ways": {name: spread(samples) for name, samples in taken.items()},
    }


def prefill_ways(model: Transformer, prompts: Sequence[Tensor]) -> dict[str, Run]:
    """Reading all prompts in shared passes, and one after the other; each gives its seconds."""

    def batched() -> None:
        prefill(model, [model.new_cache() for _ in prompts], prompts)

    def one_by_one() -> None:
        for prompt in prompts:
            prefill(model, [model.new_cache()], [prompt])

    return {"batched": _timed(model, batched), "one by one": _timed(model, one_by_one)}


def decode_ways(
    model: Transformer, graphed: Transformer | None, prompts: Sequence[Tensor], steps: int, rounds: int
) -> dict[str, Run]:
    """Greedy decode behind prompts that were read: ``steps`` more tokens of each, and the seconds that they took.

    Each run goes on where the one before ended, ``rounds + 1`` in all. Neither prefill nor a graph's capture is
    counted: a server makes a graph once. ``graphed`` is the same model once more, if there is a device to capture on: a
    graph's pools of pages may not grow, and those of eager steps do.
    """

    def begun(of: Transformer) -> tuple[list[Any], Tensor]:
        caches = [of.new_cache() for _ in prompts]
        return caches, greedy(prefill(of, caches, prompts))

    def taken(step: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Run:
        def steps_taken() -> None:
            nonlocal step
            for _ in range(steps):
                step = greedy(logits_of(step))

        return _timed(model, steps_taken)

    caches, tokens = begun(model)
    ways = {"eager": taken(tokens, lambda step: model.forward(caches, list(step.split(1))))}
    if graphed is not None:
        fixed, tokens = begun(graphed)
        ways["CUDA graph"] = taken(tokens, steps_of(graphed, fixed, steps * (rounds + 1)))
    return ways


def _timed(model: Transformer, run: Callable[[], None]) -> Run:
    """Seconds of a run, up to the device's last launch."""

    def seconds() -> float:
        _wait(model)
        start = perf_counter()
        run()
        _wait(model)
        return perf_counter() - start

    return seconds


def _wait(model: Transformer) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def heading(found: Mapping[str, Any]) -> str:
    """What was measured, with device, date, versions and command, and a Markdown table's first two lines."""
    versions_ = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        "# Generation: tokens a second\n\n"
        f"{found['rung']} on {found['device']} ({found['backend']}), {found['date']}, commit {found['commit'][:7]},"
        f" {versions_}; prompts of {', '.join(map(str, found['prompts']))} tokens; tokens a second, median"
        f" (quartiles) of {found['rounds']} runs in turns; `{found['command']}`\n\n"
        "| what | sequences | tokens | how | tokens/s | against the first |\n"
        "| --- | ---: | ---: | --- | ---: | ---: |"
    )


def table_lines(row_: Mapping[str, Any]) -> str:
    """A line of the table for each way of a row."""
    first = next(iter(row_["ways"].values()))["median"]
    return "\n".join(
        f"| {row_['what']} | {row_['batch']} | {row_['tokens']} | {how} | {rate['median']:.4g}"
        f" ({rate['q1']:.4g}-{rate['q3']:.4g}) | {rate['median'] / first:.2f}x |"
        for how, rate in row_["ways"].items()
    )


if __name__ == "__main__":
    main_guard(main)
