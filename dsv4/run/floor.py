"""The noise floor of a plan: its emulation, and how far FP32 accumulation may move it.

The emulation of a stage that equals the parent's in every bit has the parent's draws too; only
the other stages are drawn anew.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from dsv4.console import main_guard, progress
from dsv4.dump import DumpReader, DumpWriter
from dsv4.floor.accumulation import NAMED, Accumulation, accumulation_of
from dsv4.floor.dither import draw_seed
from dsv4.floor.model import FloorModel
from dsv4.ladder import Variant
from dsv4.model.config import ModelConfig
from dsv4.model.transformer import Layer
from dsv4.run.isolated import Reference, run_isolated
from dsv4.run.modes import first_streams
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import Trace, by_phase, tap_names, write_trace
from dsv4.taps import BY_NAME, PHASES

Key = tuple[str, Layer, str]  # phase, layer, tap
Spread = dict[Key, dict[str, np.ndarray]]
STATISTICS = ("draw_distance", "draw_worst", "draw_changed")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.floor --config C --results R --variant ID``."""
    options = parse(__doc__ or "", arguments, variant=True)
    setup = prepare(options.config, options.results)
    write_floors(setup, setup.config.ladder[options.variant])


def write_floors(setup: Setup, variant: Variant) -> None:
    """Emulate one plan on every prompt and draw the stages that it changes against its parent.

    Which those are is found on one prompt, emulated whole: the shortest that closes a window in
    every layer. On the others only they run, and the rest is the parent's. A variant that sums in
    another way than its parent has no draws in common with it.
    """
    prompts = sorted(setup.tokens, key=lambda prompt: _order(setup, prompt))
    alike = variant.parent and _sums(setup, variant) == _sums(setup, setup.config.ladder[variant.parent])
    stages: set[str] | None = None if alike else all_stages(setup.checkpoint.config)
    for prompt in progress(prompts, f"{variant.id}, noise floor"):
        stages = write_floor(setup, variant, prompt, stages)


def _order(setup: Setup, prompt: str) -> tuple[bool, int]:
    count = len(setup.tokens[prompt])
    return count < 2 * max(setup.checkpoint.config.compress_ratios, default=0), count


def all_stages(config: ModelConfig) -> set[str]:
    """Every stage of a model with these layers."""
    names = {name for taps in tap_names(config, "isolated").values() for name in taps}
    return {BY_NAME[name].stage for name in names}


def write_floor(setup: Setup, variant: Variant, prompt: str, stages: set[str] | None = None) -> set[str]:
    """Emulate one plan on one prompt, draw what it changes, dump both.

    Parameters
    ----------
    stages : set of str or None
        Stages that the plan changes against its parent's; None: find out.

    Returns
    -------
    set of str
        Those stages.
    """
    config = setup.checkpoint.config
    folder = setup.results / "floor"
    with (
        DumpReader(setup.results / "reference" / f"{prompt}.h5", setup.identity(prompt)) as dump,
        DumpReader(folder / variant.parent / f"{prompt}.h5", setup.identity(prompt), keep=True)
        if variant.parent
        else nullcontext() as parent,
    ):
        reference = Reference(dump, config)
        emulation = _emulate(setup, variant, reference, None, None if stages is None else frozenset(stages))
        if stages is None:
            stages = _changed_stages(parent, emulation)
        count = setup.config.floor_draws if stages else 0
        seeds = [draw_seed(setup.config.seed, prompt, draw) for draw in range(count)]
        draws = [_emulate(setup, variant, reference, seed, frozenset(stages)) for seed in seeds]
        spread = _spread(emulation, draws, stages)
        if parent:
            spread |= _inherit(parent, emulation, stages)
        sums = {"sums": asdict(_sums(setup, variant))}
        attrs = setup.attrs(prompt, "floor", variant.id, variant.plan) | sums
        with DumpWriter(folder / variant.id / f"{prompt}.h5", attrs, parent=parent) as writer:
            write_trace(writer, "isolated", emulation, spread)
    return stages


def _sums(setup: Setup, variant: Variant) -> Accumulation:
    """How what the floor is for keeps its sums: the variant's engine, if that says so, or the backend."""
    engine = setup.config.engines[variant.engine] if variant.engine else None
    if engine and engine.sums:
        return NAMED[engine.sums]
    return accumulation_of(setup.backend.kind, setup.backend.capability)


def _emulate(
    setup: Setup, variant: Variant, reference: Reference, seed: int | None, stages: frozenset[str] | None
) -> Trace:
    config = setup.checkpoint.config
    model = FloorModel(config, setup.checkpoint.weights, variant.plan, seed, _sums(setup, variant))
    trace = Trace(config, reference.rows, tap_names(config, "isolated"))
    run_isolated(model, reference, first_streams(setup, reference), trace.at, stages)
    return trace


def _changed_stages(parent: DumpReader | None, emulation: Trace) -> set[str]:
    """Stages whose emulation differs from the parent's in any bit; all without a parent."""
    if parent is None:
        return {BY_NAME[name].stage for _, name in emulation.taps()}
    return {
        BY_NAME[name].stage
        for (phase, layer, name), values in _by_phase(emulation).items()
        if not np.array_equal(parent.get("isolated", phase, layer, name), values, equal_nan=True)
    }


def _inherit(parent: DumpReader, emulation: Trace, stages: set[str]) -> Spread:
    """Put the parent's values into the emulation where the plan changes nothing; return their draws."""
    known: Spread = {}
    found: dict[tuple[Layer, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for phase in PHASES:
        for layer in parent.layers("isolated", phase):
            for name in parent.taps("isolated", phase, layer):
                if BY_NAME[name].stage in stages:
                    continue
                by_entry = BY_NAME[name].axis == "entry"
                rows = parent.rows("isolated", phase)
                at = parent.entry_positions("isolated", phase, layer) if by_entry else rows
                values = parent.get("isolated", phase, layer, name)
                found.setdefault((layer, name), []).append((at, values))
                attrs = parent.dataset_attrs("isolated", phase, layer, name)
                known[phase, layer, name] = {key: attrs[key] for key in STATISTICS}
    emulation.values.update(found)
    return known


def _by_phase(trace: Trace) -> dict[Key, np.ndarray]:
    split: dict[Key, np.ndarray] = {}
    for layer, name in trace.taps():
        for phase, positions, values in by_phase(*trace.get(layer, name), trace.rows.prompt):
            if len(positions):
                split[phase, layer, name] = values
    return split


def _spread(emulation: Trace, draws: Sequence[Trace], stages: set[str]) -> Spread:
    """Statistics of every draw against the emulation, for the taps of ``stages``."""
    truth, drawn = _by_phase(emulation), [_by_phase(draw) for draw in draws]
    return {
        key: {name: np.array([statistics[name] for statistics in found]) for name in STATISTICS}
        for key, values in truth.items()
        if BY_NAME[key[2]].stage in stages
        for found in [[distance(draw[key], values, BY_NAME[key[2]].kind) for draw in drawn]]
    }


def distance(draw: np.ndarray, truth: np.ndarray, kind: str) -> Mapping[str, Any]:
    """Relative L2 distance (lse: largest difference), the worst row's, and the share of elements changed.

    Parameters
    ----------
    draw, truth : (rows, ...) of one tap.
    kind : :attr:`dsv4.taps.Tap.kind`.
    """
    changed = float(np.mean(draw != truth)) if truth.size else 0.0
    if kind in ("ids", "bytes"):
        return {"draw_distance": changed, "draw_worst": changed, "draw_changed": changed}
    one, other = (
        np.where(np.isfinite(x), x, 0.0).reshape(len(x), -1).astype(np.float64) for x in (draw, truth)
    )
    gap = one - other
    if kind == "lse":
        far = float(np.abs(gap).max(initial=0.0))
        return {"draw_distance": far, "draw_worst": far, "draw_changed": changed}
    size = np.linalg.norm(other, axis=1)
    rows = np.divide(np.linalg.norm(gap, axis=1), size, out=np.zeros(len(size)), where=size > 0)
    whole = float(np.linalg.norm(size))
    return {
        "draw_distance": float(np.linalg.norm(gap)) / whole if whole else 0.0,
        "draw_worst": float(rows.max(initial=0.0)),
        "draw_changed": changed,
    }


if __name__ == "__main__":
    main_guard(main)
