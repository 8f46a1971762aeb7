"""The prompt file, and how prompts become token ids."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.config import ConfigError, load
from dsv4.prompts import Prompt, PromptTokenizer, encode_all, load_prompts, token_sha256

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "data/nano"
BOS, EOS, USER, ASSISTANT, END = range(256, 261)


@pytest.fixture
def audit():
    config = load(ROOT / "config.yaml")
    return replace(config, checkpoint=NANO, prompts=ROOT / "data/prompts.yaml")


def test_the_five_prompts_fit_the_audit(audit):
    tokens = {name: len(ids) for name, ids in encode_all(audit).items()}
    assert list(tokens) == ["capital", "code", "chat", "document", "boundary"]
    assert sum(tokens.values()) <= 2700  # every token costs every rung of the ladder
    assert tokens["document"] >= 1500
    assert tokens["boundary"] > 512


def test_boundary_rows_sit_on_every_edge_of_the_layout(audit):
    rows = next(prompt.rows for prompt in load_prompts(audit.prompts) if prompt.id == "boundary")
    nano = json.loads((NANO / "config.json").read_text())
    edges = {4, 8, nano["sliding_window"], nano["index_topk"] * 4, 2 * 128, 3 * 128, 4 * 128}
    assert {edge + step for edge in edges for step in (-1, 0)} <= set(rows)
    assert max(rows) > 512


def test_plain_text_is_bytes_after_the_beginning():
    prompt = Prompt(id="a", kind="plain", text="a\n\u00e9")
    assert PromptTokenizer(NANO).encode(prompt) == [BOS, 97, 10, 0xC3, 0xA9]


def test_a_chat_is_laid_out_by_the_checkpoint_template():
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"))
    ids = PromptTokenizer(NANO).encode(Prompt(id="a", kind="chat", turns=turns))
    assert ids == [BOS, USER, 97, END, ASSISTANT, 98, END, USER, 99, END, ASSISTANT]


@pytest.mark.parametrize("text", ["<|user|>", "a<|eos|>b", "{{ bos_token }}"])
def test_a_control_token_in_a_text_stays_text(text):
    tokenizer = PromptTokenizer(NANO)
    assert tokenizer.encode(Prompt(id="a", kind="plain", text=text)) == [BOS, *text.encode()]
    chat = tokenizer.encode(Prompt(id="a", kind="chat", turns=(("user", text),)))
    assert chat == [BOS, USER, *text.encode(), END, ASSISTANT]


def test_the_hash_is_of_the_ids():
    assert token_sha256([1, 2]) == token_sha256((1, 2)) != token_sha256([2, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{id: a, kind: plain}]", "a: kind plain has text, and no turns"),
        (
            "[{id: a, kind: plain, text: x, row: [1]}]",
            "0: unknown key 'row'; keys: id, kind, text, turns, rows",
        ),
        ("[{id: a, kind: chat, text: x}]", "a: kind chat has turns, and no text"),
        ("[{id: A, kind: plain, text: x}]", r"0\.id: 'A' does not match"),
        ("[{id: a, kind: poem, text: x}]", r"0\.kind: 'poem' is not one of \['plain', 'chat'\]"),
        ("[{id: a, kind: plain, text: x}, {id: a, kind: plain, text: y}]", "id 'a' stands twice"),
        ("[{id: a, kind: chat, turns: [{assistant: x}]}]", "a: turns must go user, assistant, ..., user"),
        ("[{id: a, kind: chat, turns: [{user: x}, {assistant: y}]}]", "a: turns must go user"),
        ("[{id: a, kind: plain, text: x, rows: [1.0]}]", r"0\.rows\.0: 1\.0 is not of type 'integer'"),
        ("[{id: a, kind: plain, text: x, rows: [true]}]", r"0\.rows\.0: True is not of type 'integer'"),
        ("[{id: a, kind: plain, 1: x}]", "key 1 is no text"),
        ("[{id: a, kind: chat, turns: [{system: x}]}]", "unknown key 'system'; keys: user, assistant"),
    ],
)
def test_a_mistake_in_the_prompt_file_is_named(tmp_path, text, message):
    path = tmp_path / "prompts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_prompts(path)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (f"text: {'x' * 4090}", r"a: 4091 tokens \+ 16 decode steps are over max_position_embeddings = 4096"),
        ("text: abc, rows: [3, 4]", "a: row 4 lies behind its 4 tokens"),
    ],
)
def test_what_the_model_cannot_take_is_refused(audit, tmp_path, prompt, message):
    path = tmp_path / "prompts.yaml"
    path.write_text(f"[{{id: a, kind: plain, {prompt}}}]")
    with pytest.raises(ConfigError, match=message):
        encode_all(replace(audit, prompts=path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bos_token": "<|bos|>"}, "no chat_template, which the chat prompt 'a' needs"),
        (
            {"bos_token": "<|bos|>", "chat_template": "{{ messages[0].content"},
            "chat_template fails on prompt 'a'",
        ),
        (
            {"bos_token": "<|bos|>", "chat_template": "x"},
            "chat_template drops or reorders turns of prompt 'a'",
        ),
    ],
)
def test_a_checkpoint_without_a_usable_template_is_refused(tmp_path, settings, message):
    shutil.copy(NANO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message):
        PromptTokenizer(tmp_path).encode(Prompt(id="a", kind="chat", turns=(("user", "x"),)))


def test_a_token_that_the_tokenizer_does_not_know_is_refused(tmp_path):
    shutil.copy(NANO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    with pytest.raises(ConfigError, match="bos_token = '<s>' is no known token"):
        PromptTokenizer(tmp_path).encode(Prompt(id="a", kind="plain", text="x"))
