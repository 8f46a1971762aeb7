"""What each word of a plan does: which stages it changes when all others read the same tensors, and how."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.model import numerics
from dsv4.model._numerics import CONFIG, LAYERS, TOKENS, WEIGHTS, model, plan, written
from dsv4.model._trace import bits, differing, trace
from dsv4.model.numerics import Numerics
from dsv4.plan import Plan, change, choices, flatten
from dsv4.taps import BY_NAME, STAGES
from kernels.formats import bf16, nvfp4
from kernels.linear.ref import Activation


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
    [("fp32", {0, 1, 2, 3}), ("fp32_first_half", {0, 1}), ("fp32_last_half", {2, 3}), ("fp32_last", {3})],
)
def test_the_residual_is_changed_in_its_layers_alone(value, layers):
    expected = {layer: RESIDUAL if layer in layers else set() for layer in (*LAYERS, "model")}
    if 0 in layers:
        expected[0] = RESIDUAL | {"attn_mhc"}  # reads the embedding as it is stored
    assert changed_stages(plan(), plan(residual=value)) == expected


def test_every_value_of_every_field_has_a_claim():
    claimed = {(field, value) for _, field, value, _ in CLAIMS} | set(flatten(Plan()).items())
    claimed |= {("residual", value) for value in choices()["residual"]}
    claimed |= {("rounding", "none")}  # all of them: it is plain
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
