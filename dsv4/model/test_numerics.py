"""What each word of a plan does: which stages it changes when all others read the same tensors, and how."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.model import numerics
from dsv4.model._trace import bits, differing, trace
from dsv4.model.checkpoint import Tensors, build
from dsv4.model.numerics import Numerics
from dsv4.model.ops import REFS
from dsv4.model.random_model import random_tensors, small_config
from dsv4.model.stages import rope_frequencies
from dsv4.model.transformer import Transformer
from dsv4.model.weights import ModelWeights
from dsv4.plan import Plan, change, choices, flatten
from dsv4.taps import BY_NAME, STAGES
from kernels.formats import bf16, e4m3, fp8_block, fp8_scaled, mxfp4, nvfp4
from kernels.hadamard.ref import hadamard
from kernels.linear.ref import Activation
from kernels.rope.ref import cos_sin

CONFIG = small_config(head_dim=256)  # three scales a record: with one, an aligned record is the same numbers


def unequal_weights() -> ModelWeights:
    """Random weights whose KV groups of 64 differ in size, so that one scale for all of them costs something."""
    stored = random_tensors(CONFIG, 0)
    for name, weight in stored.items():
        if name.endswith(("self_attn.kv_norm.weight", "compressor.kv_norm.weight")):
            weight[:64] *= 64
    return build(CONFIG, Tensors(stored, CONFIG))


WEIGHTS = unequal_weights()
TOKENS = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0))
LAYERS = range(CONFIG.num_hidden_layers)


def model(num: Numerics) -> Transformer:
    return Transformer(CONFIG, WEIGHTS, num, page_size=8)


def plan(**changes: str) -> Numerics:
    return numerics.of_plan(
        change(Plan(), {name.replace("__", "."): to for name, to in changes.items()}), CONFIG
    )


@cache
def written(num: Numerics) -> dict[tuple[int | str, str], Any]:
    """Everything that a free run writes."""
    found: dict[tuple[int | str, str], Any] = {}

    def probe(layer: int | str, name: str, value: Any) -> Any:
        found[layer, name] = value
        return value

    transformer = model(num)
    transformer.forward([transformer.new_cache()], [TOKENS], probe)
    return found


def plain_tensor(value: Tensor | Activation) -> Tensor:
    return bits(value.dequantised() if isinstance(value, Activation) else value)


def changed_stages(old: Numerics, new: Numerics) -> dict[int | str, set[str]]:
    """Stages of each layer that write something else under ``new``, given the tensors that ``old`` wrote."""
    before = written(old)
    found: dict[int | str, set[str]] = {layer: set() for layer in (*LAYERS, "model")}

    def probe(layer: int | str, name: str, value: Any) -> Any:
        if name.endswith("_closed"):
            return value
        if not torch.equal(plain_tensor(value), plain_tensor(before[layer, name])):
            found[layer].add(BY_NAME[name].stage)
        return before[layer, name]

    transformer = model(new)
    transformer.forward([transformer.new_cache()], [TOKENS], probe)
    return found


def where(stages: set[str]) -> dict[int | str, set[str]]:
    """The stages in every layer that has them."""
    transformer = model(numerics.plain(CONFIG))
    there = {layer: stages & {*transformer.stages[layer].names} for layer in LAYERS}
    return there | {"model": stages & {*transformer.head.names}}


NORMS = {"attn_mhc", "moe_mhc"}
STORED = {"kv_store", "comp_store", "attend"}  # attention reads what was stored
FUSED = {"norm_quant": "fused", "mhc_quant": "fused", "q_a_norm": "fused"}  # B0
CLAIMS: list[tuple[dict[str, str], str, str, set[str]]] = [
    # stands on, field, value, stages that it changes
    ({}, "norm_quant", "fused", NORMS),
    ({}, "norm_quant", "fused_scalar_gsa", NORMS | {"attn_quant", "moe_quant"}),
    ({}, "norm_quant", "fused_launch_gsa", NORMS | {"attn_quant", "moe_quant"}),
    ({"norm_quant": "fused"}, "norm_quant", "fused_scalar_gsa", {"attn_quant", "moe_quant"}),
    ({}, "mhc_quant", "fused", NORMS),
    ({"norm_quant": "fused"}, "mhc_quant", "fused", NORMS),
    ({}, "q_a_norm", "fused", {"q_a"}),
    (FUSED, "kv_format", "nvfp4", STORED),
    (FUSED, "kv_read", "in_place", set()),
    ({"kv_record": "aligned"}, "kv_read", "in_place", set()),
    ({"kv_format": "nvfp4"}, "kv_read", "in_place", {"attend"}),  # NVFP4 x gsa is no BF16 number
    (FUSED, "kv_record", "aligned", STORED),
    (FUSED, "q_format", "fp8", {"attend"}),
    (FUSED, "q_format", "fp8x2", {"attend"}),
    ({"q_format": "fp8"}, "q_format", "fp8x2", {"attend"}),
    (FUSED, "rope_format", "fp8", {"attend"}),
    (FUSED, "pv_format", "fp8", {"attend"}),
    (FUSED, "index_score", "fp8", {"index_score"}),
    (FUSED, "index_score", "fp4", {"index_k_store", "index_score"}),
    ({}, "kv_norm", "fused", {"kv"}),
    ({}, "casts.router", "native", set()),  # the norm has rounded to BF16 already
    ({"norm_quant": "fused"}, "casts.router", "native", {"route"}),
    ({}, "casts.swiglu", "native", {"experts", "shared"}),
    ({}, "casts.attn_out", "native", {"attend"}),
    ({}, "casts.head", "native", {"head"}),
]
RESIDUAL = {"attn_mix", "moe_mix"}


@pytest.mark.parametrize(
    ("on", "field", "value", "stages"),
    [
        pytest.param(*claim, id=f"{claim[1]}={claim[2]} on {','.join(claim[0].values()) or 'B0_unfused'}")
        for claim in CLAIMS
    ],
)
def test_a_field_changes_the_stages_that_it_names_and_no_other(on, field, value, stages):
    base = change(Plan(), on)
    old, new = numerics.of_plan(base, CONFIG), numerics.of_plan(change(base, {field: value}), CONFIG)
    assert changed_stages(old, new) == where(stages)


@pytest.mark.parametrize(
    ("value", "layers"),
    [("fp32", {0, 1, 2, 3}), ("fp32_first_half", {0, 1}), ("fp32_last_half", {2, 3})],
)
def test_the_residual_is_changed_in_its_layers_alone(value, layers):
    expected = {layer: RESIDUAL if layer in layers else set() for layer in (*LAYERS, "model")}
    if 0 in layers:
        expected[0] = RESIDUAL | {"attn_mhc"}  # reads the embedding as it is stored
    assert changed_stages(plan(), plan(residual=value)) == expected


def test_every_value_of_every_field_has_a_claim():
    claimed = {(field, value) for _, field, value, _ in CLAIMS} | set(flatten(Plan()).items())
    claimed |= {("residual", value) for value in choices()["residual"]}
    assert claimed == {(field, value) for field, values in choices().items() for value in values}
    assert {stage for *_, stages in CLAIMS for stage in stages} <= {*STAGES}


def test_trained_differs_from_plain_where_kv_entries_and_the_indexer_are_stored_and_read():
    found = changed_stages(numerics.plain(CONFIG), numerics.trained(CONFIG))
    assert found == where(STORED | {"index_k_store", "index_score"})
    plain, trained = numerics.plain(CONFIG), numerics.trained(CONFIG)
    assert plain.attn == trained.attn  # attention itself rounds nothing: it reads other rows
    assert plain.read is trained.read


def test_plain_stores_what_it_computed():
    found = written(numerics.plain(CONFIG))
    for layer in LAYERS:
        pairs = [("kv_store", "kv"), ("attn_in_q", "attn_in"), ("qr_q", "qr"), ("moe_in_q", "moe_in")]
        pairs += [("comp_store", "comp")] if CONFIG.compress_ratios[layer] else []
        pairs += [("index_k_store", "index_k")] if CONFIG.kind(layer) == "csa" else []
        for stored, computed in pairs:
            assert torch.equal(plain_tensor(found[layer, stored]), bits(found[layer, computed])), stored


@pytest.mark.parametrize(
    "base", [{}, {"kv_record": "aligned"}, {"q_format": "fp8", "pv_format": "fp8"}], ids=str
)
def test_reading_records_in_place_equals_gathering_them_bitwise(base):
    gathered, in_place = (
        trace(model(plan(**base, kv_read=read)), [TOKENS])[0] for read in ("gather_bf16", "in_place")
    )
    assert differing(gathered, in_place) == []


ALWAYS_BF16 = (
    "q",
    "index_q",
    "attn_out",
    "attn_proj",
    "routed",
    "shared",
    "moe_out",
    "streams_mid",
    "streams",
)
BY_FUSION = ("attn_in", "moe_in", "qr", "kv", "hidden")
NEVER_BF16 = (
    "attn_pre",
    "attn_post",
    "attn_comb",
    "router_scores",
    "expert_weights",
    "comp",
    "index_k",
    "lse",
    "logits",
)


def on_bf16_grid(num: Numerics, name: str) -> bool:
    tensors = [value for (_, key), value in written(num).items() if key == name]
    return all(torch.equal(bits(x), bits(bf16.round(x))) for x in tensors)


def test_unfused_values_pass_through_bf16_and_fused_ones_do_not():
    unfused = plan()
    fused = plan(**FUSED, kv_norm="fused", casts__head="native")
    for name in ALWAYS_BF16:
        assert on_bf16_grid(unfused, name), name
        assert on_bf16_grid(fused, name), name
    for name in BY_FUSION:
        assert on_bf16_grid(unfused, name), name
        assert not on_bf16_grid(fused, name), name
    for name in NEVER_BF16:
        assert not on_bf16_grid(unfused, name), name


def test_a_gemm_reads_its_input_in_the_format_of_its_weight():
    found = written(plan())
    for layer in LAYERS:
        for name, source in (("attn_in_q", "attn_in"), ("qr_q", "qr"), ("moe_in_q", "moe_in")):
            codes, scales, gsa = nvfp4.quantise(found[layer, source])
            assert torch.equal(found[layer, name].values, nvfp4.scaled_values(codes, scales))
            assert torch.equal(found[layer, name].row_scale, gsa)


def test_launch_gsa_is_the_largest_and_leaves_no_gain():
    found = written(plan(norm_quant="fused_launch_gsa"))
    x, stored = found[1, "attn_in"], found[1, "attn_in_q"]
    assert (stored.row_scale == x.abs().amax() / 2688).all()
    back = stored.dequantised().double()
    gain = (back * x.double()).sum(-1) / x.double().square().sum(-1)
    largest = x.abs().amax(-1)
    assert largest.max() / largest.min() > 1.5  # the gain of the smallest row, were its own gsa used to undo
    assert (gain - 1).abs().max() < 0.05


def test_scalar_gsa_gives_each_row_the_gain_of_the_largest_over_its_own():
    found = written(plan(norm_quant="fused_scalar_gsa"))
    x, stored = found[1, "attn_in"], found[1, "attn_in_q"]
    own = nvfp4.row_gsa(x)
    back = stored.dequantised().double()
    gain = (back * x.double()).sum(-1) / x.double().square().sum(-1)
    assert (gain / (own.max() / own).squeeze(-1).double() - 1).abs().max() < 0.05
    assert gain.max() > 1.5


def test_the_residual_is_stored_from_the_embedding_on():
    first: list[Tensor] = []
    for num in (plan(), plan(residual="fp32_last_half"), plan(residual="fp32")):
        streams = WEIGHTS.embed[TOKENS]
        mix = written(num)[0, "attn_pre"]
        first.append(mix)
        expected = streams if num.residual(0) is numerics.exact else bf16.round(streams)
        again = (
            model(num)
            .ops.hc_mix(
                expected[:, None].expand(-1, 4, -1),
                WEIGHTS.layers[0].attn_hc.fn,
                WEIGHTS.layers[0].attn_hc.base,
                WEIGHTS.layers[0].attn_hc.scale,
                norm_eps=CONFIG.rms_norm_eps,
                hc_eps=CONFIG.hc_eps,
                iterations=CONFIG.hc_sinkhorn_iters,
            )
            .pre
        )
        assert torch.equal(bits(mix), bits(again))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_fp8_query_has_one_power_of_two_scale_a_head():
    q = (
        torch.randn(50, 4, 448, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-6, 3, 50)[:, None, None]
    )
    one = numerics._fp8_row(q)
    assert torch.equal(bits(one), bits(fp8_block.round(bf16.round(q), 448)))
    codes, scale = fp8_block.quantise(bf16.round(q), 448)
    assert torch.equal(one, e4m3.decode(codes) * scale)
    assert (torch.frexp(scale).mantissa == 0.5).all()


def test_a_second_fp8_term_leaves_a_hundredth_of_the_firsts_error():
    q = bf16.round(torch.randn(50, 4, 448, generator=torch.Generator().manual_seed(0)))
    errors = [(round_q(q) - q).norm() / q.norm() for round_q in (numerics._fp8_row, numerics._fp8_two_terms)]
    assert 0.02 < errors[0] < 0.04  # 3 mantissa bits
    assert errors[1] < errors[0] / 20


def test_fp8_probabilities_keep_one_and_reach_two_to_the_minus_17():
    p = torch.tensor([1.0, 0.5, 2.0**-17, 2.0**-18 * 1.01, 2.0**-18, 0.0, 1 / 3])
    expected = torch.tensor([1.0, 0.5, 2.0**-17, 2.0**-17, 0.0, 0.0, 88 / 256])
    assert torch.equal(numerics._fp8_probability(p), expected)


# What attention and the indexer read, written again in FP64.

READ_Q = {
    "bf16": lambda x: bf16.round(x),
    "fp8": lambda x: fp8_block.round(bf16.round(x), x.shape[-1]),
    "fp8x2": numerics._fp8_two_terms,
}
READ_P = {"bf16": bf16.round, "fp8": lambda p: e4m3.decode(e4m3.encode(p * 256)) / 256}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_format": "fp8"},
        {"q_format": "fp8x2"},
        {"rope_format": "fp8"},
        {"pv_format": "fp8"},
        {"kv_format": "nvfp4"},
    ],
    ids=str,
)
def test_attention_reads_the_stored_rows_and_its_operands_as_the_plan_says(changes):
    values = {"q_format": "bf16", "rope_format": "bf16", "pv_format": "bf16"} | changes
    layer, found = 0, written(plan(**changes))  # window-only: row t sees the last 16
    q, rows = found[layer, "q"], bf16.round(found[layer, "kv_store"])  # gathered into a BF16 buffer
    sinks, nope = WEIGHTS.layers[layer].sinks, CONFIG.nope_head_dim
    read_q = torch.cat(
        (READ_Q[values["q_format"]](q[..., :nope]), READ_Q[values["rope_format"]](q[..., nope:])), -1
    )
    read_k = torch.cat((rows[:, :nope], READ_Q[values["rope_format"]](rows[:, nope:])), -1)
    outs, lses = [], []
    for t in range(len(TOKENS)):
        window = slice(max(0, t - 15), t + 1)
        logits = read_q[t].double() @ read_k[window].double().T * CONFIG.head_dim**-0.5  # [H, S]
        logits = logits.float().double()
        peak = torch.ceil(logits.amax(-1, keepdim=True) / math.log(2)) * math.log(2)
        p = (logits - peak).exp()
        total = p.sum(-1, keepdim=True) + (sinks.double()[:, None] - peak).exp()
        parts = [
            (READ_P[values["pv_format"]](p.float()), slice(0, nope)),
            (bf16.round(p.float()), slice(nope, None)),
        ]
        outs.append(
            torch.cat([weight.double() @ rows[window, part].double() for weight, part in parts], -1) / total
        )
        lses.append(logits.logsumexp(-1))
    torch.testing.assert_close(found[layer, "lse"].double(), torch.stack(lses), rtol=1e-6, atol=1e-6)
    stored = bf16.round(torch.stack(outs).float())
    turned = REFS.rope(
        stored, *cos_sin(torch.arange(len(TOKENS)), rope_frequencies(CONFIG, layer)), inverse=True
    )
    off = (found[layer, "attn_out"] - bf16.round(turned)).abs()
    # A product sum is cut 2^-36 under its largest terms; FP64 sums may cross a rounding boundary now and then.
    assert (off > 1e-9 * turned.abs().max()).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("num", "read_q", "read_k"),
    [
        (numerics.plain(CONFIG), lambda x: x, lambda x: x),
        (numerics.trained(CONFIG), lambda x: mxfp4.round(hadamard(x)), lambda x: mxfp4.round(hadamard(x))),
        (plan(index_score="einsum_fp32"), lambda x: x, fp8_scaled.round),
        (plan(index_score="fp8"), fp8_scaled.round, fp8_scaled.round),
        (plan(index_score="fp4"), lambda x: mxfp4.round(hadamard(x)), lambda x: mxfp4.round(hadamard(x))),
    ],
    ids=["plain", "trained", "einsum_fp32", "fp8", "fp4"],
)
def test_index_scores_read_queries_and_keys_as_the_plan_says(num, read_q, read_k):
    found = written(num)
    for layer in (1, 3):
        q, k = read_q(found[layer, "index_q"]).double(), read_k(found[layer, "index_k"]).double()
        dots = torch.einsum("thd,cd->thc", q, k).relu()
        scores = torch.einsum("thc,th->tc", dots, found[layer, "index_w"].double())
        seen = found[layer, "index_scores"].isfinite()
        torch.testing.assert_close(
            found[layer, "index_scores"].double()[seen], scores[seen], rtol=1e-6, atol=1e-6
        )
        whole = torch.einsum(
            "thd,cd->thc", found[layer, "index_q"].double(), found[layer, "index_k"].double()
        ).relu()
        exact = torch.einsum("thc,th->tc", whole, found[layer, "index_w"].double())[seen]
        assert (scores[seen] - exact).norm() < 0.25 * exact.norm()  # rounded, not another function
