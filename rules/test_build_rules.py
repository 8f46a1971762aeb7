"""The target ``build``, on stubs: what compiles again after which edit, and what a fault leaves behind."""

import json
import shutil

import pytest

from rules.stubs import ROOT, Workflow

STUB = """
import sys
from pathlib import Path
{needs}
def main():
    log, arguments = Path("ran.txt"), sys.argv[1:]
    with log.open("a") as file:
        file.write({name!r} + "\\n")
    {does}

if __name__ == "__main__":
    main()
"""
COMPILE = """for arch, name in zip(arguments, arguments[1:]):
        if arch == "--arch":
            (Path(arguments[arguments.index("--out") + 1]) / name / "build.json").write_text(str(arguments))"""
CHECK = """if Path("fault").exists():
        sys.exit("fp8 is not native")
    Path(arguments[2]).write_text("ok")"""
FOREIGN = "build: {command: 'echo built >> ../foreign.txt', folder: data}\n"


@pytest.fixture
def workflow(tmp_path):
    """Return a copy whose compiler and check are stubs."""
    made = Workflow(tmp_path)
    build = tmp_path / "kernels/build"
    build.mkdir()
    (build / "__init__.py").write_text("")
    stubs = {"__main__": ("compile", COMPILE, "import kernels.op.kernel"), "check": ("check", CHECK, "")}
    for file, (name, does, needs) in stubs.items():
        (build / f"{file}.py").write_text(STUB.format(name=name, does=does, needs=needs))
    (tmp_path / "kernels/op/kernel.py").write_text("VALUE = 1\n")
    for name in ("foreign_build", "stale_locks", "console", "stored"):
        shutil.copy2(ROOT / f"dsv4/{name}.py", tmp_path / "dsv4")
    return made


def test_a_build_runs_once_for_all_architectures_and_again_after_an_edited_kernel(workflow):
    result = workflow.run("build", "--cores", "2")
    assert result.returncode == 0, result.text
    assert (workflow.folder / "ran.txt").read_text().split() == ["compile", "check"]
    summaries = list((workflow.folder / "results/build").glob("*/build.json"))
    assert sorted(path.parent.name for path in summaries) == ["sm_100a", "sm_103a", "sm_120a", "sm_90a"]
    for summary in summaries:
        assert "'--jobs', '2'" in summary.read_text()
    assert workflow.planned("build") == {}
    workflow.edit("kernels/op/ref.py", "1", "2")
    assert workflow.planned("build") == {}
    workflow.edit("kernels/op/kernel.py", "1", "2")
    assert workflow.planned("build") == {"compile": 1, "build": 1}


def test_a_fault_fails_the_target_and_keeps_what_was_built(workflow):
    (workflow.folder / "fault").touch()
    result = workflow.run("build")
    assert result.returncode == 1
    assert "fp8 is not native" in result.text
    assert len(list((workflow.folder / "results/build").glob("*/build.json"))) == 4
    (workflow.folder / "fault").unlink()
    assert workflow.planned("build") == {"build": 1}


def test_the_audited_tree_is_built_every_time_under_the_same_target(workflow):
    text = (workflow.folder / "config.yaml").read_text()
    (workflow.folder / "config.yaml").write_text(FOREIGN + text)
    for _ in range(2):
        result = workflow.run("build")
        assert result.returncode == 0, result.text
    assert (workflow.folder / "foreign.txt").read_text().split() == ["built"] * 2
    assert json.loads((workflow.results / "foreign_build.json").read_text())["exit_status"] == 0
    (workflow.folder / "config.yaml").write_text(FOREIGN.replace("echo", "exit 4; echo") + text)
    failed = workflow.run("build")
    assert failed.returncode == 1
    assert "build.command ended with exit status 4" in failed.text
