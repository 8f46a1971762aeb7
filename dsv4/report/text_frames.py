# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false, reportCallIssue=false
# (pandas' own types say that a column may be a frame)
"""Rows of the section "Text, end to end" that the page swaps: texts with their marks, KL by position, classes."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from dsv4.generate.repetition import final_loop
from dsv4.report.frames import LEAST
from dsv4.report.load import Audit
from dsv4.report.text_cells import KINDS, Text, ended, first_difference, onset

BIN = 16  # positions of a KL mark
BAND = (0.025, 0.975)
PAIR = ("variant", "prompt")
TEXT_COLUMNS = ("whose", "text", "difference", "onset", "period", "end", "said")
KL_COLUMNS = (
    "variant",
    "what",
    "step",
    "last",
    "kl_mean",
    "kl_median",
    "kl_low",
    "kl_high",
    "at_least",
    "bad",
)
CLASS_COLUMNS = ("variant", "group", "name", "top1", "kl_nats", "n")
ORDER = ("letter", "digit", "punctuation", "space", "newline", "control", "other")
FORCED_ONLY = "This rung was only forced through the reference's text: a leaf writes none of its own."
EMPTY = "the text is empty"


def texts(audit: Audit) -> pd.DataFrame:
    """One row a text, whose = reference or own; offsets in characters, -1 where there is none.

    The reference's is there for every rung, since the first difference is the pair's; a text that occurs again is
    stored once (:func:`dsv4.report.payload.table`).
    """
    rows = []
    for variant, document in audit.texts.documents.items():
        for prompt, found in document["prompts"].items():
            reference, own = found["reference"], found["own"]
            at = -1 if own is None else difference(own, reference)
            said = FORCED_ONLY if own is None else pair_said(variant, found)
            for whose, text in (("reference", reference), ("own", own)):
                if text is None:
                    rows.append((variant, prompt, whose, "", -1, -1, -1, "", "forced only"))
                else:
                    rows.append((variant, prompt, whose, text["text"], at, *loop(text), ended(text), said))
    return pd.DataFrame(rows, columns=[*PAIR, *TEXT_COLUMNS])


def difference(text: Text, other: Text) -> int:
    """Characters before the first difference of two texts, -1 if their tokens are the same.

    Tokens tell whether there is one, characters where: a token's own characters are not recorded, and one that is
    cut in two characters' middle has none. A text that is the beginning of the other differs at its end.
    """
    if first_difference(text, other) is None:
        return -1
    mine, theirs = text["text"], other["text"]
    pairs = zip(mine, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))


def loop(text: Text) -> tuple[int, int]:
    """Onset and period in characters of the loop that a text ends in, (-1, -1) if it ends in none.

    The account's loop is one of tokens; if tokens repeat so do their characters, whose loop is found the same way.
    """
    return _loop(text["text"]) if text["loop"] else (-1, -1)


@cache
def _loop(text: str) -> tuple[int, int]:
    whole = text.rstrip("\ufffd")  # the budget may cut the last character
    found = final_loop([*map(ord, whole)], max_period=max(len(whole), 1), min_length=1)
    return (found.onset, found.period) if found else (-1, -1)


def pair_said(variant: str, found: Mapping[str, Any]) -> str:
    """What is to be seen in a pair of texts, in a sentence."""
    own, reference, there = found["own"], found["reference"], found["divergence"]
    step = first_difference(own, reference)
    parts = []
    if step is None:
        parts.append("The same text, to the last token.")
    elif there is None:
        parts.append(f"The same {step} tokens, then one of them ends.")
    else:
        near = "a near tie" if there["near_tie"] else "no near tie"
        sides = (("the reference prefers its token", "reference_margin"), (f"{variant} its own", "margin"))
        ahead = [f"{who} by {there[key]:.3g} logits" for who, key in sides if there.get(key) is not None]
        said = f": {', '.join(ahead)}" if ahead else ""
        parts.append(f"First difference at step {step} of {reference['length']}, {near}{said}.")
    if own["loop"]:
        again = f"Repeats {own['loop']['period']} tokens from step {onset(own)} on"
        other = onset(reference)
        parts.append(f"{again}; the reference {'never does' if other is None else f'from {other}'}.")
    if own.get("ran_past") is not None:
        parts.append(f"Ran past a stop id at step {own['ran_past']}.")
    if not own["text"]:
        parts.append(f"Nothing was written: {EMPTY}, end: {ended(own)}.")
    return " ".join(parts)


def positions(audit: Audit) -> pd.DataFrame:
    """KL along each continuation in bins of :data:`BIN` positions, and where things happen in the pair.

    Columns :data:`KL_COLUMNS` beside ``prompt``; ``what``: KL (mean, median, 2.5% and 97.5% quantile over the bin,
    nats), or the name of a mark at ``step``. What is below 1e-9 is drawn there; a bin with a KL that is no number has
    none, and says how many.
    """
    frame = audit.texts.forced
    first = frame["step"].astype(int) // BIN * BIN
    kl = frame["kl_nats"].astype(float).where(np.isfinite(frame["kl_nats"].astype(float)))
    places = frame.assign(first=first, last=frame["step"].astype(int), kl=kl, lost=kl.isna())
    binned = places.groupby([*PAIR, "first"], sort=False)
    lost = binned["lost"].sum()
    values = pd.DataFrame(
        {
            "last": binned["last"].max(),
            "kl_mean": binned["kl"].mean(),
            "kl_median": binned["kl"].median(),
            "kl_low": binned["kl"].quantile(BAND[0]),
            "kl_high": binned["kl"].quantile(BAND[1]),
        }
    )
    values.loc[lost > 0, ["kl_mean", "kl_median", "kl_low", "kl_high"]] = np.nan
    values["at_least"] = values["kl_mean"].clip(lower=LEAST)
    values["bad"] = (lost.astype(int).astype(str) + " not finite").where(lost > 0, "")
    drawn = values.reset_index().rename(columns={"first": "step"}).assign(what="KL")
    marks = pd.DataFrame(list(_marks(audit)), columns=[*PAIR, "what", "step"])
    whole = pd.concat([drawn, marks.assign(last=marks["step"], bad="")], ignore_index=True)
    return whole[[*PAIR, *KL_COLUMNS[1:]]].astype({"step": float, "last": float})


def _marks(audit: Audit) -> Iterator[tuple[Any, ...]]:
    for variant, document in audit.texts.documents.items():
        for prompt, found in document["prompts"].items():
            own, reference = found["own"], found["reference"]
            end = "reference stops" if reference["reason"] == "stop_id" else "reference is cut"
            marks = [(end, reference["length"]), ("reference repeats", onset(reference))]
            if own is not None:
                marks += [
                    ("first difference", first_difference(own, reference)),
                    ("rung repeats", onset(own)),
                ]
            for what, step in marks:
                if step is not None:
                    yield (variant, prompt, what, step)


def classes(audit: Audit) -> pd.DataFrame:
    """Top-1 agreement and KL by token class and by kind of prompt, as judged: columns :data:`CLASS_COLUMNS`."""
    rows = []
    for variant in audit.texts.documents:
        judged = ((audit.verdicts.get(variant) or {}).get("e2e") or {}).get("text") or {}
        for group, names in (("token", "by_class"), ("prompt", "by_kind")):
            for name, found in (judged.get(names) or {}).items():
                said = KINDS.get(name, name) if group == "prompt" else name
                rows.append((variant, group, said, found.get("top1"), found.get("kl_nats"), found.get("n")))
    return pd.DataFrame(rows, columns=list(CLASS_COLUMNS)).astype(
        {"top1": float, "kl_nats": float, "n": float}
    )


def tables(audit: Audit) -> dict[str, pd.DataFrame]:
    """Rows for the payload, by the name of their table there."""
    return {"texts": texts(audit), "kl": positions(audit), "classes": classes(audit)}
