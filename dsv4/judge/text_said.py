"""What a rung's texts show, in sentences: faults of the code, what else is broken, and what else is to be said."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dsv4.judge.onsets import earlier, onset
from dsv4.judge.text_change import LEAST_BLOCKS, Change
from dsv4.judge.text_files import VALUES, Text

# The reference's odds, its best token to any other, from which a rung that takes another is broken: e^4.6 = 99 to 1.
# Of all distributions that do, the nearest gives half of both tokens' probability p to each. Its KL is
# p (0.99 ln(0.99 / 0.5) + 0.01 ln(0.01 / 0.5)) = 0.64 p nats in that one position: no rounding of the ladder does that.
WIDE_MARGIN = float(np.log(99.0))
ENDS = {
    "budget": "ran into its budget of {budget}",
    "positions": "ran into the model's positions after {length} tokens",
    "stop_string": "ended at a stop string after {length} tokens",
    "not_finite": "ended in logits that are not finite after {length} tokens",
}


def sentences(text: Text) -> tuple[list[str], list[str], list[str]]:
    """What is a fault of the code, what else is broken, and what else is to be said of the texts; by prompt."""
    faults, broken, other = list[str](), list[str](), list[str]()
    by_prompt = dict(iter(text.table.groupby("prompt", sort=False, observed=True)))
    for name, each in text.head["prompts"].items():
        at = f"{each['kind'].replace('_', ' ')} `{name}`"
        rows = by_prompt.get(name, text.table[:0])
        faults += [f"{at}: {said}" for said in _faults(each, rows)]
        broken += [f"{at}: {said}" for said in _broken(each, rows)]
        other += [f"{at}: {said}" for said in _reported(each, rows)]
    return faults, broken, other


def _faults(each: Mapping[str, Any], rows: pd.DataFrame) -> Iterator[str]:
    own = each["own"]
    for whose, text in (("the reference passed ", each["reference"]), ("", own)):
        if text and text["ran_past"] is not None:
            passed = f"{whose}a stop id" if whose else "a stop id was passed"
            yield f"{passed} at step {text['ran_past']}: the loop that generated it does not stop"
    lost = not_finite(rows)
    if lost.any():
        first = int(rows.loc[lost.idxmax(), "step"])  # type: ignore[arg-type]
        yield f"{int(lost.sum())} of {len(rows)} forced positions are not finite, the first at step {first}"
    for whose, text in (("the reference's own text", each["reference"]), ("the free text", own)):
        if text and text["reason"] == "not_finite":
            yield f"{whose} {ended(text, each['budget'])}"


def _broken(each: Mapping[str, Any], rows: pd.DataFrame) -> Iterator[str]:
    """Where the reference is sure and the rung takes another token: its turn end, or what its own prefill gives."""
    if each["reference"]["reason"] == "stop_id":  # then its stop id is the last that was forced
        last = rows.iloc[-1]
        if not last["top1"] and last["margin_trained"] >= WIDE_MARGIN:
            yield (
                f"the turn end after {each['reference']['length']} tokens is not this rung's choice, though the"
                f" reference's margin there is {last['margin_trained']:.1f} logits"
            )
    if (split := _split(each, rows)) and split[1] >= WIDE_MARGIN:
        yield _unlike_prefill(*split)


def _reported(each: Mapping[str, Any], rows: pd.DataFrame) -> Iterator[str]:
    own, reference, divergence = each["own"], each["reference"], each["divergence"]
    if own is None:
        return
    if end(own) != end(reference) and own["reason"] != "not_finite":
        yield f"the reference {ended(reference, each['budget'])}, this text {ended(own, each['budget'])}"
    mine, its = onset(own), onset(reference)
    if earlier(mine, its):
        beside = "the reference's own text has none" if its is None else f"the reference's own at {its}"
        yield f"repetition sets in at step {mine}, {beside}"
    if divergence and not divergence["near_tie"]:
        margin = divergence["reference_margin"]
        beside = "" if margin is None else f" of {margin:.2g} logits"
        at = f"at step {divergence['step']}"
        yield f"it leaves the reference's text {at}, where that has a margin{beside}: no near tie"
    if (split := _split(each, rows)) and split[1] < WIDE_MARGIN:
        yield _unlike_prefill(*split)


def ended(text: Mapping[str, Any], budget: int) -> str:
    """How a text ended, and after how many tokens."""
    if text["reason"] == "stop_id":
        return f"stops with {text['stop_name'] or text['stop']} after {text['length']} tokens"
    return ENDS[text["reason"]].format(budget=budget, length=text["length"])


def _split(each: Mapping[str, Any], rows: pd.DataFrame) -> tuple[int, float] | None:
    """First step at which decode chose another token than the rung's own prefill did, and prefill's margin there.

    Up to where the free text leaves the reference's, both read the same tokens.
    """
    if each["own"] is None:
        return None
    free = np.asarray(each["own"]["tokens"][: len(rows)])
    divergence = each["divergence"]
    free = free[: divergence["step"] + 1] if divergence else free
    unlike = np.flatnonzero(free != rows["top"].to_numpy()[: len(free)])
    return (int(unlike[0]), float(rows["margin"].iloc[unlike[0]])) if len(unlike) else None


def _unlike_prefill(step: int, margin: float) -> str:
    return (
        f"at step {step} decode takes another token than this rung's own prefill of the same tokens, whose margin is"
        f" {margin:.2g} logits"
    )


def not_finite(table: pd.DataFrame) -> pd.Series:
    """Positions in which some number is NaN or Inf."""
    return ~np.isfinite(table[list(VALUES)]).all(axis=1)


def end(text: Mapping[str, Any]) -> tuple[str, int | None]:
    """Why a text ended, and at which stop id."""
    return text["reason"], text["stop"]


def of_change(change: Change, parent: str) -> list[str]:
    """What a paired change says, or why it can say nothing."""
    if change.blocks < LEAST_BLOCKS:
        return [
            f"{change.blocks} blocks of positions are too few to say whether text moved against {parent}'s:"
            f" {LEAST_BLOCKS} are needed; add prompts with text, or longer ones"
        ]
    if not change.moved:
        return []
    verb = "rises" if change.mean > 0 else "falls"
    return [
        f"text moved: its KL {verb} by {abs(change.mean):.2g} nats against {parent}'s, +- {change.se:.1g}"
    ]
