"""A rung of the ladder that runs on a commit's own code."""

from pathlib import Path

import numpy as np

from dsv4.commits import history
from dsv4.commits.adopt import RunError
from dsv4.commits.branch import Job, repository
from dsv4.commits.confirm import tap_of
from dsv4.commits.run import run_and_adopt, run_tree
from dsv4.commits.tree import checked_out
from dsv4.dump import DumpWriter
from dsv4.ladder import Variant
from dsv4.model.transformer import Layer
from dsv4.run.setup import Setup


def write_commit_variant(setup: Setup, variant: Variant) -> None:
    """Run the commit of a rung on every prompt, and put its dumps where the rung's are looked for.

    That it does not run is a result: dumps that hold the reason alone, for which the gate says
    ``cannot_measure``.

    Raises
    ------
    ConfigError
        No such commit.
    """
    job, folder = _job(setup, variant), setup.results / "variants" / variant.id
    try:
        run_and_adopt(job, folder)
    except RunError as error:
        _write_reason(setup, variant, folder, f"{variant.commit} does not run: {error}")


def _write_reason(setup: Setup, variant: Variant, folder: Path, reason: str) -> None:
    for prompt in setup.tokens:
        attrs = setup.attrs(prompt, "variant", variant.id, variant.plan) | {"error": reason}
        with DumpWriter(folder / f"{prompt}.h5", attrs):
            pass


def one_tap(setup: Setup, variant: Variant, prompt: str, layer: Layer, tap: str) -> np.ndarray:
    """Run a rung's commit again on one prompt: one isolated tap, for repeat, revert, re-apply.

    Raises
    ------
    RunError, DumpError
        It does not run again, or gives other taps.
    """
    job = _job(setup, variant)
    with checked_out(job.repo, job.sha, job.results) as room:
        return tap_of(run_tree(job, room, [prompt]) / f"{prompt}.h5", layer, tap)


def _job(setup: Setup, variant: Variant) -> Job:
    assert variant.commit is not None
    repo = repository(setup.config)
    sha = history.resolve(repo, variant.commit)
    return Job(config=setup.config, results=setup.results, repo=repo, sha=sha, rung=variant, name=variant.id)
