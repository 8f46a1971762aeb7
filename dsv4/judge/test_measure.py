import h5py
import numpy as np
import pytest

from dsv4.dump import DumpReader
from dsv4.judge.compare import COLUMNS, compare
from dsv4.judge.conftest import POSITIONS, Audit, bf16
from dsv4.judge.evaluate import select
from dsv4.judge.measure import measure, read
from dsv4.stored import file_sha256, sidecar
from dsv4.taps import BY_NAME, MODES


def one(frame, **where):
    rows = select(frame[frame["step"] < 0], **where)
    assert len(rows) == 1, rows
    return rows.iloc[0]


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    def break_it(mode, phase, layer, tap, array):
        if mode == "isolated" and phase == "decode" and layer == 1:
            if tap.name == "q":
                array = array.copy()
                array[3, 1] *= -1  # one head of one row
            if tap.name == "streams":
                array = array.copy()
                array[:, 2] = 0.0
            if tap.name == "kv_bytes":
                array = array.copy()
                array[:, -8:] += 1  # the scale bytes
            if tap.name == "attn_out":
                array = array.copy()
                array[..., 64:] *= np.float32(1.1)  # rope
        return array

    audit = Audit(tmp_path_factory.mktemp("parts")).references()
    return audit.variant("B0_unfused", break_it).measured("B0_unfused")[0]


def test_the_table_is_the_contract(frame):
    assert tuple(frame.columns) == COLUMNS
    assert set(frame["against"]) == {"trained", "plain", "floor"}
    assert set(frame["mode"]) == {"isolated", "compounded"}
    assert set(frame.loc[frame["against"] == "floor", "mode"]) == {"isolated"}
    assert (frame["prompt"] == "one").all()


def test_parts_show_what_the_whole_hides(frame):
    at = {"mode": "isolated", "phase": "decode", "against": "trained"}
    layer = frame[frame["layer"] == 1]
    head = one(layer, tap="q", part="head", **at)
    assert head["cos_min"] < -0.99
    assert head["worst_row"] == POSITIONS["decode"][3]
    assert one(layer, tap="q", part="all", **at)["cos"] > 0.8
    rope, nope = (one(layer, tap="attn_out", part=part, **at) for part in ("rope", "nope"))
    assert rope["gain"] == pytest.approx(1.1, abs=2e-3)
    assert nope["gain"] == pytest.approx(1.0, abs=2e-3)
    assert one(layer, tap="streams", part="stream2", **at)["cos"] == 0.0
    assert one(layer, tap="streams", part="stream1", **at)["cos"] > 0.999


def test_bytes_come_apart_into_codes_rope_and_scales(frame):
    at = {"mode": "isolated", "phase": "decode", "against": "floor", "tap": "kv_bytes"}
    layer = frame[frame["layer"] == 1]
    assert one(layer, part="scale", **at)["changed"] == 1.0
    assert one(layer, part="nope", **at)["changed"] == one(layer, part="rope", **at)["changed"] == 0.0


def test_taps_are_compared_with_the_one_they_name(frame):
    rows = select(frame, tap="attn_in_q", against="trained", mode="isolated", part="all")
    assert len(rows) == 4  # two layers, two phases
    assert rows["rel_l2"].between(1e-3, 2e-3).all()
    assert select(frame, tap="kv_bytes", against="trained").empty


def test_decode_steps_of_the_free_run_stand_alone(frame):
    steps = frame[frame["step"] >= 0]
    assert set(steps["tap"]) == {"attn_out", "moe_out", "logits"}
    assert set(steps["mode"] + steps["phase"] + steps["against"]) == {"compoundeddecodetrained"}
    logits = steps[steps["tap"] == "logits"].sort_values("step")
    assert logits["step"].tolist() == list(range(8))
    assert logits["worst_row"].tolist() == POSITIONS["decode"].tolist()
    whole = one(frame, tap="logits", mode="compounded", phase="decode", against="trained", part="all")
    assert logits["kl_nats"].mean() == pytest.approx(whole["kl_nats"], abs=1e-12)


def test_index_scores_tell_the_choice_they_would_make(frame):
    row = one(frame, tap="index_scores", mode="isolated", phase="decode", against="trained", part="all")
    assert (row["overlap"], row["mass_lost"]) == (1.0, 0.0)
    assert row["margin_min"] > 0
    assert row["nonfinite"] == 0


def test_an_entry_made_visible_too_early_is_no_finite_difference(audit):
    def leak(mode, phase, layer, tap, array):
        return np.where(np.isinf(array), np.float32(9), array) if tap.name == "index_scores" else array

    frame, _ = audit.variant("B0_unfused", leak).measured("B0_unfused")
    row = one(frame, tap="index_scores", mode="isolated", phase="prefill", against="trained", part="all")
    assert row["nonfinite"] > 0
    assert np.isnan(row["rel_l2"])


def test_a_parent_is_compared_tap_by_tap(audit):
    audit.variant("B0_unfused")
    audit.variant("P4", lambda m, p, layer, tap, x: x * 2 if tap.name == "attn_in" else x)
    frame, notes = audit.measured("P4")
    rows = select(frame, against="parent", mode="isolated", part="all")
    assert set(rows.loc[~rows["equal"], "tap"]) == {"attn_in"}
    assert notes.parent


def test_the_b1_family_meets_b0_by_name(audit):
    for name in ("B0", "B1a", "B1"):
        audit.variant(name)
    rows = select(audit.measured("B1")[0], against="B0")
    assert set(rows["tap"]) == {"attn_out"}
    assert set(rows["mode"]) == {"isolated"}


def test_another_record_has_no_byte_in_common(audit):
    audit.variant("B0")
    shorter = lambda m, p, layer, tap, x: x[:, :-50].copy() if tap.kind == "bytes" else x  # noqa: E731
    frame, notes = audit.variant("KV_nvfp4", shorter).measured("KV_nvfp4")
    assert notes.error == ""
    assert (
        one(frame[frame["layer"] == 0], tap="kv_bytes", against="parent", phase="decode", part="all")[
            "changed"
        ]
        == 1
    )


def test_missing_taps_are_listed_unless_declared(audit):
    leave = lambda m, p, layer, tap, x: None if tap.name == "lse" and layer == 1 else x  # noqa: E731
    _, notes = audit.variant("B0_unfused", leave).measured("B0_unfused")
    assert ["isolated", "decode", 1, "lse"] in notes.missing
    assert notes.taps["isolated"][0] == notes.taps["isolated"][1] - 1
    _, notes = audit.variant("B0_unfused", leave, declared_missing=["lse"]).measured("B0_unfused")
    assert (notes.missing, notes.declared) == ([], ["lse"])


@pytest.mark.parametrize("mode", MODES)
def test_taps_are_counted_mode_by_mode(audit, mode):
    whole = audit.variant("B0_unfused").measured("B0_unfused")[1].taps
    assert whole["isolated"][0] == whole["isolated"][1] == whole["compounded"][1] > whole["compounded"][0]
    leave = lambda m, p, layer, tap, x: None if (tap.name, layer, m) == ("lse", 1, mode) else x  # noqa: E731
    found = audit.variant("B0_unfused", leave, declared_missing=["lse"]).measured("B0_unfused")[1].taps
    assert found == whole | {mode: [whole[mode][0] - 1, whole[mode][1]]}


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        (
            {"checkpoint": "d" * 8},
            r"variants/B0_unfused/one\.h5: checkpoint is 'dddddddd', expected 'cccccccc'",
        ),
        ({"prompt": "q" * 8}, "prompt is 'qqqqqqqq', expected 'pppppppp'"),
        ({"schema": 7}, "schema is 7, expected 1"),
        ({"plan": {"norm_quant": "fused"}}, "plan is .*fused.* expected .*unfused"),
    ],
    ids=["checkpoint", "prompt", "schema", "plan"],
)
def test_dumps_of_another_run_are_a_result_not_a_crash(audit, attrs, message):
    frame, notes = audit.variant("B0_unfused", **attrs).measured("B0_unfused")
    assert frame.empty
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(notes.error)
    assert read(audit.results / "metrics" / "B0_unfused.parquet")[1].error == notes.error


def test_a_floor_of_some_prompts_is_no_floor(audit):
    audit.variant("B0_unfused")
    for folder in ("reference", "plain", "variants/B0_unfused", "floor/B0_unfused"):
        for name in ("one.h5", "one.h5.sha256"):
            path = audit.results / folder / name
            path.with_name(name.replace("one", "two")).write_bytes(path.read_bytes())
    ladder, prompts = audit.config.ladder, ["one", "two"]
    assert measure(audit.results, ladder, "B0_unfused", prompts)[1].floor
    (audit.results / "floor" / "B0_unfused" / "two.h5").unlink()
    notes = measure(audit.results, ladder, "B0_unfused", prompts)[1]
    assert (notes.error, notes.floor) == ("", False)


def test_a_truncated_dump_is_named(audit):
    path = audit.variant("B0_unfused").results / "variants" / "B0_unfused" / "one.h5"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "truncated or changed since it was written" in audit.measured("B0_unfused")[1].error


def test_rows_of_other_tokens_are_refused_naming_both(audit):
    audit.variant("B0_unfused")
    path = audit.results / "variants" / "B0_unfused" / "one.h5"
    with h5py.File(path, "a") as file:
        file["isolated/decode/positions"][...] += 1
    sidecar(path).write_text(file_sha256(path))
    error = audit.measured("B0_unfused")[1].error
    assert "isolated/decode: row 0 is token 41 in" in error
    assert "variants/B0_unfused/one.h5" in error
    assert "but 40 in" in error
    assert "reference/one.h5" in error


def test_shapes_of_another_model_are_refused(audit):
    wider = lambda m, p, layer, tap, x: np.tile(x, 2) if tap.name == "moe_out" else x  # noqa: E731
    assert "moe_out is (20, 128) in" in audit.variant("B0_unfused", wider).measured("B0_unfused")[1].error


def test_every_tap_and_part_is_measured(audit):
    audit.variant("B0_unfused")
    with (
        DumpReader(audit.results / "variants" / "B0_unfused" / "one.h5") as test,
        DumpReader(audit.results / "floor" / "B0_unfused" / "one.h5") as floor,
    ):
        frame = compare(test, floor, modes=("isolated",), against="floor")
    assert set(frame["tap"]) == set(BY_NAME)
    assert frame["equal"].all()
    parts = frame.groupby("tap")["part"].agg(set)
    assert parts["q"] == {"all", "nope", "rope", "head"}
    assert parts["kv"] == {"all", "nope", "rope"}
    assert parts["streams"] == {"all", "stream0", "stream1", "stream2", "stream3"}


def test_rounding_helper_is_nearest_even():
    assert bf16(np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1.5])).tolist() == [1.0, 1.015625, -1.5]
