"""Stop ids by kind of prompt, and accounts of hand-made texts."""

import json
from pathlib import Path

import pytest

from dsv4.config import CheckpointError
from dsv4.generate.accounting import account, by_kind
from dsv4.generate.repetition import Loop
from dsv4.generate.stops import KINDS, Stops, kind_of, stops_of
from dsv4.prompts import PromptTokenizer, load_prompts

ROOT = Path(__file__).parents[2]
NANO = ROOT / "data/nano"
EOS, END = 257, 260
PLAIN, CHAT = Stops(EOS, (EOS, END)), Stops(END, (EOS, END))


@pytest.fixture
def checkpoint(tmp_path):
    """Nano's tokenizer beside other stop ids."""

    def make(generation=None, config=None, template=None):
        (tmp_path / "tokenizer.json").write_text((NANO / "tokenizer.json").read_text())
        settings = json.loads((NANO / "tokenizer_config.json").read_text())
        if template is not None:
            settings["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, content in (("generation_config", generation), ("config", config)):
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return PromptTokenizer(tmp_path), tmp_path

    return make


def test_a_text_ends_by_the_kind_of_its_prompt():
    tokenizer = PromptTokenizer(NANO)
    found = {kind: stops_of(tokenizer, NANO, kind) for kind in KINDS}
    assert found == {"plain": PLAIN, "chat": CHAT, "second_turn": CHAT}


def test_the_audits_prompts_are_of_every_kind_and_hold_the_control():
    kinds = {prompt.id: kind_of(prompt) for prompt in load_prompts(ROOT / "data/prompts.yaml")}
    assert set(kinds.values()) == set(KINDS)
    assert kinds["capital"] == "chat"


@pytest.mark.parametrize(
    ("kind", "ids", "missing"),
    [("plain", [END], EOS), ("chat", [EOS], END), ("second_turn", EOS, END)],
)
def test_a_checkpoint_that_drops_a_stop_id_is_refused_by_kind(checkpoint, kind, ids, missing):
    with pytest.raises(CheckpointError, match=rf"generation_config.json: eos_token_id .* misses {missing}"):
        stops_of(*checkpoint({"eos_token_id": ids}), kind)
    other = "chat" if kind == "plain" else "plain"
    assert stops_of(*checkpoint({"eos_token_id": ids}), other).own != missing


def test_stop_ids_stand_in_config_json_where_there_is_no_generation_config(checkpoint):
    assert stops_of(*checkpoint(config={"eos_token_id": [END, EOS]}), "chat") == CHAT


@pytest.mark.parametrize("value", [None, [], ["<|eos|>"], True])
def test_a_checkpoint_without_stop_ids_is_refused(checkpoint, value):
    with pytest.raises(CheckpointError, match="names no stop ids"):
        stops_of(*checkpoint({"eos_token_id": value}), "plain")


def test_a_template_that_ends_no_turn_is_refused(checkpoint):
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(CheckpointError, match="ends no assistant's turn"):
        stops_of(*checkpoint({"eos_token_id": [EOS]}, template=bare), "chat")


def test_a_set_of_stop_ids_without_its_own_is_refused():
    with pytest.raises(ValueError, match=r"\(257,\) miss 260"):
        Stops(END, (EOS,))


def facts(tokens, reason, kind="chat", stops=CHAT):
    got = account(tokens, reason, kind, stops)
    return got.stop, got.own_stop, got.ran_past, got.length, got.onset


@pytest.mark.parametrize(
    ("tokens", "reason", "stops", "expected"),
    [
        pytest.param([1, 2, END], "stop_id", CHAT, (END, True, None, 2, None), id="own-stop"),
        pytest.param([1, 2, END], "stop_id", PLAIN, (END, False, None, 2, None), id="another-kinds-stop"),
        pytest.param([END], "stop_id", CHAT, (END, True, None, 0, None), id="nothing-written"),
        pytest.param([1, 2], "budget", CHAT, (None, False, None, 2, None), id="no-stop"),
        pytest.param([1, END, 2], "budget", CHAT, (None, False, 1, 3, None), id="ran-past-a-dropped-stop"),
        pytest.param([1, END], "budget", CHAT, (None, False, 1, 2, None), id="a-stop-not-seen-at-the-budget"),
        pytest.param([1, END, 2, EOS], "stop_id", CHAT, (EOS, False, 1, 3, None), id="ran-past-to-another"),
        pytest.param([9, *[7] * 60], "budget", CHAT, (None, False, None, 61, 1), id="loop"),
        pytest.param([9, *[7] * 60, END], "stop_id", CHAT, (END, True, None, 61, None), id="loop-that-ends"),
        pytest.param([9, *[7] * 60], "stop_string", CHAT, (None, False, None, 61, None), id="stop-string"),
        pytest.param([], "not_finite", CHAT, (None, False, None, 0, None), id="empty"),
    ],
)
def test_account(tokens, reason, stops, expected):
    assert facts(tokens, reason, stops=stops) == expected


def test_an_account_tells_the_loop_and_distinct_n_grams():
    got = account([9, *[7, 8] * 30], "budget", "plain", PLAIN)
    assert got.loop == Loop(1, 2, 30.0)
    assert got.distinct == {1: 3 / 61, 2: 3 / 60, 4: 3 / 58}
    assert account([END], "stop_id", "chat", CHAT).distinct == {1: None, 2: None, 4: None}


def test_an_end_that_the_tokens_do_not_show_is_refused():
    with pytest.raises(ValueError, match="the last of 2 tokens is none of"):
        account([1, 2], "stop_id", "chat", CHAT)


def test_stops_are_counted_by_kind():
    accounts = [
        account([1, END], "stop_id", "chat", CHAT),
        account([1, END], "stop_id", "chat", CHAT),
        account([1, EOS], "stop_id", "chat", CHAT),
        account([1, END, 3], "budget", "second_turn", CHAT),
        account([7] * 60, "budget", "second_turn", CHAT),
    ]
    found = by_kind(accounts)
    assert list(found) == ["chat", "second_turn"]
    assert (found["chat"].texts, found["chat"].stops, found["chat"].not_stopped) == (3, {END: 2, EOS: 1}, {})
    later = found["second_turn"]
    assert (later.stops, later.not_stopped, later.ran_past, later.repeating) == ({}, {"budget": 2}, 1, 1)
