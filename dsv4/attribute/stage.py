"""Attribution of one rung, on the checkpoint and the reference's texts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsv4.attribute.rank import ForcedText, as_forced, rank
from dsv4.attribute.swap import with_wide_scores
from dsv4.config import checkpoint_sha256
from dsv4.console import progress
from dsv4.model import numerics
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan
from dsv4.prompts import token_sha256
from dsv4.run.modes import Wrap, unwrapped
from dsv4.run.setup import Setup, prepare
from dsv4.stored import DumpError
from dsv4.text_dump import FILE, TextReader

Install = Callable[[Transformer], Wrap]


def attribute(config: Path, results: Path, variant: str, window: Mapping[str, int]) -> dict[str, Any]:
    """Rank a rung's ops on the first positions of some of the reference's texts.

    Parameters
    ----------
    config, results, variant : as every stage has them.
    window : prompt -> positions.

    Returns
    -------
    dict
        As :func:`~dsv4.attribute.rank.rank`, with ``prompts``, ``window`` and CPU ``seconds``.

    Raises
    ------
    ConfigError, CheckpointError, DumpError
        What is wrong, where, and what to do.
    """
    start = time.process_time()
    setup = prepare(config, results)
    texts = read_texts(setup, window)
    plan = setup.config.ladder[variant].plan
    shown = partial(_progress, variant)
    found = rank_plan(setup, plan, list(texts.values()), shown=shown)
    about = {"prompts": list(window), "window": dict(window)}
    return found | about | {"seconds": time.process_time() - start}


def rank_plan(
    setup: Setup, plan: Plan, texts: list[ForcedText], install: Install | None = None, **options: Any
) -> dict[str, Any]:
    """As :func:`~dsv4.attribute.rank.rank`, of a plan on refs; ``install`` plants a fault, as in ``write_variant``."""
    config = setup.checkpoint.config
    model = setup.model(with_wide_scores(numerics.of_plan(plan, config)))
    wrap = install(model) if install else unwrapped
    return rank(model, setup.model(numerics.trained(config)), texts, wrap, **options)


def read_texts(setup: Setup, window: Mapping[str, int]) -> dict[str, ForcedText]:
    """The first positions of some of the reference's texts, with its logits there.

    Raises
    ------
    DumpError
        No texts, truncated, or of another checkpoint or prompt.
    """
    path = setup.results / FILE
    with TextReader(path, {"checkpoint": checkpoint_sha256(setup.config.checkpoint)}) as reader:
        known = reader.texts
        for name in window:
            if name not in setup.texts or known[name].prompt != token_sha256(setup.texts[name]):
                raise DumpError(
                    f"{path}: prompt {name} is not the one of {setup.config.prompts}; delete the folder and run again"
                )
        return {
            name: as_forced(setup.texts[name], known[name].tokens, reader.logits(name, slice(0, count)))
            for name, count in window.items()
        }


def _progress(variant: str, items: Sequence[str], what: str) -> Iterator[str]:
    return progress(items, f"{variant}, {what}")
