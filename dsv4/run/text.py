"""A rung's text: forced along the reference's own texts, and, on the spine, generated freely from the same prompts."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dsv4.config import Config, checkpoint_sha256, load
from dsv4.console import main_guard, progress
from dsv4.files import write_json, write_parquet, write_whole
from dsv4.generate.stops import kind_of, stops_of
from dsv4.identity import git_state
from dsv4.ladder import State, Variant
from dsv4.plan import flatten
from dsv4.prompts import PromptTokenizer, token_sha256
from dsv4.run.forced import Forced, force
from dsv4.run.own_text import Own, described, divergence, parting, written, written_on
from dsv4.run.setup import Setup, parse, prepare
from dsv4.stored import DumpError
from dsv4.text_dump import FILE, Text, TextReader

SCHEMA = 1
FLAGS = {"--forced-only": "force it along the reference's texts, and generate none of its own"}
FORCED, FREE, DRAFTED = "prefill", "decode", "drafted decode"  # through which passes
DOES = {"forced": "along the reference's texts", "free": "its own"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.text --config C --results R --variant ID [--forced-only]``."""
    options = parse(__doc__ or "", arguments, variant=True, flags=FLAGS)
    config = load(options.config)
    variant = config.ladder[options.variant]
    if not inherit(options.results, config, variant, forced_only=options.forced_only):
        write_text(prepare(options.config, options.results), variant, forced_only=options.forced_only)


def write_text(setup: Setup, variant: Variant, *, forced_only: bool = False) -> None:
    """Run one rung's text and write ``text/<variant>.parquet`` and ``text/<variant>.json``.

    All prompts are one batch. On refs, where prefill and decode are the same bits, forced rows show where a free text
    parts from the reference's, and only the rest is generated; on kernels every token is decoded from the prompt on.
    Seconds are wall time; tokens a second are stated on kernels alone, for refs emulate.

    Raises
    ------
    CheckpointError
        See :func:`dsv4.generate.stops.stops_of`.
    DumpError
        No texts of the reference, or those of other prompts.
    """
    tokenizer = PromptTokenizer(setup.config.checkpoint)
    model = setup.variant_model(variant.plan)
    seconds: dict[str, float | None] = {"forced": None, "free": None}
    own: dict[str, Own] = {}
    with _texts(setup.results, setup.config) as reader:
        texts = reader.texts
        _same_prompts(setup, texts)
        along = partial(force, model, tokenizer, reader, setup.texts)
        if not (forced_only or model.row_alone):
            with _timed(seconds, "free", variant):
                own = written(setup, model, tokenizer)
        with _timed(seconds, "forced", variant):
            forced = along(_partings(own, texts) if own else None)
        if not forced_only and model.row_alone:
            with _timed(seconds, "free", variant):
                parted = {name: step for name, (step, *_) in forced.kept.items()}
                own = written_on(setup, model, tokenizer, texts, parted)
    prompts = {
        name: _prompt(setup, tokenizer, name, text, own.get(name), forced) for name, text in texts.items()
    }
    write_parquet(setup.results / "text" / f"{variant.id}.parquet", forced.table)
    write_json(
        setup.results / "text" / f"{variant.id}.json",
        _header(variant)
        | _origin(setup, variant, own, seconds, forced.rms)
        | {"residual_absmax": [float(peak) if math.isfinite(peak) else None for peak in forced.by_layer]}
        | {"free": (DRAFTED if model.row_alone else FREE) if own else None, "prompts": prompts},
    )


@contextmanager
def _timed(seconds: dict[str, float | None], part: str, variant: Variant) -> Iterator[None]:
    """Say what is run, and keep its wall time."""
    for _ in progress([DOES[part]], f"{variant.id}, text"):
        start = time.perf_counter()
        yield
        seconds[part] = time.perf_counter() - start


def _partings(own: Mapping[str, Own], texts: Mapping[str, Text]) -> dict[str, int]:
    """Where each free text leaves the reference's, if it does."""
    parted = {name: divergence(one.tokens, texts[name].tokens) for name, one in own.items()}
    return {name: step for name, step in parted.items() if step is not None}


def _texts(results: Path, config: Config) -> TextReader:
    """The reference's texts, if they are of this checkpoint."""
    return TextReader(results / FILE, {"checkpoint": checkpoint_sha256(config.checkpoint)})


def _origin(
    setup: Setup,
    variant: Variant,
    own: Mapping[str, Own],
    seconds: Mapping[str, float | None],
    rms: float,
) -> dict[str, Any]:
    """What computed the text, how, and in what time."""
    named = ("label", "device", "backend", "commit", "dirty")
    origin = setup.origin("variant", variant.id, variant.plan)
    generated, free = sum(len(one.tokens) for one in own.values()), seconds["free"]
    return {name: origin[name] for name in named} | {
        "forced_through": FORCED,
        "same_bits_as": None,
        "seconds": dict(seconds),
        "tokens_per_second": generated / free if free and origin["backend"] == "kernel" else None,
        "logit_rms": rms if math.isfinite(rms) else None,
    }


def _header(variant: Variant) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "variant": variant.id,
        "parent": variant.parent,
        "plan": flatten(variant.plan),
    }


def _same_prompts(setup: Setup, texts: Mapping[str, Text]) -> None:
    """Refuse texts of other prompts than those at hand."""
    ours = {name: token_sha256(tokens) for name, tokens in setup.texts.items()}
    theirs = {name: text.prompt for name, text in texts.items()}
    if ours != theirs:
        apart = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise DumpError(
            f"{setup.results / FILE}: prompts {', '.join(apart)} are not those of {setup.config.prompts};"
            " delete it and run `python -m dsv4.run.text_reference` again"
        )


def _prompt(
    setup: Setup,
    tokenizer: PromptTokenizer,
    name: str,
    reference: Text,
    own: Own | None,
    forced: Forced,
) -> dict[str, Any]:
    """What the JSON says of one prompt."""
    kind = kind_of(setup.prompts[name])
    stops = stops_of(tokenizer, setup.config.checkpoint, kind)
    parted = None
    if own and name in forced.kept:
        parted = parting(own.tokens, reference.tokens, *forced.kept[name], rounding=forced.rms)
    return {
        "kind": kind,
        "prompt_tokens": len(setup.texts[name]),
        "budget": setup.config.text_tokens,
        "reference": described(tokenizer, reference.tokens, reference.reason, kind, stops),
        "own": described(tokenizer, own.tokens, own.reason, kind, stops) if own else None,
        "divergence": parted,
    }


def inherit(results: Path, config: Config, variant: Variant, *, forced_only: bool = False) -> bool:
    """Write a rung's text as a copy of its parent's, if its verdict says that both have the same bits.

    The verdict's ``vs_parent.bit_equal``: every tap of every judged row, isolated and free. The parent's text must
    have what is asked for, of the texts that the reference has now.

    Returns
    -------
    bool
        Whether it was written; else the text is to be computed.
    """
    verdict, folder = _json(results / "gates" / f"{variant.id}.json"), results / "text"
    parent = _json(folder / f"{variant.parent}.json")
    table = folder / f"{variant.parent}.parquet"
    equal = verdict.get("status") == State.PASS and (verdict.get("vs_parent") or {}).get("bit_equal")
    if not (variant.parent and equal and parent and table.is_file() and (results / FILE).is_file()):
        return False
    with _texts(results, config) as reader:
        now = {name: list(text.tokens) for name, text in reader.texts.items()}
    prompts = parent["prompts"]
    known = {name: one["reference"]["tokens"] for name, one in prompts.items()}
    whole = forced_only or all(one["own"] for one in prompts.values())
    if known != now or not whole or parent["plan"] != flatten(config.ladder[variant.parent].plan):
        return False
    if forced_only:
        prompts = {name: one | {"own": None, "divergence": None} for name, one in prompts.items()}
    commit, dirty = git_state()
    content = parent | _header(variant) | {
        "free": None if forced_only else f"same bits as {variant.parent}",
        "same_bits_as": variant.parent,
        "seconds": {"forced": None, "free": None},
        "tokens_per_second": None,
        "commit": commit,
        "dirty": dirty,
        "prompts": prompts,
    }  # fmt: skip
    for _ in progress([f"the same bits as {variant.parent}"], f"{variant.id}, text"):
        write_whole(folder / f"{variant.id}.parquet", table.read_bytes())
        write_json(folder / f"{variant.id}.json", content)
    return True


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


if __name__ == "__main__":
    main_guard(main)
