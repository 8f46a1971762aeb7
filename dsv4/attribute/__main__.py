"""Which op of which layer moved a rung's text: ``text/attribution/<rung>.json``. Quick where nothing moved."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.attribute.ops import GROUPS
from dsv4.attribute.window import choose
from dsv4.config import load
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.identity import git_state
from dsv4.judge.moved import moved
from dsv4.judge.text_files import Text, files, read_reference, read_text

SCHEMA = 1
NONE: dict[str, Any] = {
    "prompts": [],
    "positions": 0,
    "kl_nats": None,
    "ops": [],
    "layers": [],
    "explained": None,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.attribute --config C --results R --variant ID``.

    Raises
    ------
    ConfigError, DumpError
        What is wrong, where, and what to do.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    for name, text in (("--config", "the audit's config.yaml"), ("--results", "results/<run>")):
        parser.add_argument(name, type=Path, required=True, help=text)
    parser.add_argument("--variant", required=True, help="a rung of the ladder")
    options = parser.parse_args(arguments)
    write_attribution(options.config, options.results, options.variant)


def write_attribution(config_path: Path, results: Path, name: str) -> None:
    """Attribute one rung's forced text, if it moved, and write ``text/attribution/<rung>.json``.

    What moved is decided on what the audit measured, kernels or refs; ops are swapped on refs alone, in an emulation
    of the rung's plan. ``measured`` says what KL the audit measured at the same positions, and ``shown`` what share of
    it the emulation has: far from 1, kernels do something that the plan does not say, or a row depends on its launch.
    """
    config = load(config_path)
    rung, reference = config.ladder[name], read_reference(results)
    text = read_text(results, rung, reference)
    parent = None
    missing = rung.parent is not None and not files(results, rung.parent)[1].is_file()
    if rung.parent and not missing:
        parent = read_text(results, config.ladder[rung.parent], reference).table
    commit, dirty = git_state()
    found: dict[str, Any] = {"schema": SCHEMA, "variant": name, "parent": rung.parent, "against": "trained"}
    found |= {"backend": "ref", "label": "emulated on cpu", "commit": commit, "dirty": dirty, **NONE}
    if missing:
        found["words"] = f"not attributed: {rung.parent} below has no text to have moved from"
    elif not moved(text.table, parent):
        found["words"] = "did not move"
    elif not np.isfinite(text.table["kl_nats"]).all():
        found["words"] = "not attributed: its logits are not finite"
    else:
        from dsv4.attribute.stage import attribute  # torch and the checkpoint: most rungs need neither

        found |= attribute(config_path, results, name, window(text))
        found["measured"] = measured(text, found)
        found["groups"] = {group.name: group.why for group in GROUPS}
    write_json(results / "text" / "attribution" / f"{name}.json", found)


def window(text: Text) -> dict[str, int]:
    """Prompt -> positions to run, see :func:`~dsv4.attribute.window.choose`."""
    return choose(text.table, {str(name): one["prompt_tokens"] for name, one in text.head["prompts"].items()})


def measured(text: Text, found: dict[str, Any]) -> dict[str, Any]:
    """What the audit measured at the positions of an attribution, and how much of it the emulation has."""
    table, chosen = text.table, found["window"]
    inside = table["step"] < table["prompt"].map(chosen).fillna(0)
    there, all_of_it = table.loc[inside, "kl_nats"], float(table["kl_nats"].sum())
    kl, emulated = float(there.mean()), found["kl_nats"]
    return {
        "label": text.head.get("label"),
        "backend": text.head.get("backend"),
        "kl_nats": kl,
        "shown": emulated / kl if emulated is not None and kl > 0 else None,
        "window_share": float(there.sum()) / all_of_it if all_of_it else None,  # of the KL of all positions
    }


if __name__ == "__main__":
    main_guard(main)
