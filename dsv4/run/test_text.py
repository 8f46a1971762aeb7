"""The text stage on a small random model: the reference's texts, forced rows, and free texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.generate.batch import Request, generate
from dsv4.generate.stops import stops_of
from dsv4.model.transformer import Transformer
from dsv4.run._small_texts import BUDGET, END, EOS, NANO, PROMPTS, TOKENIZER, text_of, texts, written
from dsv4.run.own_text import described, divergence, parting
from dsv4.run.text import write_text
from dsv4.run.text_reference import write_text_reference
from dsv4.text_dump import FILE


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return written(tmp_path_factory.mktemp("results"))


def test_the_references_text_is_its_greedy_continuation_with_the_logits_that_chose_it(setup):
    from dsv4.model import numerics

    model = setup.model(numerics.trained(setup.checkpoint.config))
    found, logits = texts(setup)
    assert list(found) == list(PROMPTS)
    assert [text.kind for text in found.values()] == ["plain", "chat", "second_turn"]
    for name, text in found.items():
        cache, read = model.new_cache(), setup.texts[name]
        for step, token in enumerate(text.tokens):  # one by one, as a decode does
            row = model.forward([cache], [torch.tensor(read)])[-1]
            assert np.array_equal(row.numpy(), logits[name][step])
            assert int(row.argmax()) == token
            read = [token]
        assert (text.reason, len(text.tokens)) == ("budget", BUDGET)


def test_a_prefill_that_is_not_the_decode_is_refused(setup, tmp_path, monkeypatch):
    def other(*given):
        for name, step, logits, at in stage_rows(*given):
            yield name, step, -logits, at

    from dsv4.run import text_reference

    stage_rows = text_reference.forced_rows
    monkeypatch.setattr(text_reference, "forced_rows", other)
    with pytest.raises(RuntimeError, match=r"plain: read through prefill, token 0 .* is not its choice"):
        write_text_reference(replace(setup, results=tmp_path))
    assert not (tmp_path / FILE).exists()


def test_forced_rows_are_those_of_single_forward_passes(setup):
    """Every column, computed once more from one pass a prompt and from the definitions."""
    model = setup.variant_model(setup.config.ladder["B0_unfused"].plan)
    content, table = text_of(setup, "B0_unfused")
    found, logits = texts(setup)
    rows = table.to_pylist()
    assert len(rows) == sum(len(text.tokens) for text in found.values())
    at, squares, by_layer = 0, [], []
    for name, text in found.items():
        tokens = torch.tensor([*setup.texts[name], *text.tokens[:-1]])
        streams = {}
        own = model.forward([model.new_cache()], [tokens], kept_in(streams))[-len(text.tokens) :]
        own = own.double().numpy()
        largest = torch.stack([x[-len(text.tokens) :].abs().flatten(1).amax(1) for x in streams.values()])
        by_layer.append(largest.amax(1).unflatten(0, (-1, 2)).amax(1))
        truth = logits[name].astype(np.float64)
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (truth, own))
        for step, token in enumerate(text.tokens):
            row, at = rows[at], at + 1
            assert (row["prompt"], row["kind"], row["step"], row["token"]) == (name, text.kind, step, token)
            assert row["kl_nats"] == pytest.approx((p[step] * np.log(p[step] / q[step])).sum(), abs=1e-12)
            assert row["nll"] == pytest.approx(-np.log(q[step, token]), abs=1e-12)
            assert row["nll_trained"] == pytest.approx(-np.log(p[step, token]), abs=1e-12)
            assert (row["top"], row["top1"]) == (own[step].argmax(), own[step].argmax() == token)
            assert row["residual_absmax"] == largest[:, step].max()
            for column, values in (("margin", own[step]), ("margin_trained", truth[step])):
                assert row[column] == np.sort(values)[-1] - np.sort(values)[-2]
        squares.append(np.square((own - truth) - (own - truth).mean(-1, keepdims=True)))
    assert min(row["kl_nats"] for row in rows) > 0  # the rung rounds, the reference does not
    rms = np.sqrt(np.concatenate(squares).mean())
    assert content["logit_rms"] == pytest.approx(rms, rel=1e-12)
    assert content["residual_absmax"] == torch.stack(by_layer).amax(0).tolist()


def kept_in(streams):
    """Probe that keeps the residual, twice a layer, in order."""

    def probe(layer, name, value):
        if name in ("streams_mid", "streams"):
            streams[layer, name] = value
        return value

    return probe


def test_own_texts_are_those_of_one_prompt_at_a_time(setup):
    content, _ = text_of(setup, "B0_unfused")
    model = setup.variant_model(setup.config.ladder["B0_unfused"].plan)
    assert (content["forced_through"], content["free"], content["label"]) == (
        "prefill",
        "drafted decode",
        "emulated on cpu",
    )
    assert content["tokens_per_second"] is None  # refs are not timed
    for name, one in content["prompts"].items():
        ask = Request(tokens=setup.texts[name], budget=BUDGET, stop_ids=(EOS, END))
        (alone,) = generate(model, TOKENIZER, [ask])
        assert one["own"]["tokens"] == list(alone.tokens)
        assert (one["own"]["text"], one["own"]["reason"]) == (alone.text, alone.reason)
        assert one["reference"]["tokens"] == list(texts(setup)[0][name].tokens)
        assert (one["prompt_tokens"], one["budget"]) == (len(setup.texts[name]), BUDGET)


def test_a_model_whose_rows_are_not_alone_decodes_all_of_its_text(setup, monkeypatch):
    """As one on kernels does: from the prompt, token by token; the forced rows come after, and keep where it parts."""
    before, table = text_of(setup, "B0_unfused")
    monkeypatch.setattr(Transformer, "row_alone", False)
    write_text(setup, replace(setup.config.ladder["B0_unfused"], id="decoded"))
    content, decoded = text_of(setup, "decoded")
    assert content["free"] == "decode"
    assert content["prompts"] == before["prompts"]
    assert decoded.equals(table)


def test_where_an_own_text_parts_the_forced_row_says_how_near_it_was(setup):
    """At the first other token the forced pass has the free run's context, and so its logits."""
    content, table = text_of(setup, "B0_unfused")
    rows = {(row["prompt"], row["step"]): row for row in table.to_pylist()}
    parted = {name: one["divergence"] for name, one in content["prompts"].items()}
    assert any(parted.values()), "choose another seed: no text parts"
    for name, found in parted.items():
        one = content["prompts"][name]
        step = divergence(one["own"]["tokens"], one["reference"]["tokens"])
        assert (found and found["step"]) == step
        if found:
            row = rows[name, step]
            assert (found["token"], found["reference_token"]) == (row["top"], row["token"])
            assert found["token"] == one["own"]["tokens"][step]
            assert found["margin"] > 0
            assert found["near_tie"] == (found["reference_margin"] <= 2 * content["logit_rms"])
            assert found["reference_margin"] >= row["margin_trained"]


@pytest.mark.parametrize(
    ("own", "reference", "step"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 2], [1, 2, 3], None),  # cut off: it ended as a beginning of the other
        ([1, 2, 3, 4], [1, 2, 3], None),
        ([1, END], [1, 2, 3], 1),  # a stop id is a token as any
        ([1, 2, 3], [1, 2, END], 2),
        ([], [1], None),
    ],
)
def test_two_texts_part_at_the_first_other_token(own, reference, step):
    assert divergence(own, reference) == step


@pytest.mark.parametrize(
    ("rounding", "near"), [(0.05, False), (0.0625, True), (1.0, True), (float("nan"), False)]
)
def test_a_near_tie_is_one_within_twice_the_rounding(rounding, near):
    logits, reference = np.float32([0, 3.5, 3.0]), np.float32([0, 2.0, 2.125])
    found = parting([7, 1], [7, 2], 1, logits, reference, rounding)
    assert found == {
        "step": 1,
        "token": 1,
        "reference_token": 2,
        "margin": 0.5,
        "reference_margin": 0.125,
        "near_tie": near,
    }


def test_a_text_is_described_by_its_account():
    found = described(TOKENIZER, [*b"abab", END], "stop_id", "chat", stops_of(TOKENIZER, NANO, "chat"))
    assert found == {
        "tokens": [*b"abab", END],
        "text": "abab",
        "reason": "stop_id",
        "stop": END,
        "stop_name": "<|end_of_turn|>",
        "own_stop": True,
        "ran_past": None,
        "length": 4,
        "loop": None,
        "distinct": {"1": 0.5, "2": 2 / 3, "4": 1.0},
    }


def test_a_leaf_is_forced_only(setup):
    _, whole = text_of(setup, "B0_unfused")
    write_text(setup, replace(setup.config.ladder["B0_unfused"], id="leaf"), forced_only=True)
    content, table = text_of(setup, "leaf")
    assert table.equals(whole)
    assert content["free"] is content["seconds"]["free"] is None
    assert {one["own"] for one in content["prompts"].values()} == {None}
    assert {one["divergence"] for one in content["prompts"].values()} == {None}
