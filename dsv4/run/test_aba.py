"""Repeat, revert, re-apply: what it needs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.config import load
from dsv4.ladder import LadderError
from dsv4.run.aba import confirm

ROOT = Path(__file__).resolve().parents[2]


def test_the_bottom_of_the_ladder_has_nothing_to_revert_to():
    ladder = load(ROOT / "config.yaml").ladder
    (bottom,) = (rung.id for rung in ladder if rung.parent is None)
    with pytest.raises(
        LadderError, match=f"{bottom} is the bottom of the ladder: there is nothing to revert to"
    ):
        confirm(SimpleNamespace(config=SimpleNamespace(ladder=ladder)), bottom, "one", 0, "q")
