"""A fault in one op of one layer comes first, op and layer; noise alone does not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.attribute._small import CONFIG, of_plan, text, trained
from dsv4.attribute.own_run import own_run
from dsv4.attribute.rank import ForcedText, Measured, as_forced, rank
from dsv4.faults import Fault, RolledScales
from dsv4.judge.text_change import LEAST_KL
from dsv4.run.modes import unwrapped
from kernels.linear.ref import Activation

ROWS, POSITIONS = 32, 26  # over topk * ratio = 24 and over the window of 16


def other_way(x):
    return x.flip(1)


def nothing(x):
    return torch.zeros_like(x)


def none(x):
    return torch.full_like(x, -1)


def next_experts(ids):
    return ((ids + 1) % CONFIG.n_routed_experts).sort(-1).values


def upside_down(scores):
    return torch.where(scores.isinf(), scores, -scores)


def less(x):
    return Activation(values=x.values * torch.arange(x.values.shape[-1]) / 64, row_scale=x.row_scale)


def rolled(model, layer):
    stages = model.stages[layer]
    stages.numerics = replace(stages.numerics, record=RolledScales(stages.numerics.record))


def planted(model, op, layer, tap, change):
    """Rank a variant with a fault."""
    about = {"kind": "", "what": "", "layer": layer, "stage": op}
    fault = Fault(**about, model=change) if tap is None else Fault(**about, tap=tap, value=change)
    return rank(model, trained(), [text(ROWS, POSITIONS)], fault.install(model))


# A lowest rung has noise of its own (0.3 nats of this model of random weights), so that these faults are big ones.
IN_A_RUNG = [
    ("q_b", 1, "q", other_way),
    ("compress", 1, "comp", other_way),
    ("index_topk", 1, "topk", none),
    ("attend", 2, "attn_out", nothing),
    ("experts", 1, "routed", nothing),
    ("lm_head", "model", "logits", other_way),
]
# The same of a variant that is the reference but for its fault, so that a small one is enough.
ALONE = [
    ("attn_mhc", 2, "attn_comb", lambda comb: comb.transpose(1, 2).contiguous()),
    ("attn_quant", 1, "attn_in_q", less),
    ("q_a", 1, "qr", lambda x: x + 0.1),
    ("kv", 3, "kv", other_way),
    ("kv_store", 0, None, rolled),  # of a layer without a compressor, whose record it is too
    ("index_q", 3, "index_q", torch.neg),
    ("index_k_store+index_score", 3, "index_scores", upside_down),
    ("attn_proj", 3, "attn_proj", lambda x: 1.1 * x),
    ("route", 2, "expert_ids", next_experts),
    ("route_weights", 1, "expert_weights", lambda weights: weights.flip(1)),
    ("shared", 2, "shared", lambda x: 1.1 * x),
    ("moe_sum", 2, "moe_out", lambda x: 1.1 * x),
    ("moe_mix", 0, "streams", lambda streams: streams.roll(1, 1)),
    ("head", "model", "hidden", lambda x: x.roll(1, 1)),
]


@pytest.mark.parametrize(("op", "layer", "tap", "change"), IN_A_RUNG, ids=[case[0] for case in IN_A_RUNG])
def test_a_fault_in_a_rung_comes_first(op, layer, tap, change):
    found = planted(of_plan("lowest"), op, layer, tap, change)
    assert found["ops"][0]["op"] == op
    assert (found["layers"][0]["op"], found["layers"][0]["layer"]) == (op, layer)
    share = f"{found['layers'][0]['returned']:.0%} of the KL"
    assert found["words"] == (f"{op}: {share}" if layer == "model" else f"layer {layer}, {op}: {share}")


@pytest.mark.parametrize(("op", "layer", "tap", "change"), ALONE, ids=[case[0] for case in ALONE])
def test_a_fault_alone_returns_everything_and_no_other_op_anything(op, layer, tap, change):
    found = planted(trained(), op, layer, tap, change)
    first, *others = found["ops"]
    assert (first["op"], first["returned"], first["kl_without"]) == (op, 1.0, 0.0)
    assert all(entry["same_bits"] and entry["returned"] == 0 for entry in others)
    assert found["layers"][0]["layer"] == layer
    assert [entry["returned"] for entry in found["layers"][1:]] == [0.0] * (len(found["layers"]) - 1)
    assert found["explained"] == {"sum_of_ops": 1.0, "leading": [op], "leading_together": 1.0}
    assert found["positions"] == POSITIONS


def test_the_reference_itself_has_nothing_to_attribute():
    found = rank(trained(), trained(), [text(ROWS, POSITIONS)])
    assert (found["kl_nats"], found["ops"], found["layers"], found["explained"]) == (0.0, [], [], None)
    assert found["words"] == f"nothing to attribute: the KL is under {LEAST_KL:g} nats"


def test_logits_that_are_not_finite_are_said_and_not_ranked():
    found = planted(trained(), "head", "model", "hidden", lambda x: x / 0)
    assert (found["kl_nats"], found["ops"], found["words"]) == (None, [], "the KL is not finite")


def test_shares_are_of_the_mean_over_all_positions_and_their_error_is_that_of_blocks():
    model, texts = trained(), [text(40, 32), text(20, 5)]
    fault = Fault(kind="", what="", layer=1, stage="q_b", tap="q", value=other_way)
    run = own_run(model, trained(), [one.tokens for one in texts], fault.install(model))
    kl = Measured(run, texts)
    assert kl.own.shape == (37,)
    assert kl._blocks.tolist() == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8 + [4] * 5
    one = Measured(own_run(model, trained(), [texts[1].tokens], run.wrap), texts[1:])
    np.testing.assert_allclose(one.own, kl.own[32:], rtol=1e-9)
    same = kl.without([(2, "q_b")])
    assert (same["returned"], same["se"]) == (0.0, 0.0)
    assert one.without([(1, "q_b")])["se"] is None  # of a single block


def test_a_text_is_its_prompt_and_all_but_the_last_of_its_tokens():
    found = as_forced([1, 2], [3, 4, 5, 6], np.zeros((3, 64), np.float32))
    assert isinstance(found, ForcedText)
    assert found.tokens.tolist() == [1, 2, 3, 4]
    assert as_forced([1, 2], [3], np.zeros((1, 64), np.float32)).tokens.tolist() == [1, 2]


def test_progress_is_of_the_runs():
    heard = []

    def shown(items, what):
        heard.append((what, list(items)))
        return iter(items)

    model = trained()
    fault = Fault(kind="", what="", layer=1, stage="q_b", tap="q", value=other_way)
    rank(model, trained(), [text(20, 5)], fault.install(model), shown)
    assert heard == [("ops swapped", ["q_b"]), ("layer by layer", ["q_b, layer 1"])]
    assert rank(trained(), trained(), [text(20, 5)], unwrapped, shown)["ops"] == []
