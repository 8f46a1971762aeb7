"""Where texts begin to repeat, beside the reference's own on the same prompt; of ``text/<id>.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPETITION = "repetition.json"
Onsets = dict[
    str, tuple[int | None, int | None]
]  # prompt -> step of the rung's onset, of the reference's; None: none


def earlier(own: int | None, reference: int | None) -> bool:
    """Whether repetition sets in before the reference's own does, or only in the rung's text."""
    return own is not None and (reference is None or own < reference)


def onsets(text: Mapping[str, Any]) -> Onsets:
    """Both onsets of every prompt that the rung has a text of its own for."""
    return {
        prompt: (onset(found["own"]), onset(found["reference"]))
        for prompt, found in text["prompts"].items()
        if found["own"] is not None
    }


def onset(account: Mapping[str, Any]) -> int | None:
    """First step of the loop that a text ends in, None if it ends in none."""
    return account["loop"]["onset"] if account["loop"] else None


def early(found: Onsets) -> set[str]:
    """Prompts whose text repeats earlier than the reference's own."""
    return {prompt for prompt, pair in found.items() if earlier(*pair)}


def asked_by(texts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What asks for the FP32 residual's A/B: each rung and prompt whose text repeats early.

    Parameters
    ----------
    texts : passing rung -> its ``text/<id>.json``.
    """
    return [
        {"variant": variant, "prompt": prompt, "onset": own, "reference_onset": reference}
        for variant, text in texts.items()
        for prompt, (own, reference) in onsets(text).items()
        if earlier(own, reference)
    ]


def asked(results: Path) -> bool:
    """Whether ``repetition.json`` names a text that asks for the A/B."""
    path = results / REPETITION
    return path.exists() and bool(json.loads(path.read_text())["asked_by"])
