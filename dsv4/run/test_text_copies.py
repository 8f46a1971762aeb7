"""The text stage on a small random model: stop ids that are dropped, what is copied, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from dsv4.config import CheckpointError
from dsv4.files import write_json
from dsv4.generate.batch import generate
from dsv4.logits import kl_nats, log_softmax
from dsv4.model.transformer import Transformer
from dsv4.run import own_text
from dsv4.run._small_texts import (
    END,
    EOS,
    NANO,
    text_of,
    written,
)
from dsv4.run.text import inherit, write_text
from dsv4.run.text_reference import write_text_reference
from dsv4.stored import DumpError
from dsv4.text_dump import FILE, TextReader


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return written(tmp_path_factory.mktemp("results"))


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
