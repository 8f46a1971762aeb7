"""Magnitudes of the streams and sums of their mixing matrices, by hand."""

import numpy as np
import pytest

from dsv4.dump import DumpError, DumpWriter
from dsv4.judge.measure import Notes
from dsv4.judge.mixing import Mixing, mixing
from dsv4.judge.streams import bf16_ulp, lines, peaks, step_peaks


@pytest.mark.parametrize(
    ("value", "ulp"),
    [(256.0, 2.0), (255.9, 1.0), (511.0, 2.0), (512.0, 4.0), (86.0, 0.5), (1.0, 2**-7), (0.0, 0.0)],
)
def test_the_spacing_of_bf16(value, ulp):
    assert bf16_ulp(value) == ulp


def test_peaks_are_over_rungs_and_prompts_and_keep_what_is_not_finite():
    one = Notes(
        exercised={"a": {"residual_absmax": [3.0, 1.0]}, "b": {"residual_absmax": [1.0, 5.0]}, "c": {}}
    )
    two = Notes(exercised={"a": {"residual_absmax": [2.0, float("nan")]}})
    assert peaks([one]) == [3.0, 5.0]
    assert lines("layer", peaks([one, two])) == [
        {"layer": 0, "absmax": 3.0, "ulp": 2.0**-6},
        {"layer": 1, "absmax": None, "ulp": None},
    ]
    assert peaks([Notes()]) == []


def dump(path, taps, kind="variant", mode="isolated"):
    """``taps``: (layer, name) -> rows of decode steps."""
    attrs = {"plan": {}, "checkpoint": "c", "prompt": "p", "prompt_id": "one", "compress_ratios": [0, 0]}
    with DumpWriter(path, {"kind": kind, "variant": "v", **attrs}) as file:
        file.rows(mode, "decode", np.arange(len(next(iter(taps.values())))))
        for (layer, name), values in taps.items():
            file.put(mode, "decode", layer, name, values, "f32")
    return path


def test_steps_take_the_larger_site_layer_and_prompt(tmp_path):
    rows = lambda *values: np.float32(values).reshape(-1, 1, 1) * np.float32([[0.5, -1], [0.5, 0]])  # noqa: E731
    one = dump(
        tmp_path / "one.h5",
        {
            (0, "streams_mid"): rows(1, 2, 9),
            (1, "streams"): rows(3, 1, 1),
            (0, "attn_in"): np.full((3, 2), 99, np.float32),
        },
    )
    two = dump(tmp_path / "two.h5", {(1, "streams"): rows(2, 7)})
    assert step_peaks([one, two, tmp_path / "missing.h5"]) == [3.0, 7.0, 9.0]
    assert step_peaks([tmp_path / "missing.h5"]) == []


def test_sums_go_over_rows_and_columns_and_the_norm_is_the_largest_gain():
    found = Mixing()
    found.add(np.array([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.25], [0.0, 0.75]]]))
    assert found.row == (0.75, 1.25)
    assert found.column == (1.0, 1.0)
    # [[1, 1/4], [0, 3/4]]: its squared singular values have sum 1 + 1/16 + 9/16 and product 9/16.
    assert found.spectral_norm == pytest.approx(np.sqrt((13 / 8 + np.sqrt((13 / 8) ** 2 - 9 / 4)) / 2))
    assert not found.non_expansive
    doubly = Mixing()
    doubly.add(np.full((3, 4, 4), 0.25))
    assert doubly.as_dict() == {
        "row_sum": [1.0, 1.0],
        "column_sum": [1.0, 1.0],
        "spectral_norm_max": pytest.approx(1.0, abs=4 * 2**-52),
        "non_expansive": True,
    }


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (
            {(0, "attn_comb"): np.full((1, 2, 2), np.nan, np.float32)},
            "one.h5: decode/0/attn_comb holds NaN or Inf",
        ),
        ({(0, "attn_in"): np.ones((1, 2), np.float32)}, "no reference dump holds comb"),
    ],
)
def test_combs_that_say_nothing_are_refused(tmp_path, taps, message):
    dump(tmp_path / "reference" / "one.h5", taps, "reference", "compounded")
    with pytest.raises(DumpError, match=message):
        mixing(tmp_path)
