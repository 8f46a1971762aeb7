"""The text stage on small random models with nano's tokenizer: forced rows, free texts, what is copied and refused."""

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dsv4 import config as configuration
from dsv4.config import CheckpointError
from dsv4.files import write_json
from dsv4.generate.batch import Request, generate
from dsv4.generate.stops import stops_of
from dsv4.logits import kl_nats, log_softmax
from dsv4.model.checkpoint import Checkpoint
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.prompts import Prompt, PromptTokenizer
from dsv4.run import own_text
from dsv4.run.own_text import described, divergence, parting
from dsv4.run.setup import Setup
from dsv4.run.text import inherit, write_text
from dsv4.run.text_reference import write_text_reference
from dsv4.stored import DumpError
from dsv4.text_dump import FILE, TextReader

ROOT = Path(__file__).parents[2]
NANO = ROOT / "data/nano"
TOKENIZER = PromptTokenizer(NANO)
EOS, END = 257, 260
BUDGET = 12
PROMPTS = {
    "plain": Prompt(id="plain", kind="plain", text="def f"),
    "chat": Prompt(id="chat", kind="chat", turns=(("user", "Hi"),)),
    "later": Prompt(id="later", kind="chat", turns=(("user", "a"), ("assistant", "b"), ("user", "c"))),
}


def setup_at(folder, prompts=PROMPTS):
    config = configuration.load(ROOT / "config.yaml")
    config = replace(config, checkpoint=NANO, page_size=8, backend="ref", text_tokens=BUDGET)
    sizes = small_config(vocab_size=320, num_hidden_layers=2, compress_ratios=[4, 8], num_hash_layers=0)
    return Setup(
        config=config,
        results=folder,
        checkpoint=Checkpoint(NANO, sizes, random_weights(sizes, 0), {}),
        tokens={},
        prompts=prompts,
        texts={name: TOKENIZER.encode(prompt) for name, prompt in prompts.items()},
    )


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Its reference's texts and those of B0_unfused."""
    torch.set_grad_enabled(False)
    found = setup_at(tmp_path_factory.mktemp("results"))
    write_text_reference(found)
    write_text(found, found.config.ladder["B0_unfused"])
    return found


def text_of(setup, variant):
    folder = setup.results / "text"
    return json.loads((folder / f"{variant}.json").read_text()), pq.read_table(folder / f"{variant}.parquet")


def texts(setup):
    with TextReader(setup.results / FILE) as reader:
        return reader.texts, {name: reader.logits(name, slice(None)) for name in reader.texts}


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
        for name, step, logits in stage_rows(*given):
            yield name, step, -logits

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
    at, squares = 0, []
    for name, text in found.items():
        tokens = torch.tensor([*setup.texts[name], *text.tokens[:-1]])
        own = model.forward([model.new_cache()], [tokens])[-len(text.tokens) :].double().numpy()
        truth = logits[name].astype(np.float64)
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (truth, own))
        for step, token in enumerate(text.tokens):
            row, at = rows[at], at + 1
            assert (row["prompt"], row["kind"], row["step"], row["token"]) == (name, text.kind, step, token)
            assert row["kl_nats"] == pytest.approx((p[step] * np.log(p[step] / q[step])).sum(), abs=1e-12)
            assert row["nll"] == pytest.approx(-np.log(q[step, token]), abs=1e-12)
            assert row["nll_trained"] == pytest.approx(-np.log(p[step, token]), abs=1e-12)
            assert (row["top"], row["top1"]) == (own[step].argmax(), own[step].argmax() == token)
            for column, values in (("margin", own[step]), ("margin_trained", truth[step])):
                assert row[column] == np.sort(values)[-1] - np.sort(values)[-2]
        squares.append(np.square((own - truth) - (own - truth).mean(-1, keepdims=True)))
    assert min(row["kl_nats"] for row in rows) > 0  # the rung rounds, the reference does not
    rms = np.sqrt(np.concatenate(squares).mean())
    assert content["logit_rms"] == pytest.approx(rms, rel=1e-12)


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


# A stop id that is dropped


def test_a_checkpoint_that_drops_a_turn_end_is_refused(setup, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(NANO / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    broken = replace(setup, config=replace(setup.config, checkpoint=tmp_path), results=tmp_path)
    with pytest.raises(CheckpointError, match=r"misses 260 .*a chat text would never be seen to end"):
        write_text_reference(broken)


def test_a_loop_that_ignores_a_stop_id_is_named_in_the_account(setup, monkeypatch, tmp_path):
    """A model that ends its turn at once, in a loop that was given no stop ids."""
    forward = Transformer.forward

    def ends(*given):
        logits = forward(*given)
        logits[:, END] = logits.max() + 1
        return logits

    def deaf(model, tokenizer, requests, **given):
        return generate(model, tokenizer, [replace(one, stop_ids=()) for one in requests], **given)

    monkeypatch.setattr(Transformer, "forward", ends)
    monkeypatch.setattr(own_text, "generate", deaf)
    write_text(setup, replace(setup.config.ladder["B0_unfused"], id="deaf"))
    content, _ = text_of(setup, "deaf")
    for one in content["prompts"].values():
        assert (one["own"]["reason"], one["own"]["ran_past"], one["own"]["own_stop"]) == ("budget", 0, False)


# What is copied, and what is refused


def judged(setup, bit_equal=True, status="pass"):
    verdict = {"status": status, "vs_parent": {"bit_equal": bit_equal}}
    write_json(setup.results / "gates/P4.json", verdict)
    return setup.results, setup.config, setup.config.ladder["P4"]


def test_the_text_of_equal_bits_is_its_parents(setup):
    assert inherit(*judged(setup))
    content, table = text_of(setup, "P4")
    parent, rows = text_of(setup, "B0_unfused")
    assert table.equals(rows)
    assert content["prompts"] == parent["prompts"]
    assert (content["variant"], content["parent"], content["free"]) == (
        "P4",
        "B0_unfused",
        "same bits as B0_unfused",
    )
    assert (content["plan"]["norm_quant"], content["same_bits_as"]) == ("fused", "B0_unfused")
    assert inherit(*judged(setup), forced_only=True)
    content, _ = text_of(setup, "P4")
    assert (content["free"], content["prompts"]["chat"]["own"]) == (None, None)


@pytest.mark.parametrize("change", [{"bit_equal": False}, {"status": "fail"}])
def test_other_bits_are_not_copied(setup, change):
    assert not inherit(*judged(setup, **change))


def test_a_parents_text_of_other_references_or_without_its_own_is_not_copied(setup, monkeypatch):
    path = setup.results / "text/B0_unfused.json"
    whole = path.read_text()
    try:
        content = json.loads(whole)
        content["prompts"]["chat"]["reference"]["tokens"][-1] += 1
        path.write_text(json.dumps(content))
        assert not inherit(*judged(setup))
        content = json.loads(whole)
        content["prompts"]["chat"]["own"] = None
        path.write_text(json.dumps(content))
        assert not inherit(*judged(setup))
        assert inherit(*judged(setup), forced_only=True)
    finally:
        path.write_text(whole)


def test_texts_of_other_prompts_are_refused(setup):
    other = replace(setup, texts={**setup.texts, "chat": setup.texts["later"]})
    with pytest.raises(DumpError, match=r"trained\.h5: prompts chat are not those of"):
        write_text(other, setup.config.ladder["B0_unfused"])


def test_a_changed_file_of_texts_is_refused(setup, tmp_path):
    copy = tmp_path / FILE
    copy.parent.mkdir()
    for suffix in ("", ".sha256"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{setup.results / FILE}{suffix}").read_bytes())
    with h5py.File(copy, "r+") as file:
        file["chat/logits"][0, 0] += 1
    with pytest.raises(DumpError, match="truncated or changed since it was written"):
        TextReader(copy)


def test_a_text_without_a_token_has_no_forced_rows(setup, tmp_path, monkeypatch):
    """The reference's logits were not finite at once: nothing to force, and no error."""
    from dsv4.run import text_reference

    made = text_reference.generate

    def broken(*given, **others):
        first, *rest = made(*given, **others)
        return [replace(first, tokens=(), reason="not_finite"), *rest]

    monkeypatch.setattr(text_reference, "generate", broken)
    other = replace(setup, results=tmp_path)
    write_text_reference(other)
    write_text(other, setup.config.ladder["B0_unfused"], forced_only=True)
    content, table = text_of(other, "B0_unfused")
    assert content["prompts"]["plain"]["reference"]["reason"] == "not_finite"
    assert set(table["prompt"].to_pylist()) == {"chat", "later"}


def test_rows_that_are_not_finite_have_no_kl(setup):
    from dsv4.run.forced import compare

    test = np.float32([[0, 1, np.nan], [0, 1, 2]])
    found = compare(test, np.float32([[0, 1, 2], [0, 1, 2]]), np.array([2, 2]))
    assert np.isnan(found["kl_nats"]).tolist() == np.isnan(found["margin"]).tolist() == [True, False]
    assert found["top1"].tolist() == [False, True]
    assert found["kl_nats"][1] == kl_nats(log_softmax(test[1]), log_softmax(test[1])) == 0
