"""A rung that runs on an engine: its job, its answer, and the dumps that are judged as any other's."""

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from dsv4.dump import DumpWriter
from dsv4.engine.answer import Answer, read_answer
from dsv4.engine.job import Ask, Job, write_job
from dsv4.engine.process import run
from dsv4.engine.spec import Engine, EngineError
from dsv4.identity import git_state
from dsv4.ladder import Variant
from dsv4.model.config import CSA_RATIO
from dsv4.model.transformer import Layer
from dsv4.run.isolated import Reference
from dsv4.run.setup import Setup
from dsv4.run.trace import by_phase, storable
from dsv4.taps import BY_NAME, MODEL, MODES, PHASES

Start = Callable[[Engine, Path], None]
ERROR = "error"  # attribute of a dump that holds nothing else: why there is nothing to judge


def write_engine_variant(setup: Setup, variant: Variant, start: Start = run) -> None:
    """Run a rung's engine on every prompt and dump what it gave.

    What an engine did wrong is a result: dumps that hold the reason alone, for which the gate says
    ``cannot_measure``. The job's folder is then kept, so that it can be run again by hand.
    ``start``: see :func:`ask_engine`.
    """
    engine = engine_of(setup, variant)
    try:
        job, answer = ask_engine(setup, engine, variant, Ask(), start)
    except EngineError as error:
        for prompt in setup.tokens:
            with _writer(setup, variant, prompt, {ERROR: str(error)}):
                pass
        return
    about = _attrs(engine, answer)
    for prompt, reference in job.references.items():
        reached = _exercised(setup, answer, prompt, reference) | answer.about.get("exercised", {})
        with _writer(setup, variant, prompt, about | {"exercised": reached}) as writer:
            for mode in MODES:
                _write(setup, writer, answer, mode, prompt, reference)


def engine_of(setup: Setup, variant: Variant) -> Engine:
    """Return the engine that a rung names."""
    assert variant.engine is not None
    return setup.config.engines[variant.engine]


def ask_engine(
    setup: Setup, engine: Engine, variant: Variant, ask: Ask, start: Start = run
) -> tuple[Job, Answer]:
    """Write a job, have it answered, check the answer, and remove the folder.

    Parameters
    ----------
    start : runs the engine on a job's folder.

    Raises
    ------
    EngineError
        See :func:`dsv4.engine.process.run` and :func:`dsv4.engine.answer.read_answer`.
    """
    folder = setup.results / "engines" / variant.id
    job = write_job(setup, variant, folder, ask)
    if engine.dump is None:
        start(engine, folder)
    answer = read_answer(engine, job, setup.checkpoint.config, engine.dump)
    rmtree(folder)
    return job, answer


def one_tap(setup: Setup, variant: Variant, prompt: str, layer: Layer, tap: str) -> np.ndarray:
    """Have one layer's isolated taps made again, for repeat, revert, re-apply.

    Raises
    ------
    EngineError
        See :func:`ask_engine`; or it gave another set of taps than the first time.
    """
    ask = Ask(modes=("isolated",), prompts=(prompt,), layers=(layer,))
    _, answer = ask_engine(setup, engine_of(setup, variant), variant, ask)
    key = "isolated", prompt, layer, tap
    if key not in answer.taps:
        raise EngineError(
            f"engine {variant.engine}: {'/'.join(map(str, key))} was given before, but not again"
        )
    return answer.taps[key]


def _writer(setup: Setup, variant: Variant, prompt: str, more: dict[str, Any]) -> DumpWriter:
    folder = setup.results / "variants"
    parent = folder / variant.parent / f"{prompt}.h5" if variant.parent else None
    attrs = setup.attrs(prompt, "variant", variant.id, variant.plan)
    of_engine = {
        "backend": "engine",
        "engine": variant.engine,
        "launches": {},
        "label": f"engine {variant.engine}",
    }
    return DumpWriter(folder / variant.id / f"{prompt}.h5", attrs | of_engine | more, parent=parent)


def _attrs(engine: Engine, answer: Answer) -> dict[str, Any]:
    """What a dump says of the engine in place of our own code."""
    device = str(answer.about.get("device", "a device that it does not name"))
    found: dict[str, Any] = {
        "label": f"engine {engine.name} on {device}",
        "device": device,
        "declared_missing": list(engine.missing),
        "batched_prefill": _batched(answer),
    }
    if engine.dump is None:
        found["commit"], found["dirty"] = git_state(engine.folder)
    else:
        found |= {"commit": str(answer.about.get("version", "unknown")), "dirty": False}
    return found


def _batched(answer: Answer) -> dict[str, Any]:
    """How a prefill of two prompts at once compares with each alone; empty for an engine that has none."""
    if not answer.batched:
        return {}
    equal, worst = True, 0.0
    for prompt, batched in answer.batched.items():
        single = answer.taps["compounded", prompt, MODEL, "logits"][: len(batched)]
        equal &= np.array_equal(batched, single, equal_nan=True)
        worst = max(worst, float(np.linalg.norm(batched - single) / np.linalg.norm(single)))
    entry = str(answer.about["batched_prefill"])
    return {"entry_point": entry, "prompts": list(answer.batched), "bit_equal": bool(equal), "rel_l2": worst}


def _exercised(setup: Setup, answer: Answer, prompt: str, reference: Reference) -> dict[str, Any]:
    """What follows from the rows that were asked and the streams that came back; the engine may say more."""
    config, rows = setup.checkpoint.config, reference.rows.all
    entries = (rows + 1) // CSA_RATIO if CSA_RATIO in config.compress_ratios else rows[:0]
    streams = [
        values
        for (_, name, _, tap), values in answer.taps.items()
        if (name, tap) == (prompt, "streams") and values.size
    ]
    peaks = [float(np.abs(np.where(np.isfinite(values), values, 0.0)).max()) for values in streams]
    return {
        "csa_rows_over_topk": int((entries > config.index_topk).sum()),
        "rows_over_window": int((rows >= config.sliding_window).sum()),
        **({"residual_absmax": peaks} if peaks else {}),
    }


def _write(
    setup: Setup, writer: DumpWriter, answer: Answer, mode: str, prompt: str, reference: Reference
) -> None:
    rows = reference.rows
    for phase, positions in zip(PHASES, (rows.prefill, rows.decode), strict=True):
        writer.rows(mode, phase, positions)
    for (of_mode, of_prompt, layer, name), values in answer.taps.items():
        if (of_mode, of_prompt) != (mode, prompt):
            continue
        positions = _positions(setup, reference, layer, name)
        for phase, at, part in by_phase(positions, values, rows.prompt):
            entry = BY_NAME[name].axis == "entry"
            if entry and not len(at):
                continue
            stored, dtype = storable(part, BY_NAME[name])
            writer.put(mode, phase, layer, name, stored, dtype, entry_positions=at if entry else None)


def _positions(setup: Setup, reference: Reference, layer: Layer, name: str) -> np.ndarray:
    """Token position of each line of a tap."""
    if BY_NAME[name].axis == "row":
        return reference.rows.all
    ratio = setup.checkpoint.config.compress_ratios[int(layer)]
    return (reference.rows.entries(ratio) + 1) * ratio - 1
