"""What an engine gave back: read, merged over its ranks, and checked before anything is judged."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.engine.job import Job
from dsv4.engine.spec import Engine, EngineError, declares
from dsv4.engine.tap_writer import SCHEMA, read_tensors
from dsv4.exercised import EXERCISED
from dsv4.model.config import ModelConfig
from dsv4.model.transformer import Layer
from dsv4.taps import BY_NAME, MODEL

DTYPES = {"ids": (np.int32, np.int64), "bytes": (np.uint8,)}
FLOATS = (np.float32, np.float16)  # BF16 is read as float32
ABOUT = ("device", "version", "batched_prefill", "exercised")
BATCHED = "batched"  # beside the modes: a prefill of several prompts at once
WRITER = "dsv4/engine/tap_writer.py"
Key = tuple[str, str, Layer, str]  # mode, prompt, layer, tap


@dataclass(frozen=True)
class Answer:
    """A checked answer.

    Attributes
    ----------
    taps : (mode, prompt, layer, tap) -> values: float32, int32 or uint8, non-finite ones as they came.
    about : what the engine says of itself, see :data:`ABOUT`.
    batched : prompt -> logits of its judged prefill rows, prefilled in a batch.
    """

    taps: dict[Key, np.ndarray] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    batched: dict[str, np.ndarray] = field(default_factory=dict)


def read_answer(engine: Engine, job: Job, config: ModelConfig, folder: Path | None = None) -> Answer:
    """Read and check what stands in ``out/`` of a job, or of the folder of a finished dump.

    Raises
    ------
    EngineError
        A manifest that is missing or answers another job; a file, name, shape or dtype that was
        not asked for; ranks that differ where no axis is declared. Names tap, expected, and got.
    """
    out = (folder or job.folder) / "out"
    ranks = [out / f"rank{rank}" for rank in range(engine.ranks)]
    about = [_manifest(engine, job, rank) for rank in ranks]
    more = sorted(path.name for path in out.glob("rank*") if path not in ranks)
    if more:
        raise EngineError(
            f"engine {engine.name}: {out} holds {', '.join(more)} too; set {engine.key}.ranks.n"
        )
    _refuse_unasked(engine, job, ranks)
    answer = Answer(about=about[0])
    for mode in job.modes:
        for prompt in job.shapes:
            for layer, names in job.taps(config, mode):
                parts = [_file(engine, rank / mode / prompt / f"{layer}.safetensors") for rank in ranks]
                for name in names:
                    found = _joined(engine, f"{mode}/{prompt}/{layer}/{name}", name, parts)
                    _check_name(engine, mode, layer, name, found)
                    if found is not None:
                        shape = job.shapes[prompt][str(layer)][name]
                        where = f"{mode}/{prompt}/{layer}/{name}"
                        answer.taps[mode, prompt, layer, name] = _checked(engine, where, name, found, shape)
                _refuse_unknown(engine, f"{mode}/{prompt}/{layer}", names, parts)
    if "batched_prefill" in answer.about and job.batch:
        _read_batched(engine, job, ranks, answer)
    return answer


def _read_batched(engine: Engine, job: Job, ranks: list[Path], answer: Answer) -> None:
    """Logits of the prompts that were prefilled as a batch."""
    for prompt in job.batch:
        if ("compounded", prompt, MODEL, "logits") not in answer.taps:
            raise EngineError(
                f"engine {engine.name}: batched_prefill is judged by compounded/{prompt}/{MODEL}/logits, which it does"
                " not give; give it, or declare no batched_prefill"
            )
        where = f"{BATCHED}/{prompt}/{MODEL}/logits"
        parts = [_file(engine, rank / BATCHED / prompt / f"{MODEL}.safetensors") for rank in ranks]
        found = _joined(engine, where, "logits", parts)
        if found is None:
            raise EngineError(
                f"engine {engine.name}: it declares batched_prefill = {answer.about['batched_prefill']!r}, but {where}"
                " is missing; give it for each prompt of `batch` in job.json, or declare none"
            )
        expected = [len(job.references[prompt].rows.prefill), job.shapes[prompt][MODEL]["logits"][1]]
        answer.batched[prompt] = _checked(engine, where, "logits", found, expected)


def _manifest(engine: Engine, job: Job, rank: Path) -> dict[str, Any]:
    path = rank / "manifest.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise EngineError(
            f"engine {engine.name}: {path} is missing: it did not finish; call Job.finish() once all taps are written"
        ) from error
    except ValueError as error:
        raise EngineError(f"engine {engine.name}: {path}: no valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("exercised", {}), dict):
        raise EngineError(f"engine {engine.name}: {path}: it, or `exercised` in it, is no object of keys")
    for name, expected in (("schema", SCHEMA), ("job", job.identity)):
        if content.get(name) != expected:
            what = "copy {WRITER} again" if name == "schema" else "the dump answers another job: run it again"
            raise EngineError(
                f"engine {engine.name}: {path}: {name} is {content.get(name)!r}, expected {expected!r};"
                f" {what.format(WRITER=WRITER)}"
            )
    unknown = [name for name in content if name not in ("schema", "job", *ABOUT)]
    unknown += [name for name in content.get("exercised", {}) if name not in EXERCISED]
    if unknown:
        raise EngineError(
            f"engine {engine.name}: {path}: unknown key {', '.join(unknown)}; keys: {', '.join(ABOUT)};"
            f" exercised: {', '.join(EXERCISED)}"
        )
    return {name: content[name] for name in ABOUT if name in content}


def _refuse_unasked(engine: Engine, job: Job, ranks: list[Path]) -> None:
    """Refuse files of modes, prompts or layers that the job does not have."""
    asked = {
        f"{mode}/{prompt}/{layer}.safetensors"
        for mode in job.modes
        for prompt in job.shapes
        for layer in job.layers
    }
    asked |= {f"{BATCHED}/{prompt}/{MODEL}.safetensors" for prompt in job.batch}
    for rank in ranks:
        for path in sorted(rank.rglob("*")):
            name = path.relative_to(rank).as_posix()
            if path.is_file() and name != "manifest.json" and name not in asked:
                near = difflib.get_close_matches(name, asked, 1)
                hint = f"; near it: {near[0]}" if near else ""
                raise EngineError(
                    f"engine {engine.name}: {path} was not asked for{hint};"
                    " write out/rank<k>/<mode>/<prompt>/<layer>.safetensors"
                )


def _file(engine: Engine, path: Path) -> Mapping[str, np.ndarray]:
    """Tensors of one layer; none if the file is not there, since its taps may be declared missing."""
    try:
        return read_tensors(path) if path.exists() else {}
    except ValueError as error:
        raise EngineError(f"engine {engine.name}: {error}; write it with {WRITER}") from error


def _joined(
    engine: Engine, where: str, name: str, parts: list[Mapping[str, np.ndarray]]
) -> np.ndarray | None:
    """One tap of all ranks: concatenated on its declared axis, else the same in each rank that gives it."""
    found = [(rank, part[name]) for rank, part in enumerate(parts) if name in part]
    if not found:
        return None
    if name in engine.merge:
        axis, arrays = engine.merge[name], [array for _, array in found]
        if len(found) != engine.ranks:
            ranks = ", ".join(str(rank) for rank, _ in found)
            raise EngineError(
                f"engine {engine.name}: {where} is merged on axis {axis}, but of {engine.ranks} ranks"
                f" only {ranks} gave it"
            )
        try:
            return np.concatenate(arrays, axis=axis)
        except ValueError as error:
            shapes = ", ".join(str(array.shape) for array in arrays)
            raise EngineError(
                f"engine {engine.name}: {where}: parts of {shapes} cannot be joined on axis {axis} ({error});"
                f" correct {engine.key}.ranks.merge"
            ) from error
    first = found[0][1]
    for rank, array in found[1:]:
        if array.shape != first.shape or array.tobytes() != first.tobytes():
            raise EngineError(
                f"engine {engine.name}: {where} differs between rank {found[0][0]} {first.shape} and rank {rank}"
                f" {array.shape}; give its axis in {engine.key}.ranks.merge, or record it after the reduction"
            )
    return first


def _check_name(engine: Engine, mode: str, layer: Layer, name: str, found: np.ndarray | None) -> None:
    if found is not None and declares(engine.missing, mode, layer, name):
        raise EngineError(
            f"engine {engine.name}: {mode}/{layer}/{name} is declared missing, but it was given;"
            f" take it off {engine.key}.missing, so that it is judged"
        )


def _refuse_unknown(
    engine: Engine, where: str, names: tuple[str, ...], parts: list[Mapping[str, np.ndarray]]
) -> None:
    for name in sorted({name for part in parts for name in part} - set(names)):
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise EngineError(
            f"engine {engine.name}: {where} holds {name}, no tap that is asked here.{hint} Taps: {', '.join(names)}"
        )


def _checked(engine: Engine, where: str, name: str, found: np.ndarray, expected: list[int]) -> np.ndarray:
    """The values in the dtype that a dump holds; NaN and infinities stay, the judge counts them."""
    allowed = DTYPES.get(BY_NAME[name].kind, FLOATS)
    if found.dtype not in allowed:
        names = " or ".join(np.dtype(one).name for one in allowed)
        raise EngineError(
            f"engine {engine.name}: {where} is {found.dtype}, expected {names}; convert it where it is made"
        )
    if list(found.shape) != expected:
        what = "entry" if BY_NAME[name].axis == "entry" else "row"
        raise EngineError(
            f"engine {engine.name}: {where} is {list(found.shape)}, expected {expected}"
            f" (a line for each judged {what}, then {BY_NAME[name].shape or 'nothing'}); give the {what} numbers that"
            " job.json lists"
        )
    if BY_NAME[name].kind == "ids":
        if found.size and not -(2**31) <= found.min() <= found.max() < 2**31:
            raise EngineError(
                f"engine {engine.name}: {where} has ids beyond 32 bits; give expert or entry numbers"
            )
        return found.astype(np.int32)
    return found if found.dtype == np.uint8 else found.astype(np.float32)
