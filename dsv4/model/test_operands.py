"""What attention and the indexer read under each word of a plan, written again in FP64."""

import math

import pytest
import torch

from dsv4.model import numerics
from dsv4.model._numerics import CONFIG, TOKENS, WEIGHTS, plan, written
from dsv4.model._trace import bits
from dsv4.model.layer import rope_frequencies
from dsv4.model.ops import REFS
from kernels.formats import bf16, e4m3, fp8_block, fp8_scaled, mxfp4
from kernels.hadamard.ref import hadamard
from kernels.rope.ref import cos_sin


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
