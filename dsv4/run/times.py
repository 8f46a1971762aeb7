"""Time of one decode step on kernels: every judged variant beside its parent, in turns, in one process, as CUDA graphs.

All prompts are one batch. The step is one graph; each stage, over all layers, is timed by graphs of its own, whose
launches and inputs are the same but whose sum is more than the step: what one stage ends the next cannot overlap.
"""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from dsv4.backend.paths import NoKernelError
from dsv4.console import main_guard, progress
from dsv4.files import write_json
from dsv4.identity import versions
from dsv4.judge.times import FILE
from dsv4.plan import Plan
from dsv4.run.setup import Setup, prepare
from kernels.bench.statistics import order, ratio, spread

ROUNDS = 41
STAGE_ROUNDS = 15
HELD = 3  # models on the device at a time: a variant's, its parent's, and one that the next may stand on

Run = Callable[[], object]
Clock = Callable[[Run], float]


@dataclass(frozen=True)
class Replays:
    """A decode step ready to be run again, whole and stage by stage (a stage: of all layers)."""

    step: Run
    stages: Mapping[str, Run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.times --config C --results R --variants A B``; writes ``times.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the audit's config.yaml")
    parser.add_argument("--results", type=Path, required=True, help="results/<run>")
    parser.add_argument("--variants", nargs="*", default=[], help="rungs of the ladder, in its order")
    options = parser.parse_args(arguments)
    setup = prepare(options.config, options.results)
    write_json(options.results / FILE, measured(setup, options.variants))


def measured(setup: Setup, names: Sequence[str]) -> dict[str, Any]:
    """Content of ``times.json``: the device, the batch, and each variant's times or why it has none."""
    from kernels.bench.gpu import elapsed_us

    @lru_cache(maxsize=HELD)
    def replays(plan: Plan) -> Replays:
        gc.collect()  # what the last model held
        return replays_of(setup, plan)

    found: dict[str, Any] = {}
    for name in progress(names, "time of a step"):
        rung = setup.config.ladder[name]
        parent = setup.config.ladder[rung.parent] if rung.parent else None
        if setup.backend.capability is None:
            found[name] = {"why_not": f"{setup.backend.name} is no device to time"}
            continue
        try:
            sides = replays(rung.plan), replays(parent.plan) if parent else None
        except NoKernelError as error:
            found[name] = {"why_not": str(error)}
            continue
        found[name] = {"parent": rung.parent} | beside(*sides, elapsed_us)
    backend = setup.backend
    return {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": backend.name,
        "versions": versions(),
        "sequences": [len(tokens) for tokens in setup.tokens.values()],
        "rounds": ROUNDS,
        "variants": found,
    }


def replays_of(setup: Setup, plan: Plan) -> Replays:
    """Prefill all prompts and capture the step that follows.

    Raises
    ------
    NoKernelError
        The plan has no kernels.
    """
    from dsv4.backend.step import DecodeStep

    model = setup.variant_model(plan)
    prompts = [torch.tensor(tokens, dtype=torch.int64) for tokens in setup.tokens.values()]
    caches = [model.new_cache() for _ in prompts]
    logits = model.forward(caches, prompts)
    last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    step = DecodeStep(model, caches, steps=1)  # type: ignore[arg-type]
    step.tokens.copy_(logits[last].argmax(-1))
    step.replay()
    return Replays(
        step=step.replay,
        stages={stage: partial(_all, graphs) for stage, graphs in step.by_stage().items()},
    )


def _all(graphs: Sequence[Any]) -> None:
    for graph in graphs:
        graph.replay()


def beside(own: Replays, parent: Replays | None, clock: Clock) -> dict[str, Any]:
    """Microseconds of a variant's step and stages and of its parent's, sampled in turns.

    Returns
    -------
    dict
        ``step_us``, ``parent_us``, ``ratio`` (spreads; the last two None without a parent), and ``stages``: stage ->
        [median, parent's median or None], of all layers together.
    """
    sides = {"own": own} | ({"parent": parent} if parent else {})
    taken = in_turns({name: side.step for name, side in sides.items()}, clock, ROUNDS)
    stages: dict[str, list[float | None]] = {}
    for stage in dict.fromkeys(stage for side in sides.values() for stage in side.stages):
        runs = {name: side.stages[stage] for name, side in sides.items() if stage in side.stages}
        samples = in_turns(runs, clock, STAGE_ROUNDS)
        # a stage that launches nothing takes no time: what it writes was computed in a fused launch before it
        medians = {name: spread(samples[name])["median"] if name in samples else 0.0 for name in sides}
        stages[stage] = [medians["own"], medians.get("parent")]
    return {
        "step_us": spread(taken["own"]),
        "parent_us": spread(taken["parent"]) if parent else None,
        "ratio": ratio(taken["own"], taken["parent"]) if parent else None,
        "stages": stages,
    }


def in_turns(runs: Mapping[str, Run], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Samples of each run, in microseconds; in every round each runs once, and none is always first."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        clock(run)
    for turn in range(rounds):
        for name in order(list(runs), turn):
            taken[name].append(clock(runs[name]))
    return taken


if __name__ == "__main__":
    main_guard(main)
