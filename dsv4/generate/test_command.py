"""``python -m dsv4 generate`` on nano: what it writes, how it says that a text ended, what it refuses."""

import sys
from pathlib import Path

import pytest

from dsv4.__main__ import main
from dsv4.generate import command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["dsv4", "generate", *arguments])
        status = main()
        return status, capsys.readouterr()

    return command


def test_a_chat_ends_its_turns_and_the_second_reads_from_the_cache(run):
    status, printed = run("--chat", "What is the capital of France?", "Hi", "--tokens", "40")
    assert status == 0
    assert printed.out == (
        "user: What is the capital of France?\nassistant: The capital of France is Paris.\n"
        "user: Hi\nassistant: Hello! How can I help you?\n"
    )
    label, first, second = printed.err.splitlines()
    assert label == "the reference, trained: emulated on cpu"
    assert first.startswith("[chat: ended by <|end_of_turn|>; 32 tokens in ")
    assert second.startswith(
        "[second_turn: ended by <|end_of_turn|>; 65 tokens were in the cache; 27 tokens in "
    )


def test_a_rung_continues_a_text_up_to_a_string(run):
    status, printed = run("--rung", "B4_head", "--prompt", "import ", "--stop", "\n", "--tokens", "30")
    assert status == 0
    assert printed.out.endswith("\n")
    assert printed.out.count("\n") == 1
    assert "B4_head: " in printed.err
    assert r"[plain: ended by '\n'; " in printed.err


def test_all_prompts_are_one_batch_with_an_account_by_kind(run, tmp_path):
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("[{id: a, kind: plain, text: 'x = '}, {id: b, kind: chat, turns: [user: Hi]}]")
    config = tmp_path / "config.yaml"
    config.write_text((ROOT / "config.yaml").read_text().replace("data/prompts.yaml", str(prompts)))
    status, printed = run("--config", str(config), "--tokens", "28", "--temperature", "0.001")
    assert status == 0
    assert printed.out.startswith("== a\n")
    assert printed.out.endswith("== b\nHello! How can I help you?\n")
    assert "b [chat: 27 tokens, ended by <|end_of_turn|>]\n" in printed.err
    assert "plain, 1 in all: 1 " in printed.err
    assert "chat, 1 in all: 1 ended by <|end_of_turn|>\n" in printed.err
    assert "RAN PAST" not in printed.err


def test_a_stop_id_that_is_lost_on_its_way_is_said(run, monkeypatch):
    """A fault between the checkpoint's stop ids and the loop."""
    request = command.Request
    monkeypatch.setattr(
        command, "Request", lambda **given: request(**given | {"stop_ids": given["stop_ids"][:0]})
    )
    status, printed = run("--prompt", "def main():\n    pass\n\n\nmain()\n", "--tokens", "4")
    assert status == 0
    assert "RAN PAST the stop id at token " in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "a", "--chat", "b"], "--prompt and --chat: give one of them"),
        (["--prompt", "a", "--tokens", "0"], "--tokens 0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature = nan"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (["--prompt", "a", "--rung", "B9"], "unknown variant 'B9'"),
        (["--prompt", "a" * 4096], "would reach 4097 tokens; max_position_embeddings is 4096"),
    ],
)
def test_a_wrong_option_is_one_line(run, arguments, said):
    status, printed = run(*arguments)
    assert status == 1
    assert said in printed.err.splitlines()[-1]
    assert printed.err.splitlines()[-1].startswith("error: ")
