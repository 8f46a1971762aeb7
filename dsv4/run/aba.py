"""A/B/A: before a culprit is named, repeat the change, revert it, and apply it again.

On the prompt and tap that failed, isolated mode runs three more times: with the variant's
numerics, with its parent's, and with the variant's again. Only a deviation that is there, goes
and comes back belongs to the change.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsv4.console import main_guard
from dsv4.dump import DumpReader
from dsv4.ladder import LadderError, Variant
from dsv4.model.transformer import Layer
from dsv4.run.isolated import Reference, run_isolated
from dsv4.run.modes import first_streams
from dsv4.run.setup import Setup, prepare
from dsv4.run.trace import Trace, tap_names
from dsv4.taps import BY_NAME, MODEL, PHASES


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--config", "--results"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--variant", "--layer", "--tap"):
        parser.add_argument(name, required=True)
    parser.add_argument("--prompt", help="the first one of the prompt file, if not given")
    options = parser.parse_args(arguments)
    setup = prepare(options.config, options.results)
    layer: Layer = MODEL if options.layer == MODEL else int(options.layer)
    prompt = options.prompt or next(iter(setup.tokens))
    sys.stdout.write(json.dumps(confirm(setup, options.variant, prompt, layer, options.tap)) + "\n")


def confirm(setup: Setup, variant_id: str, prompt: str, layer: Layer, tap: str) -> dict[str, object]:
    """Repeat, revert, re-apply one variant at one tap.

    Returns
    -------
    dict
        ``repeat``, ``reapply``: same bits as the variant's dump; ``revert``: same bits as the
        parent's dump; ``distance``: relative L2 to the reference of the variant and of the
        parent; ``confirmed``: the deviation belongs to the change.

    Raises
    ------
    LadderError
        The bottom of the ladder: there is nothing to revert to.
    EngineError
        An engine did not give it again.
    """
    variant = setup.config.ladder[variant_id]
    if variant.parent is None:
        raise LadderError(f"{variant_id} is the bottom of the ladder: there is nothing to revert to")
    parent = setup.config.ladder[variant.parent]
    with DumpReader(setup.results / "reference" / f"{prompt}.h5", setup.identity(prompt)) as dump:
        reference = Reference(dump, setup.checkpoint.config)
        runs = [_run(setup, reference, rung, prompt, layer, tap) for rung in (variant, parent, variant)]
        name = BY_NAME[tap].reference
        truth = (
            np.concatenate([dump.get("compounded", phase, layer, name) for phase in PHASES]) if name else None
        )
    stored = _stored(setup, variant_id, prompt, layer, tap)
    before = _stored(setup, parent.id, prompt, layer, tap)
    repeat, revert, reapply = _same(runs[0], stored), _same(runs[1], before), _same(runs[2], stored)
    return {
        "repeat": repeat,
        "revert": revert,
        "reapply": reapply,
        "changed": not _same(runs[0], runs[1]),
        "distance": None if truth is None else [distance(run, truth) for run in runs[:2]],
        "confirmed": repeat and reapply and revert and not _same(runs[0], runs[1]),
    }


def _run(
    setup: Setup, reference: Reference, variant: Variant, prompt: str, layer: Layer, tap: str
) -> np.ndarray:
    if variant.engine is not None:
        from dsv4.engine.variant import one_tap

        return one_tap(setup, variant, prompt, layer, tap)
    if variant.commit is not None:
        from dsv4.commits import rung

        return rung.one_tap(setup, variant, prompt, layer, tap)
    config = setup.checkpoint.config
    kept = {key: (tap,) if key == layer else () for key in tap_names(config, "isolated")}
    trace = Trace(config, reference.rows, kept)
    model = setup.variant_model(variant.plan)
    run_isolated(model, reference, first_streams(setup, reference), trace.at)
    return trace.get(layer, tap)[1]


def _stored(setup: Setup, variant: str, prompt: str, layer: Layer, tap: str) -> np.ndarray:
    with DumpReader(setup.results / "variants" / variant / f"{prompt}.h5", setup.identity(prompt)) as dump:
        phases = [phase for phase in PHASES if dump.has("isolated", phase, layer, tap)]
        return np.concatenate([dump.get("isolated", phase, layer, tap) for phase in phases])


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=True)


def distance(values: np.ndarray, truth: np.ndarray) -> float | None:
    """Relative L2 to the reference, of what is finite; None for another shape."""
    if values.shape != truth.shape:
        return None
    one, other = (np.where(np.isfinite(x), x, 0).astype(np.float64) for x in (values, truth))
    size = float(np.linalg.norm(other))
    return float(np.linalg.norm(one - other)) / size if size else None


if __name__ == "__main__":
    main_guard(main)
