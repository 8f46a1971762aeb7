"""Numbers and lists as text: short, aligned, and never silent about what is left out."""

import math
from collections.abc import Mapping
from typing import Any

NONE = "—"


def number(value: float | None, form: str = ".1e") -> str:
    """A number, short; a dash for none, a word for infinity."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "inf"
    text = format(value, form)
    if "e" in text:
        digits, power = text.split("e")
        text = f"{digits}e{int(power)}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def cosine(value: float | None) -> str:
    """A cosine with as many digits as tell it from 1."""
    if value is None or not math.isfinite(value):
        return number(value)
    gap = 1 - value
    if gap <= 0:
        return "1"
    return f"1−{number(gap, '.0e')}" if gap < 1e-6 else f"{value:.6f}"


def count(value: float | None) -> str:
    """A number as it is, thousands apart."""
    return number(value, ",.0f" if value is not None and float(value).is_integer() else ",.4g")


def percent(value: float | None) -> str:
    """A share; 100% only if it is all."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{value:.1%}"
    return "<100%" if text == "100.0%" and value < 1 else text.replace("100.0%", "100%")


def signed(value: float | None) -> str:
    """A whole number with its sign and thousands apart."""
    if value is None or not math.isfinite(value):
        return number(value)
    return "0" if value == 0 else f"{value:+,.0f}".replace("-", "−")


def kl_change(against: Mapping[str, Any]) -> str:
    """A paired difference of KL with its standard error, ``kl_change`` and ``se`` in nats; a dash for none."""
    change = against.get("kl_change")
    if change is None:
        return NONE
    return f"{'+' if change > 0 else ''}{number(change)} ± {number(against.get('se'), '.0e')}"


def first(texts: list[str], most: int = 4) -> str:
    """The first sentences, and how many more there are."""
    more = len(texts) - most
    return "; ".join(texts[:most]) + (f"; and {more} more in gates.json" if more > 0 else "")
