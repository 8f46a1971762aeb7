"""A noise floor with gaps: what it does not hold was not judged."""

import h5py
import numpy as np
import pytest

from dsv4.judge.conftest import RATIOS
from dsv4.judge.gate import gate
from dsv4.judge.measure import DRAWS
from dsv4.ladder import State
from dsv4.stored import file_sha256, sidecar
from dsv4.taps import BY_NAME, TAPS, layer_taps

LAYER_TAPS = [
    *(tap.name for tap in layer_taps(RATIOS[1])),
    *(tap.name for tap in TAPS if tap.where == "model"),
]


def judged(audit):
    """Verdict of a correct bottom rung, on the floor that was written."""
    audit.variant("B0_unfused", floor=False).measured("B0_unfused")
    return gate(audit.results, audit.config, "B0_unfused")


@pytest.mark.parametrize("tap", LAYER_TAPS)
def test_a_tap_that_the_floor_has_not_is_no_pass(audit, tap):
    audit.floor("B0_unfused", lambda m, p, layer, spec, x: None if spec.name == tap and layer != 0 else x)
    verdict = judged(audit)
    assert verdict["status"] == State.CANNOT_MEASURE
    where = "after the last layer" if BY_NAME[tap].where == "model" else "layer 1"
    assert f"no noise floor at {where}, {tap} ({BY_NAME[tap].stage}) and at 1 more" in verdict["reasons"][0]


@pytest.mark.parametrize(
    "draws", [None, [], [np.nan] * 8, [*[1e-5] * 7, np.nan]], ids=["gone", "none", "NaN", "one NaN"]
)
@pytest.mark.parametrize("tap", ["q", "lse", "topk", "kv_bytes", "index_scores"])
def test_a_tap_whose_floor_was_not_drawn_is_no_pass(audit, tap, draws):
    strip(audit.floor("B0_unfused"), f"isolated/decode/1/{tap}", draws)
    verdict = judged(audit)
    assert verdict["status"] == State.CANNOT_MEASURE
    place = f"layer 1, {tap} ({BY_NAME[tap].stage})"
    says = f"no noise floor at {place}: whether the code computes its plan was not judged there"
    assert verdict["reasons"] == [says]


def strip(audit, tap, draws):
    """Take a tensor's draws out of a floor, or put others in."""
    path = audit.results / "floor" / "B0_unfused" / "one.h5"
    with h5py.File(path, "a") as file:
        for name in DRAWS:
            del file[tap].attrs[name]
            if draws is not None:
                file[tap].attrs[name] = draws
    sidecar(path).write_text(file_sha256(path))
