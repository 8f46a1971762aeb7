"""Run a commit of another project: the engine's command, started in the commit's tree."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsv4.commits.branch import Job
from dsv4.engine.variant import write_engine_variant
from dsv4.ladder import Ladder
from dsv4.run.setup import prepare


def run_engine(job: Job, room: Path, prompts: Sequence[str]) -> None:
    """Write the dumps of some prompts below ``room/results``; what the engine did wrong stands in them."""
    name = job.config.commits.engine
    assert name is not None
    engine = replace(job.config.engines[name], repo=(room / "tree").resolve(), dump=None)
    variant = replace(job.rung, parent=None, change={}, engine=name)
    setup = prepare(job.config.path, room / "results")
    config = replace(job.config, engines={name: engine}, ladder=Ladder.of([variant]))
    tokens = {prompt: setup.tokens[prompt] for prompt in prompts}
    write_engine_variant(replace(setup, config=config, tokens=tokens), variant)
