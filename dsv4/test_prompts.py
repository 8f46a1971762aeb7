"""The prompt file, and how prompts become token ids."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4 import preflight
from dsv4.config import ConfigError, load, prompt_set_sha256
from dsv4.prompts import (
    Prompt,
    PromptTokenizer,
    encode_all,
    load_prompts,
    token_sha256,
    with_taps,
    with_text,
)

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "data/nano"
BOS, EOS, USER, ASSISTANT, END = range(256, 261)


@pytest.fixture
def audit():
    config = load(ROOT / "config.yaml")
    return replace(config, checkpoint=NANO, prompts=ROOT / "data/prompts.yaml")


def test_the_prompts_fit_the_audit(audit):
    tokens = {name: len(ids) for name, ids in encode_all(audit).items()}
    taps, text = with_taps(audit.prompts), with_text(audit.prompts)
    assert taps == ["capital", "code", "chat", "document", "boundary"]
    assert text == ["capital", "code", "chat", "opposites"]
    assert list(tokens) == ["capital", "code", "chat", "opposites", "document", "boundary"]
    assert sum(tokens[name] for name in taps) <= 2700  # every token costs every rung of the ladder
    assert tokens["document"] >= 1500
    assert tokens["boundary"] > 512


def test_a_run_is_named_by_the_prompts_with_taps(audit, tmp_path):
    """Texts are made anew beside what was judged; a prompt that was judged is another run."""

    def named(*entries):
        path = tmp_path / "prompts.yaml"
        path.write_text(f"[{', '.join(entries)}]")
        return prompt_set_sha256(replace(audit, prompts=path))

    one = named("{id: a, kind: plain, text: x}")
    assert named("{id: a, kind: plain, text: x, use: taps}") == one
    assert named("{id: a, kind: plain, text: x}", "{id: b, kind: plain, text: y, use: text}") == one
    assert named("{id: a, kind: plain, text: x}", "{id: b, kind: plain, text: y}") != one
    assert named("{id: a, kind: plain, text: z}") != one


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
            "0: unknown key 'row'; keys: id, kind, text, turns, use, rows",
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
        (
            "[{id: a, kind: plain, text: x, use: all}]",
            r"0\.use: 'all' is not one of \['taps', 'text', 'both'\]",
        ),
        ("[{id: a, kind: plain, text: x, use: text}]", "every prompt has `use: text`; let one have taps"),
        ("[{id: a, kind: plain, text: x, use: text, rows: [0]}]", "a: use text dumps no rows"),
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
        (
            f"text: {'x' * 3520}",
            r"a: 3521 tokens \+ 576 of its text \(text_tokens\) are over max_position_embeddings = 4096 of .*;"
            " shorten it to 3520 tokens, or use taps alone",
        ),
        ("text: abc, rows: [3, 4]", "a: row 4 lies behind its 4 tokens"),
    ],
)
def test_what_the_model_cannot_take_is_refused(audit, tmp_path, prompt, message):
    path = tmp_path / "prompts.yaml"
    path.write_text(f"[{{id: a, kind: plain, {prompt}}}]")
    with pytest.raises(ConfigError, match=message):
        encode_all(replace(audit, prompts=path))


def test_a_prompt_without_a_text_has_no_room_for_one(audit, tmp_path):
    path = tmp_path / "prompts.yaml"
    path.write_text(f"[{{id: a, kind: plain, text: {'x' * 3520}, use: taps}}]")
    assert len(encode_all(replace(audit, prompts=path))["a"]) == 3521


def test_a_text_that_would_never_be_seen_to_end_is_refused_before_work_starts(broken, audit):
    changed = broken()
    (changed.checkpoint / "generation_config.json").write_text('{"eos_token_id": 257}')
    with pytest.raises(ConfigError, match=r"misses 260 .*: a chat text would never be seen to end"):
        preflight.check(changed)
    text = changed.prompts.read_text()
    changed.prompts.write_text(text.replace("{id: b,", "{id: b, use: taps,"))
    preflight.check(changed)


@pytest.fixture
def broken(tmp_path, audit):
    """A copy of nano's tokenizer and sizes, changed; returns an audit of it with a plain and a chat prompt."""

    def make(settings=None, sizes=None, tokenizer=None, template=None):
        for name, changes in (("tokenizer_config", settings), ("config", sizes), ("tokenizer", tokenizer)):
            content = json.loads((NANO / f"{name}.json").read_text())
            content = (
                content | changes if isinstance(changes, dict) else content if changes is None else changes
            )
            (tmp_path / f"{name}.json").write_text(
                content if isinstance(content, str) else json.dumps(content)
            )
        if template is not None:
            (tmp_path / "chat_template.jinja").write_bytes(template)
        (tmp_path / "model.safetensors").touch()
        prompts = tmp_path / "prompts.yaml"
        prompts.write_text("[{id: a, kind: plain, text: xyz}, {id: b, kind: chat, turns: [{user: xyz}]}]")
        return replace(audit, checkpoint=tmp_path, prompts=prompts)

    return make


NO_TEMPLATE = {"chat_template": None}
FAILS = r"chat_template fails on prompt 'b' .*; correct it in tokenizer_config\.json, or use plain prompts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": "[1]"}, r"tokenizer_config\.json: holds list, not an object of keys; fetch"),
        ({"settings": "null"}, r"tokenizer_config\.json: holds NoneType, not an object of keys; fetch"),
        ({"settings": "{"}, r"tokenizer_config\.json: no valid JSON .*; fetch"),
        ({"settings": "[" * 100_000}, r"tokenizer_config\.json: no valid JSON .*; fetch"),
        ({"settings": {"bos_token": None}}, "bos_token = None is no known token; fetch"),
        ({"settings": {"bos_token": 256}}, "bos_token = 256 is no known token"),
        ({"settings": {"bos_token": ["<|bos|>"]}}, r"bos_token = \['<\|bos\|>'\] is no known token"),
        ({"settings": {"bos_token": {"content": "<s>"}}}, "bos_token = '<s>' is no known token"),
        ({"settings": {"bos_token": {"content": 1}}}, "bos_token = 1 is no known token"),
        ({"settings": {"bos_token": {}}}, "bos_token = None is no known token"),
        ({"settings": NO_TEMPLATE}, "no chat_template, which the chat prompt 'b' needs; correct it"),
        ({"settings": {"chat_template": 1}}, "chat_template = 1 is no text, which the chat prompt 'b' needs"),
        ({"settings": {"chat_template": [{"name": "a"}]}}, r"chat_template = \[.*\] is no text"),
        ({"settings": {"chat_template": "{{ messages[0].content"}}, FAILS),
        ({"settings": {"chat_template": "{{ messages + 1 }}"}}, FAILS),
        ({"settings": {"chat_template": "{{ 1 / 0 }}"}}, FAILS),
        ({"settings": {"chat_template": "{{ messages[0].no.thing }}"}}, FAILS),
        ({"settings": {"chat_template": "{{ raise_exception('no') }}"}}, FAILS),
        ({"settings": {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}}, FAILS),
        ({"settings": {"chat_template": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"}}, FAILS),
        ({"settings": {"chat_template": "{{ ''.__class__.mro() }}"}}, FAILS),
        ({"settings": {"eos_token": 1, "chat_template": "{{ eos_token + 'a' }}"}}, FAILS),
        (
            {"settings": {"chat_template": "x"}},
            "chat_template drops or reorders turns of prompt 'b'; correct",
        ),
        ({"settings": NO_TEMPLATE, "template": b"\xff"}, r"chat_template\.jinja: cannot be read .*; correct"),
        ({"tokenizer": "{}"}, r"tokenizer\.json: no valid tokenizer .*; fetch"),
        (
            {"tokenizer": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}},
            "cannot encode",
        ),
        (
            {"sizes": {"vocab_size": 256}},
            r"tokenizer\.json: token 256 \('<\|bos\|>'\) of prompt 'a' is not below",
        ),
        (
            {"sizes": {"vocab_size": 120}},
            r"token 256 .* vocab_size = 120 of config\.json: .* not of one model",
        ),
        ({"sizes": {"vocab_size": 259}}, r"token 260 \('<\|end_of_turn\|>'\) of prompt 'b' is not below"),
        ({"sizes": {"vocab_size": "320"}}, r"config\.json: vocab_size = '320' is not an integer"),
        ({"sizes": {"max_position_embeddings": None}}, "max_position_embeddings = None is not an integer"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_work_starts(broken, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        preflight.check(broken(**changes))
    assert str(caught.value).count("\n") == 0


def test_a_tokenizer_neither_cuts_nor_pads_a_prompt(broken, audit):
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    tokens = encode_all(broken(tokenizer={"truncation": cut, "padding": pad}))
    assert tokens["a"] == [BOS, *b"xyz"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["bos_token", "eos_token", "chat_template"]


@given(settings=JSON | st.dictionaries(st.sampled_from(KEYS), JSON))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_as_settings_gives_tokens_or_a_refusal(broken, settings):
    audit = broken(settings if isinstance(settings, dict) else json.dumps(settings))
    with suppress(ConfigError):
        assert all(encode_all(audit).values())
