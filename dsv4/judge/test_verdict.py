"""Verdicts on simulated stores: FP32 noise before a rounding, and roundings too many or too few."""

import numpy as np
import pandas as pd
import pytest

from dsv4.judge.conftest import bf16
from dsv4.judge.parts import TRIM, Stack, scale_columns
from dsv4.judge.verdict import Draws, codes, judge
from dsv4.taps import BY_NAME

LAYERS, PROMPTS, ROWS, SIZE, DRAWS = 8, 5, 16, 128, 8
NOISE = 3e-7  # of an FP32 sum of some hundred terms, relative to the row
PLAN = {"kv_format": "fp8", "index_score": "fp8"}


def e4m3(x):
    """E4M3 with one power-of-two scale per 64 values."""
    groups = x.reshape(*x.shape[:-1], -1, 64).astype(np.float64)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-4)
    scale = 2.0 ** np.ceil(np.log2(amax / 448))
    exponent = np.floor(np.log2(np.maximum(np.abs(groups / scale), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return (np.rint(groups / scale / step) * step * scale).reshape(x.shape).astype(np.float32)


class Site:
    """A tap: values that are computed in FP32 and stored by ``store``."""

    def __init__(self, store, tap="attn_in", seed=0, rows=ROWS):
        self.rng, self.store, self.tap = np.random.default_rng(seed), store, tap
        self.exact = self.rng.standard_normal((LAYERS * PROMPTS, rows, SIZE)).astype(np.float32)
        self.emulation = store(self.exact)
        self.drawn = [self.statistics(store(self.noisy())) for _ in range(DRAWS)]

    def noisy(self, scale=1.0):
        spread = np.sqrt((self.exact**2).mean(-1, keepdims=True))
        return (self.exact + scale * NOISE * spread * self.rng.standard_normal(self.exact.shape)).astype(
            np.float32
        )

    def statistics(self, values):
        gap, truth = values.astype(np.float64) - self.emulation, self.emulation.astype(np.float64)
        rows = np.linalg.norm(gap, axis=-1) / np.linalg.norm(truth, axis=-1)
        whole = np.linalg.norm(gap, axis=(1, 2)) / np.linalg.norm(truth, axis=(1, 2))
        return {
            "rel_l2": whole,
            "rel_l2_worst": rows.max(1),
            "changed": (values != self.emulation).mean((1, 2)),
        }

    def trimmed(self, values):
        stack = Stack(BY_NAME[self.tap], (0,), values, self.emulation, False, np.arange(self.exact.shape[1]))
        return {name: column for name, column in scale_columns(stack).items() if name.startswith("trim")}

    def verdicts(self, values):
        truth = np.abs(self.emulation.astype(np.float64))
        norms = np.linalg.norm(truth, axis=-1)
        found = self.statistics(values)
        frame = pd.DataFrame(found).assign(
            tap=self.tap,
            layer=np.repeat(np.arange(LAYERS), PROMPTS),
            rows=self.exact.shape[1],
            elements=self.exact[0].size,
            equal=found["changed"] == 0,
            nonfinite=0.0,
            margin_min=np.nan,
            max_abs=np.abs(values - self.emulation).max((1, 2)),
            amax=truth.max((1, 2)),
            peak=truth.max((1, 2)) / np.linalg.norm(norms, axis=1),
            peak_row=(truth.max(-1) / norms).max(1),
            **self.trimmed(values),
        )
        columns = (
            np.stack([draw[k] for draw in self.drawn], 1) for k in ("rel_l2", "rel_l2_worst", "changed")
        )
        return judge(frame, Draws(*columns), PLAN, variants=21)


STORES = {
    "bf16": (bf16, "attn_in"),
    "fp32": (lambda x: x, "comp"),
    "fp8": (e4m3, "kv_store"),
    "bf16 then fp8": (lambda x: e4m3(bf16(x)), "kv_store"),
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("gap", [np.nan, np.inf])
def test_a_tensor_without_draws_has_no_verdict_and_takes_no_test_from_the_others(store, gap):
    site = Site(*STORES[store])
    wrong = site.store(site.noisy())
    wrong[7] *= np.float32(1.001)
    whole = site.verdicts(wrong)
    for draw in site.drawn:
        for column in draw.values():
            column[3] = gap
    found = site.verdicts(wrong)
    assert (found.loc[3, "verdict"], np.isnan(found.loc[3, "excess"])) == ("", True)
    assert found.loc[7, "verdict"] == whole.loc[7, "verdict"] == "outside"
    others = np.delete(np.arange(LAYERS * PROMPTS), 3)
    assert (found.loc[others, "excess"] >= 0.9 * whole.loc[others, "excess"]).all()


@pytest.mark.parametrize("store", STORES)
def test_two_builds_of_the_same_code_are_never_flagged(store):
    """20 runs of 40 tensors, each with noise of its own."""
    site = Site(*STORES[store])
    for _ in range(20):
        found = site.verdicts(site.store(site.noisy()))
        assert set(found["verdict"]) <= {"within", "bit_equal"}, found["excess"].max()


@pytest.mark.parametrize("store", STORES)
def test_two_builds_of_tensors_of_two_rows_are_never_flagged(store):
    site = Site(*STORES[store], rows=TRIM)
    for _ in range(20):
        assert "outside" not in set(site.verdicts(site.store(site.noisy()))["verdict"])


def test_a_gain_in_tensors_of_two_rows_is_outside():
    """Each alone is no more than its worst rows, and those may be a code off; so many of a layer may not."""
    site = Site(bf16, "routed", rows=TRIM)
    values = site.store(site.noisy())
    layer = slice(3 * PROMPTS, 4 * PROMPTS)
    values[layer] = site.store(1.05 * site.exact[layer])
    verdicts = site.verdicts(values)["verdict"].to_numpy()
    assert set(verdicts[layer]) == {"outside"}
    assert "outside" not in set(np.delete(verdicts, np.r_[layer]))


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        pytest.param("bf16", lambda x: x, id="BF16 store dropped"),
        pytest.param("fp32", bf16, id="BF16 store added"),
        pytest.param("bf16", lambda x: bf16(bf16(x * np.float32(1.5)) / np.float32(1.5)), id="rounded twice"),
        pytest.param("fp8", lambda x: e4m3(bf16(x)), id="BF16 added before FP8"),
        pytest.param("bf16 then fp8", e4m3, id="BF16 dropped before FP8"),
        pytest.param("fp8", lambda x: x, id="FP8 store dropped"),
        pytest.param("bf16", e4m3, id="FP8 store added"),
    ],
)
def test_one_rounding_more_or_less_leaves_within(plan, code):
    site = Site(*STORES[plan])
    found = site.verdicts(code(site.noisy()))
    assert (found["verdict"] == "outside").mean() > 0.5
    assert found["excess"].max() > 1.5


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda x: x * np.float32(1.05), id="gain"),
        pytest.param(lambda x: -x, id="sign"),
        pytest.param(lambda x: np.zeros_like(x), id="zeros"),
        pytest.param(lambda x: np.roll(x, 1, axis=0), id="rows shifted"),
        pytest.param(lambda x: np.concatenate([x[:3], 0 * x[3:4], x[4:]]), id="one row zero"),
        pytest.param(
            lambda x: np.concatenate([x[:, :16] * np.float32(1.5), x[:, 16:]], 1), id="one block scaled"
        ),
    ],
)
def test_a_fault_in_one_layer_names_that_layer(store, fault):
    site = Site(*STORES[store])
    values = site.noisy()
    for tensor in range(3 * PROMPTS, 4 * PROMPTS):
        values[tensor] = fault(values[tensor])
    found = site.verdicts(site.store(values))
    wrong = np.flatnonzero(found["verdict"] == "outside") // PROMPTS
    assert set(wrong) == {3}
    assert len(wrong) == PROMPTS


def test_a_flip_of_one_code_is_no_fault():
    site = Site(*STORES["fp8"])
    site.drawn = [site.statistics(site.emulation) for _ in range(DRAWS)]  # no draw moved anything
    values = site.emulation.copy()
    values[7, 3, 5] *= np.float32(1.125)
    found = site.verdicts(values)
    assert found["verdict"].value_counts().to_dict() == {"bit_equal": 39, "within": 1}


def test_non_finite_is_outside_and_no_rows_is_not_exercised():
    site = Site(*STORES["bf16"])
    rows = pd.DataFrame({"tap": ["attn_in"] * 3, "layer": 0, "rows": [4, 0, 4], "elements": [512, 0, 512]})
    rows = rows.assign(
        equal=[False, True, False], nonfinite=[1.0, 0, 0], margin_min=np.nan, changed=[0.1, 0, 0.0]
    )
    rows = rows.assign(rel_l2=[np.nan, np.nan, 0.0], rel_l2_worst=[np.nan, np.nan, 0.0], max_abs=0.0)
    rows = rows.assign(amax=1.0, peak=0.1, peak_row=0.1, trim_l2=0.0, trim_abs=0.0, trim_changed=0.0)
    draws = Draws(*(np.full((3, DRAWS), value) for value in (1e-5, 3e-5, 1e-4)))
    assert judge(rows, draws, PLAN, variants=1)["verdict"].tolist() == ["outside", "not_exercised", "within"]
    silent = Draws(*(np.full((3, 1), np.nan) for _ in range(3)))
    assert judge(rows, silent, PLAN, variants=1)["verdict"].tolist() == ["outside", "not_exercised", ""]
    assert site.tap == "attn_in"


def test_a_choice_with_nothing_to_leave_out_is_not_exercised():
    tensors = 40
    rows = pd.DataFrame(
        {"tap": ["topk"] * tensors, "layer": np.arange(tensors) // 5, "rows": 16, "elements": 640}
    )
    changed, margin = np.zeros(tensors), np.full(tensors, 0.2)
    changed[2], margin[0] = 0.3, np.nan
    rows = rows.assign(
        equal=changed == 0, nonfinite=0.0, margin_min=margin, changed=changed, trim_changed=changed
    )
    draws = Draws(*(np.zeros((tensors, DRAWS)) for _ in range(3)))
    found = judge(rows, draws, PLAN, variants=1)["verdict"]
    assert found[:4].tolist() == ["not_exercised", "bit_equal", "outside", "bit_equal"]


def test_an_event_that_no_draw_showed_may_take_a_row_and_no_more():
    """A flipped scale moves one row by a code's step: within. A whole row lost, or three rows moved: outside."""
    site = Site(*STORES["bf16"])
    moved = site.store(site.noisy())
    moved[7, 3] *= np.float32(1 + 2**-11)
    moved[7, 3, 5] *= np.float32(1 + 2**-7)
    assert site.verdicts(bf16(moved))["verdict"][7] == "within"
    lost = site.store(site.noisy())
    lost[7, 3] = 0
    assert site.verdicts(lost)["verdict"][7] == "outside"
    three = site.store(site.noisy())
    three[7, :3] = bf16(three[7, :3] * np.float32(1.01))
    assert site.verdicts(three)["verdict"][7] == "outside"


def test_formats_follow_the_plan():
    assert codes("kv_store", PLAN) == "e4m3"
    assert codes("kv_store", {"kv_format": "nvfp4"}) == codes("attn_out", {"kv_format": "nvfp4"}) == "e2m1"
    assert codes("index_k_store", {"index_score": "fp4"}) == "e2m1"
    assert codes("routed", PLAN) == "e2m1"
    assert codes("streams", PLAN) == "bf16"
    assert codes("attn_comb", PLAN) == ""
