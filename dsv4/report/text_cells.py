"""One text as a bar: how long, where it leaves the reference, where it begins to repeat itself, how it ended.

The reference is the row on top; a column is a prompt, and its bars have one scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIDTH, END = 118.0, 12.0  # pixels of a bar at most, and of the mark at its end
TOP, HEIGHT = 3.0, 7.0
LOOP_TOP, LOOP_HEIGHT = 11.5, 2.5
LEAST_PERIOD = 3.0  # pixels: closer copies of a loop are drawn as one
KINDS = {"plain": "plain text", "chat": "chat", "second_turn": "second turn"}  # of prompts, in words
REASONS = {
    "stop_id": "stop id",
    "stop_string": "stop string",
    "budget": "budget used up",
    "positions": "positions used up",
    "not_finite": "logits not finite",
}
Text = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """A rectangle of the drawing, in pixels, and what it is: same, differs, loops, past."""

    x: float
    y: float
    width: float
    height: float
    look: str


@dataclass(frozen=True)
class Cell:
    """A rung's text of one prompt.

    Attributes
    ----------
    bars, end, look : the drawing, where its end mark is (pixels) and which it is: stop, cut, broken.
    lines : what stands under it, short: (word, whether the rung itself brought it about).
    label : all of it in one sentence.
    new : whether this rung changed the text, against its parent's.
    mild : and did so on a near tie, or back to the reference's.
    """

    bars: tuple[Bar, ...]
    end: float
    look: str
    lines: tuple[tuple[str, bool], ...]
    label: str
    new: bool
    mild: bool


def ended(text: Text) -> str:
    """How a text ended: the stop id with its name, or why it was cut."""
    if text["reason"] != "stop_id":
        return REASONS[text["reason"]]
    name = text.get("stop_name")
    return f"{name} ({text['stop']})" if name else f"stop id {text['stop']}"


def onset(text: Text | None) -> int | None:
    """First step of the loop that a text ends in."""
    return text["loop"]["onset"] if text and text["loop"] else None


def same_end(text: Text, other: Text) -> bool:
    """Whether two texts ended for the same reason, with the same stop id."""
    return (text["reason"], text["stop"]) == (other["reason"], other["stop"])


def first_difference(text: Text, other: Text) -> int | None:
    """First step at which two texts' tokens differ, the end of the shorter one counted; None if equal."""
    mine, theirs = text["tokens"], other["tokens"]
    if mine == theirs:
        return None
    shared = zip(mine, theirs, strict=False)
    return next((step for step, (a, b) in enumerate(shared) if a != b), min(len(mine), len(theirs)))


def reference_cell(text: Text, longest: int) -> Cell:
    """The reference's own text."""
    lines = [f"{text['length']} tokens", _loop_words(text)]
    label = f"reference: {_told(text)}"
    drawing = _drawing(text, None, longest)
    return Cell(*drawing, tuple((line, False) for line in lines if line), label, new=False, mild=False)


def rung_cell(found: Mapping[str, Any], before: Text | None, longest: int) -> Cell:
    """A rung's own text.

    Parameters
    ----------
    found : the prompt's entry in ``text/<variant>.json``, with an own text.
    before : what the parent wrote, or the reference if nothing below wrote one.
    longest : tokens of the column's longest text.
    """
    own, reference = found["own"], found["reference"]
    step = first_difference(own, reference)
    near = bool(found["divergence"] and found["divergence"]["near_tie"])
    new = first_difference(own, before or reference) is not None
    lines: list[tuple[str, bool]] = []
    if step is None:
        lines.append(("same again" if new else "same", new))
    else:
        lines.append((f"from {step}" + (", near tie" if near else ""), new))
    if own["loop"] and onset(own) != onset(reference):
        lines.append((_loop_words(own), new))
    if not same_end(own, reference):
        lines.append((f"ends: {_short_end(own)}", new))
    if own["ran_past"] is not None:
        lines.append((f"ran past a stop at {own['ran_past']}", new))
    said = "same as the reference" if step is None else f"differs from the reference from step {step} on"
    label = f"{said}{', a near tie' if near else ''}; {_told(own)}"
    return Cell(*_drawing(own, step, longest), tuple(lines), label, new, mild=new and (near or step is None))


def _short_end(text: Text) -> str:
    return str(text["stop"]) if text["reason"] == "stop_id" else REASONS[text["reason"]]


def _loop_words(text: Text) -> str:
    return f"repeats from {onset(text)}" if text["loop"] else ""


def _told(text: Text) -> str:
    loop = text["loop"]
    again = f", repeats {loop['period']} tokens from step {loop['onset']} on" if loop else ""
    return f"{text['length']} tokens{again}, end: {ended(text)}"


def _drawing(text: Text, step: int | None, longest: int) -> tuple[tuple[Bar, ...], float, str]:
    scale, length = (WIDTH - END) / max(longest, 1), text["length"]
    at = length if step is None else min(step, length)
    bars = [Bar(0.0, TOP + 2, _px(at * scale), HEIGHT - 4, "same")]
    if at < length:
        bars.append(Bar(_px(at * scale), TOP, _px(max((length - at) * scale, 2.0)), HEIGHT, "differs"))
    if loop := text["loop"]:
        pitch = loop["period"] * scale
        starts = [loop["onset"] * scale]
        if pitch >= LEAST_PERIOD:
            starts += [
                (loop["onset"] + n * loop["period"]) * scale for n in range(1, int(loop["copies"]) + 1)
            ]
        ends = [*(start - 1 for start in starts[1:]), length * scale]
        bars += [
            Bar(_px(left), LOOP_TOP, _px(right - left), LOOP_HEIGHT, "loops")
            for left, right in zip(starts, ends, strict=True)
            if right - left >= 0.5
        ]
    if text.get("ran_past") is not None:
        bars.append(Bar(_px(text["ran_past"] * scale), 0.0, 2.0, LOOP_TOP, "past"))
    look = {"stop_id": "stop", "stop_string": "stop", "not_finite": "broken"}.get(text["reason"], "cut")
    return tuple(bars), _px(length * scale + 3), look


def _px(value: float) -> float:
    return round(value, 1)
