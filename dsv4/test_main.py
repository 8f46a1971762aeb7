"""The helpers of ``python -m dsv4``."""

import re
import sys
from pathlib import Path

import pytest

from dsv4.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["dsv4", *arguments])
        status = main()
        return status, capsys.readouterr()

    return command


def test_ladder_lists_every_rung_with_its_change(run):
    status, printed = run("ladder")
    assert status == 0
    lines = printed.out.splitlines()
    assert lines[0].split()[:4] == ["B0_unfused", "spine", "on", "-"]
    assert any(line.startswith("B1_q2 ") and line.endswith("q_format: fp8 -> fp8x2") for line in lines)


def test_check_counts_the_tokens(run):
    status, printed = run("check")
    assert status == 0
    assert "run nano-" in printed.out
    assert "capital" in printed.out


def test_a_mistake_is_one_line_without_a_traceback(run, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0")
    status, printed = run("check", "--config", str(tmp_path / "config.yaml"))
    assert status == 1
    assert printed.err.startswith(f"error: {tmp_path}/config.yaml: top level: key 'checkpoint'")
    assert printed.err.count("\n") == 1


def test_help_lists_stages_and_commands(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    text = capsys.readouterr().out
    rules = "".join(path.read_text() for path in (ROOT / "rules").glob("*.smk"))
    stages = set(re.findall(r"python -m (dsv4\.(?:run|judge|report)[\w.]*)", rules))
    assert {"dsv4.run.noise", "dsv4.run.times", "dsv4.judge.gate", "dsv4.report"} <= stages
    for name in (*stages, *COMMANDS):
        assert re.search(rf"^ +{re.escape(name)}\s", text, re.MULTILINE), name
