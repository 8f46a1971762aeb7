"""Quantisation points: correct quantisers of every format stay clean, every planted wrong one shows, and where."""

import numpy as np
import pandas as pd
import pytest
import torch

from dsv4.judge.evaluate import findings
from dsv4.judge.measure import Notes
from dsv4.judge.quantisation import Points
from dsv4.judge.records import E4M3_VALUES
from dsv4.model.records import AlignedRecord, Fp4Key, Fp8Key, Fp8Record, Nvfp4Record
from dsv4.plan import Plan, change, flatten
from kernels.formats import bf16, e4m3, fp8_block, fp8_scaled, nvfp4
from kernels.hadamard.ref import hadamard

NOPE, ROPE, LAYERS, ROWS = 192, 64, 2, {"prefill": np.arange(8), "decode": np.arange(8, 14)}
WEIGHTS = ("self_attn.q_a_proj.weight", "self_attn.q_b_proj.weight", "mlp.experts.gate_up_proj")


class Dump:
    """As much of a dump as the points read: one array a (layer, tap), rows split into the phases."""

    def __init__(self, arrays):
        self.arrays, self.attrs = arrays, {"n_rope": ROPE}

    def layers(self, mode, phase):
        return sorted({layer for layer, _ in self.arrays})

    def has(self, mode, phase, layer, tap):
        return (layer, tap) in self.arrays

    def get(self, mode, phase, layer, tap):
        return self.arrays[layer, tap][ROWS[phase]]

    def rows(self, mode, phase):
        return ROWS[phase]

    def entry_positions(self, mode, phase, layer):
        return ROWS[phase]


def inputs(size, seed=0):
    """Rows (14, size) whose magnitudes span decades, between rows and between blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((14, size)) * np.exp(rng.normal(0, 2, (14, 1)))
    x *= np.repeat(np.exp(rng.normal(0, 2, (14, size // 16))), 16, axis=1)
    return torch.from_numpy(x.astype(np.float32))


def points(tap, made_from, x, stored, *, fields=None, weight="nvfp4", prompts=("one",), more=None):
    """Lines of a variant that stored the tap in layer 1 as given, and correctly nothing else."""
    weights = {f"model.layers.{layer}.{name}": weight for layer in range(LAYERS) for name in WEIGHTS}
    found = Points(flatten(change(Plan(), fields or {})), weights)
    arrays = {(1, tap): stored.numpy()} | {(1, name): array.numpy() for name, array in (more or {}).items()}
    for prompt in prompts:
        found.add(Dump(arrays), Dump({(1, made_from): x.numpy()}), prompt)
    return found.lines()


def failed(lines):
    """(kind, layer, tap, row, text) of all that fails a variant with these points."""
    names = (
        "mode",
        "layer",
        "tap",
        "part",
        "against",
        "verdict",
        "nonfinite",
        "invalid",
        "duplicates",
        "equal",
    )
    nothing = pd.DataFrame({name: pd.Series(dtype=float) for name in names})
    found = findings(nothing, Notes(points=lines), (), {}, ())
    return [(one.kind, one.layer, one.tap, one.row, one.text) for one in found]


def record(x, encoder, fields=None, *, change_bytes=None, change_values=None):
    """Points of kv stored by a record's encoder, with its bytes or its values changed."""
    data, scales = encoder.encode(x)
    if change_bytes:
        data, scales = change_bytes(data, scales)
    values, _ = encoder.decode(data, scales)
    values = change_values(values.clone()) if change_values else values
    return points(
        "kv_store", "kv", x, values, fields=fields, more={"kv_bytes": torch.cat((data, scales), -1)}
    )


def bins(lines, part="all"):
    return next(line["bins"][0] for line in lines if line["part"] == part)


RECORDS = {
    "seven scales": (Fp8Record(NOPE), {}),
    "aligned": (AlignedRecord(NOPE), {"kv_record": "aligned"}),
    "nvfp4": (Nvfp4Record(NOPE), {"kv_format": "nvfp4"}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RECORDS)
def test_a_correct_record_has_nothing_beyond_and_the_scale_it_applied(name, seed):
    encoder, fields = RECORDS[name]
    x = inputs(NOPE + ROPE, seed)
    x[3] = 0.0
    x[4, :64] = 1e-7 * x[5, :64]  # a block under the floor of an FP8 scale, or lost with its NVFP4 scale
    lines = record(x, encoder, fields)
    assert failed(lines) == []
    assert [line["part"] for line in lines] == ["nope", "rope"]
    assert sum(bins(lines, "rope")[3:]) == 0
    assert lines[0]["ratio"] == [[1.0, 1.0]]
    assert (lines[0]["undecoded"], lines[0]["unapplied"]) == ([0], [0])
    if name == "seven scales":
        assert sum(bins(lines, "nope")[3:]) == 0
        assert lines[0]["largest"][0] <= 0.5


@pytest.mark.parametrize(
    ("weight", "store"),
    [
        ("nvfp4", nvfp4.round),
        ("fp8", lambda x: fp8_block.round(x, 128)),
        ("mxfp4", lambda x: fp8_block.round(x, 128)),
        ("bf16", bf16.round),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_correct_activation_has_nothing_beyond(weight, store, seed):
    x = inputs(256, seed)
    lines = points("attn_in_q", "attn_in", x, store(x), weight=weight)
    assert failed(lines) == []
    assert sum(bins(lines)) == x.numel()
    assert len(points("attn_in_q", "attn_in", x, x, weight="fp32")) == 0  # nothing is rounded


@pytest.mark.parametrize(("weight", "store"), [("nvfp4", nvfp4.round), ("bf16", bf16.round)])
def test_fp32_noise_ahead_of_a_store_is_no_other_rounding(weight, store):
    x = inputs(256)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).clamp(-2, 2) * 2.0**-22
    assert failed(points("attn_in_q", "attn_in", x, store(x * (1 + noise)), weight=weight)) == []


def test_a_doubled_rounding_before_nvfp4_is_seen():
    x = inputs(256)
    lines = points("attn_in_q", "attn_in", x, nvfp4.round(bf16.round(x)))
    assert [kind for kind, *_ in failed(lines)] == ["rounding"]


def test_a_launch_gsa_is_the_plans_at_its_own_sites():
    x = inputs(256)
    stored = nvfp4.round(x, nvfp4.row_gsa(x).max())
    fields = {"norm_quant": "fused_launch_gsa"}
    assert failed(points("attn_in_q", "attn_in", x, stored, fields=fields)) == []
    assert [kind for kind, *_ in failed(points("qr_q", "qr", x, stored, fields=fields))] == ["rounding"]


@pytest.mark.parametrize("fields", [{}, {"index_score": "fp4"}], ids=["fp8", "fp4"])
def test_a_correct_index_key_has_nothing_beyond(fields):
    x, key = inputs(128), Fp4Key(128) if fields else Fp8Key(128)
    values, scale = key.decode(*key.encode(x))
    stored = hadamard(values) if fields else values * scale
    lines = points("index_k_store", "index_k", x, stored, fields=fields)
    assert failed(lines) == []
    assert sum(bins(lines)[3:]) == 0
    doubled = (
        hadamard(key.decode(*key.encode(bf16.round(x)))[0]) if fields else fp8_scaled.round(bf16.round(x))
    )
    assert [kind for kind, *_ in failed(points("index_k_store", "index_k", x, doubled, fields=fields))] == [
        "rounding"
    ]


def truncated(x, scale):
    """E4M3 codes of magnitudes rounded towards zero."""
    codes = e4m3.encode(x / scale)
    high = e4m3.decode(codes).abs() > (x / scale).abs()
    return codes - high.to(torch.uint8)


def truncating(data, scales, x):
    _, scale = fp8_block.quantise(x[:, :NOPE], 64)
    return torch.cat((truncated(x[:, :NOPE], scale.repeat_interleave(64, -1)), data[:, NOPE:]), -1), scales


def test_a_truncation_reaches_one_step():
    x = inputs(NOPE + ROPE)
    lines = record(x, Fp8Record(NOPE), change_bytes=lambda data, scales: truncating(data, scales, x))
    found = failed(lines)
    assert [(kind, layer, tap) for kind, layer, tap, *_ in found] == [("rounding", 1, "kv_store")]
    assert "kv_store (kv_store) nope: " in found[0][-1]
    assert "% of values are not the nearest that e4m3_ue8m0_64 holds" in found[0][-1]
    share = np.array(bins(lines, "nope")) / (14 * NOPE)
    assert share[3] == pytest.approx(0.5, abs=0.05)  # to 1 step
    assert share[4:].sum() == 0
    assert lines[0]["unapplied"] == [0]  # another rounding is not another scale


def test_a_rounding_that_is_doubled_goes_just_past_half_a_step():
    x = inputs(NOPE + ROPE)
    lines = record(bf16.round(x), Fp8Record(NOPE))
    assert failed(lines) == []  # of BF16 inputs: one rounding
    data, scales = Fp8Record(NOPE).encode(bf16.round(x))
    values, _ = Fp8Record(NOPE).decode(data, scales)
    lines = points("kv_store", "kv", x, values, more={"kv_bytes": torch.cat((data, scales), -1)})
    assert [kind for kind, *_ in failed(lines)] == ["rounding"]
    assert 0.5 < lines[0]["largest"][0] <= 0.5 + 1 / 32
    assert 0 < lines[0]["beyond"][0] < 0.1 * 14 * NOPE


@pytest.mark.parametrize("name", RECORDS)
def test_scales_rolled_by_one_token_are_not_the_scales_applied(name):
    encoder, fields = RECORDS[name]
    x = inputs(NOPE + ROPE)
    x[9:] = x[8]  # equal rows: here the neighbour's scales are the row's own
    lines = record(x, encoder, fields, change_bytes=lambda data, scales: (data, scales.roll(1, dims=0)))
    kind, layer, tap, row, text = failed(lines)[0]
    assert (kind, layer, tap, row) == ("scale", 1, "kv_bytes", 0)
    assert "scale stored is not the scale applied: in " in text
    assert text.endswith("first at one, prefill, token 0")
    assert lines[0]["undecoded"] == [0]  # reader and bytes agree: only the writer can tell
    low, high = lines[0]["ratio"][0]
    assert low < 0.5
    assert high > 2


def test_one_byte_of_one_row_is_found_there():
    def one_byte(data, scales):
        scales[11, 2] += 1
        return data, scales

    lines = record(inputs(NOPE + ROPE), Fp8Record(NOPE), change_bytes=one_byte)
    assert lines[0]["unapplied"] == [1]
    assert lines[0]["blocks"] == [14 * 3]
    assert lines[0]["ratio"] == [[1.0, 2.0]]
    kind, _, tap, row, text = failed(lines)[0]
    assert (kind, tap, row) == ("scale", "kv_bytes", 11)
    assert "in 1 of 42 blocks scale bytes are 1 to 2 times what these values ask for" in text
    assert "one, decode, token 11" in text


def test_dividing_by_the_exact_scale_and_storing_the_rounded_up_one_is_caught():
    x = inputs(NOPE + ROPE)

    def unpaired(data, scales):
        exact = (x[:, :NOPE].unflatten(-1, (3, 64)).abs().amax(-1) / 448).repeat_interleave(64, -1)
        return torch.cat((e4m3.encode(x[:, :NOPE] / exact), data[:, NOPE:]), -1), scales

    lines = record(x, Fp8Record(NOPE), change_bytes=unpaired)
    assert failed(lines)[0][0] == "scale"
    assert lines[0]["ratio"] == [[1.0, 1.0]]  # the byte is right, the codes are another scale's


def test_a_reader_that_applies_another_scale_is_caught_by_the_bytes():
    def twice(values):
        values[6] *= 2
        return values

    lines = record(inputs(NOPE + ROPE), Fp8Record(NOPE), change_values=twice)
    kind, _, tap, row, text = failed(lines)[0]
    assert (kind, tap, row) == ("scale", "kv_bytes", 6)
    assert "in 1 rows the bytes decode to other values than kv_store" in text
    assert lines[0]["unapplied"] == [0]


def test_a_scale_twice_too_large_but_applied_is_a_matter_of_rounding():
    x = inputs(NOPE + ROPE)

    def coarse(data, scales):
        codes = e4m3.encode(
            x[:, :NOPE] / (2 * fp8_block.quantise(x[:, :NOPE], 64)[1].repeat_interleave(64, -1))
        )
        return torch.cat((codes, data[:, NOPE:]), -1), torch.where(scales > 0, scales + 1, scales)

    lines = record(x, Fp8Record(NOPE), change_bytes=coarse)
    assert lines[0]["ratio"] == [[2.0, 2.0]]
    assert lines[0]["unapplied"] == [0]
    assert "rounding" in {kind for kind, *_ in failed(lines)}


@pytest.mark.parametrize("tap", ["nope", "rope", "scale byte", "input"])
def test_what_is_not_finite_is_never_fine(tap):
    x = inputs(NOPE + ROPE)
    if tap == "input":
        x[2, 3] = torch.nan
        lines = record(x, Fp8Record(NOPE))
    elif tap == "scale byte":

        def nan_scale(data, scales):
            scales[2, 0] = 0xFF
            return data, scales

        lines = record(x, Fp8Record(NOPE), change_bytes=nan_scale)
    else:

        def poison(values):
            values[2, 3 if tap == "nope" else -1] = torch.nan
            return values

        lines = record(x, Fp8Record(NOPE), change_values=poison)
    kinds = [kind for kind, *_ in failed(lines)]
    assert "rounding" in kinds
    assert "scale" in kinds
    part = lines[1] if tap == "rope" else lines[0]
    assert part["largest"] == [None]  # as JSON holds it
    assert part["bins"][0][-1] > 0
    assert part["worst"] == [["one", "prefill", 2]]


def test_bytes_of_another_record_say_so():
    x = inputs(NOPE + ROPE)
    values, _ = Fp8Record(NOPE).decode(*Fp8Record(NOPE).encode(x))
    lines = points("kv_store", "kv", x, values, more={"kv_bytes": torch.zeros(14, 300, dtype=torch.uint8)})
    assert (
        "its bytes cannot be decoded: 300 bytes a row, a record of this plan has 328" in failed(lines)[0][-1]
    )


def test_prompts_are_summed_and_the_worst_place_is_kept():
    x = inputs(256)
    once, twice = (points("attn_in_q", "attn_in", x, bf16.round(x), prompts=p) for p in (("a",), ("a", "b")))
    assert twice[0]["bins"][0] == [2 * count for count in once[0]["bins"][0]]
    assert twice[0]["beyond"][0] == 2 * once[0]["beyond"][0]
    assert twice[0]["largest"] == once[0]["largest"]
    assert twice[0]["worst"] == once[0]["worst"]


def test_the_estimate_of_a_scale_stands_on_codes_alone():
    assert E4M3_VALUES[0x38] == 1.0
    x = torch.zeros(14, NOPE + ROPE)
    x[:, :64] = 1.0  # amax 1: scale 2^-8, codes 256
    lines = record(x, Fp8Record(NOPE))
    assert bins(lines, "nope") == [14 * NOPE, 0, 0, 0, 0, 0]
    assert lines[0]["blocks"] == [42]
