"""A foreign reference beside ours: every op on the same inputs, how far apart, and whether that is rounding.

Verdicts stand on our reference, which isolated mode needs at every row. The foreign one says whether
it can be believed: ``reference_check.json`` holds an agreement table and one sentence, the last rule
fails the audit if the two differ by more than :data:`dsv4.engine.spec.ONE_BF16` at any op.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dsv4.console import main_guard
from dsv4.dump import DumpReader
from dsv4.engine.answer import Answer
from dsv4.engine.job import Ask, Job, of_reference
from dsv4.engine.process import run
from dsv4.engine.spec import EngineError, ForeignReference, declares
from dsv4.engine.variant import Start, ask_engine
from dsv4.files import write_json
from dsv4.judge.evaluate import place
from dsv4.judge.reference_check import FILE, Verdict
from dsv4.model.transformer import Layer
from dsv4.run.setup import Setup, parse, prepare
from dsv4.taps import BY_NAME, MODEL, PHASES

STORED = tuple(
    tap.name for tap in BY_NAME.values() if not tap.replay
)  # a reference has no formats of its own
Place = tuple[str, Layer, str]  # mode, layer, tap


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.engine.cross_check --config C --results R``."""
    options = parse(main.__doc__ or "", arguments)
    setup = prepare(options.config, options.results)
    if setup.config.reference:
        write_json(setup.results / FILE, cross_check(setup, setup.config.reference))


def cross_check(setup: Setup, foreign: ForeignReference, start: Start = run) -> dict[str, Any]:
    """Compare a foreign reference with ours.

    Returns
    -------
    dict
        ``of`` (trained or plain), ``verdict``, ``text``, ``bound``, ``missing`` (taps that it declares), and
        ``taps``: mode, layer, tap, ``rel_l2`` over all prompts (of choices: share of rows that chose others).
        Isolated taps are held to the bound; free runs part where choices are near ties, so theirs are shown.
    """
    engine = replace(foreign.engine, missing=(*foreign.engine.missing, *STORED))
    shared = {"of": foreign.of, "bound": foreign.bound, "missing": list(foreign.engine.missing)}
    try:
        job, answer = ask_engine(setup, engine, of_reference(), Ask(), start)
        lost = undeclared(setup, job, answer, engine.missing)
        if lost:
            raise EngineError(
                f"the foreign reference did not give {', '.join(lost[:3])} and {len(lost)} taps in all; give them, or"
                " declare them in reference.missing"
            )
    except EngineError as error:
        return shared | {"verdict": Verdict.CANNOT_MEASURE, "text": f"reference: ours; {error}", "taps": []}
    table = agreement(setup, foreign.of, job, answer)
    said, text = judge(table, foreign)
    return shared | {"verdict": said, "text": text, "device": answer.about.get("device"), "taps": table}


def undeclared(setup: Setup, job: Job, answer: Answer, missing: Sequence[str]) -> list[str]:
    """Places where a tap is neither given nor declared."""
    return [
        f"{mode}/{prompt}/{layer}/{name}"
        for mode in job.modes
        for prompt in job.shapes
        for layer, names in job.taps(setup.checkpoint.config, mode)
        for name in names
        if (mode, prompt, layer, name) not in answer.taps and not declares(missing, mode, layer, name)
    ]


def agreement(setup: Setup, of: str, job: Job, answer: Answer) -> list[dict[str, Any]]:
    """One line a tap of a layer and mode, over all prompts."""
    squares: dict[Place, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for (mode, prompt, layer, name), values in answer.taps.items():
        squares[mode, layer, name] += _squares(name, values, _ours(setup, of, job, mode, prompt, layer, name))
    return [
        {"mode": mode, "layer": layer, "tap": name, "rel_l2": _share(name, *found)}
        for (mode, layer, name), found in squares.items()
    ]


def _ours(setup: Setup, of: str, job: Job, mode: str, prompt: str, layer: Layer, name: str) -> np.ndarray:
    """Our own reference's values: ``trained`` on its own inputs is its free run."""
    if of == "trained":
        return job.references[prompt].judged(layer, name).numpy()
    with DumpReader(setup.results / "plain" / f"{prompt}.h5", setup.identity(prompt)) as dump:
        phases = [phase for phase in PHASES if dump.has(mode, phase, layer, name)]
        found = [dump.get(mode, phase, layer, name) for phase in phases]
    return np.concatenate(found) if found else job.references[prompt].judged(layer, name).numpy()


def _squares(name: str, theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Squared distance and squared size; of choices: rows that chose others, and rows."""
    if BY_NAME[name].kind == "ids":
        other = np.sort(theirs, axis=-1) != np.sort(ours, axis=-1)
        return np.array([other.any(-1).sum(), len(ours)], float)
    seen = np.isfinite(ours)
    if not np.array_equal(seen, np.isfinite(theirs)):
        return np.array([np.inf, 1.0])
    one, other = (np.where(seen, x, 0.0).astype(np.float64) for x in (theirs, ours))
    return np.array([((one - other) ** 2).sum(), (other**2).sum()])


def _share(name: str, distance: float, size: float) -> float | None:
    """Relative L2, or share of rows; None: not finite in other places than ours."""
    if not np.isfinite(distance):
        return None
    ratio = distance / size if size else float(distance > 0)
    return float(ratio if BY_NAME[name].kind == "ids" else np.sqrt(ratio))


def judge(table: Sequence[dict[str, Any]], foreign: ForeignReference) -> tuple[Verdict, str]:
    """Verdict on an agreement table and its sentence: the first op beyond the bound, else the farthest."""
    held = [line for line in table if line["mode"] == "isolated" and BY_NAME[line["tap"]].kind != "ids"]
    whose = f"reference: ours ({foreign.of})"
    if not held:
        return Verdict.CANNOT_MEASURE, f"{whose}; the foreign one gave no tap in isolated mode to compare"
    sizes = [np.inf if line["rel_l2"] is None else line["rel_l2"] for line in held]
    beyond = [line for line, size in zip(held, sizes, strict=True) if size > foreign.bound]
    line = beyond[0] if beyond else held[int(np.argmax(sizes))]
    at = place(-1 if line["layer"] == MODEL else int(line["layer"]), line["tap"])
    far = "not finite in the same places" if line["rel_l2"] is None else f"relative L2 {line['rel_l2']:.2g}"
    if beyond:
        text = (
            f"the foreign one differs, first in {at}: {far}, over {foreign.bound:.2g}, one BF16 rounding each"
        )
        return (
            Verdict.DIFFERS,
            f"{whose}; {text}; find out which is wrong before a verdict is believed",
        )
    return Verdict.AGREES, f"{whose}; the foreign one agrees at {len(held)} taps, farthest in {at}: {far}"


if __name__ == "__main__":
    main_guard(main)
