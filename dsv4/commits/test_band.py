"""The band of the noise floor: two draws of one noise are within it, a tenth more than it is not."""

import math

import numpy as np
import pytest

from dsv4.commits.band import HALF, Band, band, peak
from dsv4.dump import DumpWriter
from dsv4.judge.verdict import FAMILY


def floor(path, truth, draws):
    """Write a floor's dump of ``attn_out`` in one layer, with the distances of draws ``[D, rows, 2, n]``."""
    attrs = {name: "" for name in ("variant", "checkpoint", "prompt")} | {"kind": "floor", "plan": {}}
    attrs |= {"prompt_id": "one", "compress_ratios": [0]}
    gaps = np.linalg.norm((draws - truth).reshape(len(draws), len(truth), -1), axis=2)
    size = np.linalg.norm(truth.reshape(len(truth), -1), axis=1)
    found = {
        "draw_distance": np.linalg.norm(gaps, axis=1) / np.linalg.norm(size),
        "draw_worst": (gaps / size).max(axis=1),
    }
    with DumpWriter(path, attrs) as writer:
        writer.rows("isolated", "decode", np.arange(len(truth)))
        writer.put("isolated", "decode", 0, "attn_out", truth.astype(np.float32), "f32", attrs=found)


def cosines(values, reference):
    """Of the whole, and of the worst row."""
    a, b = (each.reshape(len(each), -1) for each in (values, reference))
    rows = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)), float(rows.min())


def test_the_band_holds_for_other_draws_and_not_for_a_tenth_more(tmp_path):
    """Two more draws of the same noise are two implementations: within, however the reference lies; a shift is not."""
    random = np.random.default_rng(0)
    truth = random.normal(size=(16, 2, 64))

    def draw(size):
        return truth + size * random.normal(size=truth.shape)

    floor(tmp_path / "one.h5", truth, np.stack([draw(1e-3) for _ in range(8)]))
    found = band([tmp_path / "one.h5"], {"q_format": "bf16"}, 10)
    assert found.whole < found.row
    lowest = 1.0
    for _ in range(200):
        reference = draw(random.uniform(0, 0.02))
        (one, row), (two, other) = (cosines(draw(1e-3), reference) for _ in range(2))
        lowest = min(lowest, one)
        assert found.refuses(one, two) == ""
        assert found.refuses(row, other, row=True) == ""
        assert found.refuses_mean(one, two, min(one, two)) == ""
        away = math.cos(math.acos(two) + 1.1 * found.whole)
        assert "the noise floor explains" in found.refuses(away, two)
        assert found.refuses(away, two, row=True) == ""
    assert found.refuses_mean(lowest - 3 * found.whole, lowest, lowest)


def test_the_band_is_derived_from_the_largest_draw(tmp_path):
    truth = np.ones((4, 2, 8))
    draws = np.stack([truth * (1 + size) for size in (0.001, 0.002, 0.003, 0.01)])
    floor(tmp_path / "one.h5", truth, draws)
    fold = math.ceil(math.log(FAMILY / 5) / math.log(1 / 5))  # n with (4 + 1)^-n under the rate of one of 5
    found = band([tmp_path / "one.h5"], {"q_format": "bf16"}, 5)
    assert found.whole == pytest.approx(2 * math.asin(0.01 * math.sqrt(fold)))
    assert peak(truth) == pytest.approx(0.25)
    one = 2.0**-3 * 0.25 + 2.0**-23  # FP8 keys are read: a step of E4M3, at the row's largest value
    assert found.row == pytest.approx(2 * math.asin(math.hypot(0.01 * math.sqrt(fold), one)))


def test_digits_that_printing_took_are_no_difference():
    exact = Band(whole=0.0, row=0.0)
    assert exact.refuses(0.999961889, 0.9999618892276565) == ""
    assert exact.refuses(0.999961889, 0.999961889 + 3 * HALF) != ""
