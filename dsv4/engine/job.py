"""The job that an engine is given: what to compute, on which inputs, and which tensors to give back."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4.console import main_guard
from dsv4.dump import sidecar
from dsv4.engine.tap_writer import SCHEMA, write_tensors
from dsv4.files import write_json
from dsv4.ladder import Variant
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import of_plan
from dsv4.model.transformer import Layer
from dsv4.plan import Plan, flatten
from dsv4.run.isolated import HISTORY_TAPS, Reference
from dsv4.run.modes import first_streams, open_reference
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import tap_names
from dsv4.taps import BY_NAME, MODEL, MODES, Tap

KINDS = {"ids": "int", "bytes": "uint8"}  # of a tap's values, in job.json; all others are float32
REFERENCE = "reference"  # in a rung's place: the job of `reference` in config.yaml
Shapes = dict[str, dict[str, list[int]]]  # layer -> tap -> its whole shape, axis 0 included


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What of a variant is asked; the whole of it, or what A/B/A needs.

    Attributes
    ----------
    modes : isolated, compounded or both.
    prompts : ids; empty: all.
    layers : layers to run in isolated mode; empty: all and the head.
    """

    modes: tuple[str, ...] = MODES
    prompts: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Job:
    """A job as it was written.

    Attributes
    ----------
    folder : what the engine is told.
    identity : hash of all that decides what a right answer is.
    layers : those that are asked.
    batch : two prompts for which an engine that prefills in batches gives logits once more.
    shapes : by prompt, what each tap must look like.
    references : by prompt, the reference that it is to be judged with.
    """

    folder: Path
    identity: str
    modes: tuple[str, ...]
    layers: tuple[Layer, ...]
    batch: tuple[str, ...] = ()
    shapes: dict[str, Shapes] = field(default_factory=dict)
    references: dict[str, Reference] = field(default_factory=dict)

    def taps(self, config: ModelConfig, mode: str) -> Iterator[tuple[Layer, tuple[str, ...]]]:
        """Layers and the taps that a full answer of ``mode`` holds for each."""
        for layer, names in tap_names(config, mode).items():
            if layer in self.layers:
                yield layer, names


def write_job(setup: Setup, variant: Variant, folder: Path, ask: Ask = Ask()) -> Job:
    """Write a job's folder, replacing what is there; ``docs/engines.md`` says what it holds."""
    config = setup.checkpoint.config
    shutil.rmtree(folder, ignore_errors=True)
    prompts = ask.prompts or tuple(setup.tokens)
    layers: tuple[Layer, ...] = ask.layers or (*range(config.num_hidden_layers), MODEL)
    batch = prompts[:2] if "compounded" in ask.modes and len(prompts) > 1 else ()
    job = Job(folder.absolute(), _identity(setup, variant, prompts), ask.modes, layers, batch)
    entries = []
    for prompt in prompts:
        with open_reference(setup, prompt) as dump:
            reference = Reference(dump, config)
            job.references[prompt] = reference
            job.shapes[prompt] = {
                str(layer): {tap: _shape(setup, variant, reference, layer, BY_NAME[tap]) for tap in taps}
                for layer, taps in tap_names(config, "isolated").items()
            }
            if "isolated" in ask.modes:
                for layer in layers:
                    write_tensors(
                        folder / "in" / prompt / f"{layer}.safetensors", inputs(setup, reference, layer)
                    )
        entries.append(_prompt(prompt, reference, config, job.shapes[prompt]))
    content = {
        "schema": SCHEMA,
        "id": job.identity,
        "variant": variant.id,
        "plan": flatten(variant.plan),
        "checkpoint": str(setup.config.checkpoint.absolute()),
        "modes": list(ask.modes),
        "layers": list(layers),
        "batch": list(batch),
        "taps": {
            mode: {str(layer): list(taps) for layer, taps in job.taps(config, mode)} for mode in ask.modes
        },
        "kinds": {tap.name: KINDS.get(tap.kind, "float32") for tap in BY_NAME.values()},
        "prompts": entries,
    }
    write_json(folder / "job.json", content)
    return job


def _identity(setup: Setup, variant: Variant, prompts: Sequence[str]) -> str:
    """Hash of the schema, the plan, and each prompt's reference: a finished dump must answer this very job."""
    references = [setup.results / "reference" / f"{prompt}.h5" for prompt in prompts]
    found = [SCHEMA, flatten(variant.plan), *(sidecar(path).read_text().split()[0] for path in references)]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _prompt(name: str, reference: Reference, config: ModelConfig, shapes: Shapes) -> dict[str, Any]:
    ratios = sorted({ratio for ratio in config.compress_ratios if ratio})
    return {
        "id": name,
        "tokens": reference.tokens.tolist(),
        "prompt_tokens": reference.rows.prompt,
        "rows": reference.rows.all.tolist(),
        "entries": {str(ratio): reference.rows.entries(ratio).tolist() for ratio in ratios},
        "shapes": shapes,
    }


def _shape(setup: Setup, variant: Variant, reference: Reference, layer: Layer, tap: Tap) -> list[int]:
    """Shape of a tap at the judged rows or entries: the reference's, or its rows by the plan's record."""
    if tap.reference is not None:
        return list(reference.judged(layer, tap.reference).shape)
    record = of_plan(variant.plan, setup.checkpoint.config).record
    stored = {"kv_bytes": "kv", "comp_bytes": "comp"}[tap.name]
    return [len(reference.judged(layer, stored)), record.data_bytes + record.scale_bytes]


def inputs(setup: Setup, reference: Reference, layer: Layer) -> dict[str, np.ndarray]:
    """What isolated mode gives to one layer: every value of the reference that a stage of it reads.

    ``streams_in`` enter the layer; ``history.<tap>`` holds every row of the sequence or every
    entry; all others the judged rows, whose positions are ``rows`` and whose tokens are
    ``tokens``.
    """
    config = setup.checkpoint.config
    rows = torch.from_numpy(reference.rows.all)
    found = {"rows": rows, "tokens": reference.tokens[rows], "sequence": reference.tokens}
    before = config.num_hidden_layers - 1 if layer == MODEL else int(layer) - 1
    found["streams_in"] = (
        reference.judged(before, "streams") if before >= 0 else first_streams(setup, reference)
    )
    for name in tap_names(config, "isolated")[layer]:
        if BY_NAME[name].replay and BY_NAME[name].axis == "row":
            found[name] = reference.judged(layer, name)
    for name in () if layer == MODEL else HISTORY_TAPS[config.kind(int(layer))]:
        found[f"history.{name}"] = reference.every_row(int(layer), name)
    return {name: value.numpy() for name, value in found.items()}


def of_reference() -> Variant:
    """What a foreign reference is asked: the equations, without a format."""
    return Variant(
        id=REFERENCE,
        parent=None,
        plan=Plan(rounding="none"),
        change={},
        spine=False,
        needs=(),
        on_request=True,
        why="",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write a job that is answered elsewhere and comes back as ``dump:``; a rung's or ``reference``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, new or replaced")
    own, rest = parser.parse_known_args(arguments)
    options = parse(main.__doc__ or "", rest, variant=True)
    setup = prepare(options.config, options.results)
    asked = of_reference() if options.variant == REFERENCE else setup.config.ladder[options.variant]
    write_job(setup, asked, own.out)


if __name__ == "__main__":
    main_guard(main)
