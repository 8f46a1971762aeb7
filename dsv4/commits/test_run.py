"""What a commit's code is given, what its last word is, and which dumps are taken for its own."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest
import yaml

from dsv4.commits.adopt import RunError, adopt
from dsv4.commits.audit import own_findings, verdict
from dsv4.commits.branch import Branch
from dsv4.commits.run import _prompt_file, _start, ensure, fingerprint, last_word, own_config, run_tree
from dsv4.commits.test_tree import ROOT, alive, wait
from dsv4.config import ConfigError
from dsv4.dump import DumpReader
from dsv4.engine.spec import Engine
from dsv4.stored import file_sha256, sidecar

pytestmark = pytest.mark.xdist_group("commits")

SAID = """Traceback (most recent call last):
  File "/usr/lib/python3/runpy.py", line 9, in run
  File "{tree}/dsv4/run/variant.py", line 12, in main
    f()
  File "{tree}/kernels/op/ref.py", line 34, in f
  File "/usr/lib/torch/nn.py", line 56, in g
RuntimeError: no such shape
"""


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        (SAID, 1, "RuntimeError: no such shape, kernels/op/ref.py:34"),
        ("error: plan has no field 'x'\n", 1, "error: plan has no field 'x'"),
        ("", 3, "exit status 3, nothing said"),
        ("half a line", -9, "ended with signal 9; its last line: half a line"),
    ],
)  # fmt: skip
def test_the_last_word_of_an_error_names_a_file_of_the_tree(tmp_path, said, status, expected):
    assert last_word(said.format(tree=tmp_path.resolve()), status, tmp_path) == expected


def test_a_run_that_does_not_end_is_ended(tmp_path):
    with pytest.raises(RunError, match=r"did not end within 0\.5 s \(commits\.timeout"):
        _start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 0.5)


def test_a_commit_that_runs_an_archived_file_is_not_run(job, tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    for name, text in {
        "dsv4/run/variant.py": "from pathlib import Path\n\n(Path(__file__).parent / 'old.cu').read_text()\n",
        "dsv4/run/old.cu": "",
        "rules/config.schema.yaml": "properties: {}\n",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    monkeypatch.setattr("dsv4.commits.run._start", lambda *_: pytest.fail("it was started"))
    config = replace(job.config, archived=("dsv4/run/*.cu",))
    with pytest.raises(
        RunError, match=r"refused: .*archived: dsv4/run/\*\.cu: every variant reaches dsv4/run/old\.cu"
    ):
        run_tree(replace(job, config=config), tmp_path, job.prompts)


@pytest.mark.parametrize(
    ("ends", "says"), [("time.sleep(60)", "did not end within 2 s"), ("sys.exit(3)", "exit status 3")]
)
def test_what_a_commit_started_ends_with_it(tmp_path, ends, says):
    """A helper that holds its stderr neither outlives it nor makes one that ended look as if it hung."""
    code = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']);"
    code += f"open('child', 'w').write(str(child.pid)); {ends}"
    with pytest.raises(RunError, match=says):
        _start([sys.executable, "-c", code], tmp_path, 2.0)
    pid = int((tmp_path / "child").read_text())
    wait(lambda: not alive(pid), 5.0)


def test_a_child_knows_its_parent_by_its_id():
    """The first process of a container has the id 1 and may start children too."""
    code = (
        "import os; from kernels.process import die_with_parent; os.getppid = lambda: 1; die_with_parent({})"
    )
    ends = [subprocess.run([sys.executable, "-c", code.format(pid)], cwd=ROOT).returncode for pid in (1, 7)]
    assert ends == ([0, 1] if sys.platform == "linux" else [0, 0])


@pytest.fixture
def job(small):
    """What is run of the base."""
    return Branch.of(small.results, small.config, small.shas["base"]).job(small.shas["base"])


def test_old_code_is_given_the_keys_that_it_knows(job, tmp_path):
    schema = tmp_path / "tree/rules/config.schema.yaml"
    schema.parent.mkdir(parents=True)
    schema.write_text(
        yaml.safe_dump({"properties": {key: {} for key in ("checkpoint", "prompts", "seed", "ladder")}})
    )
    content = own_config(job, tmp_path, ["two"])
    assert list(content) == ["checkpoint", "prompts", "seed", "ladder"]
    assert content["ladder"] == {
        "P4": {"spine": True, "why": "the plan of this commit", "set": {"norm_quant": "fused"}}
    }
    assert Path(content["checkpoint"]).is_absolute()
    assert [entry["id"] for entry in yaml.safe_load(Path(content["prompts"]).read_text())] == ["two"]
    assert "page_size" in own_config(job, tmp_path / "without a schema", job.prompts)


def test_a_commits_code_is_told_nothing_of_texts(tmp_path):
    path = tmp_path / "audit.yaml"
    path.write_text(
        "[{id: a, kind: plain, text: x, use: taps}, {id: b, kind: plain, text: y, use: text},"
        " {id: c, kind: plain, text: z}]"
    )
    given = yaml.safe_load(_prompt_file(path, tmp_path, ["a", "c"]).read_text())
    assert given == [{"id": "a", "kind": "plain", "text": "x"}, {"id": "c", "kind": "plain", "text": "z"}]
    path.write_text("[{id: a, kind: plain, text: x}]")
    assert _prompt_file(path, tmp_path, ["a"]) == path


@pytest.fixture
def made(small, tmp_path):
    """Dumps as the base's code left them."""
    verdict(small.results, small.config, small.shas["base"])
    folder = tmp_path / "made"
    shutil.copytree(small.results / "commits" / small.shas["base"], folder)
    return folder


def change(path, **attrs):
    """Set attributes of a dump and write its hash anew."""
    with h5py.File(path, "r+") as file:
        file.attrs.update(attrs)
    sidecar(path).write_text(f"{file_sha256(path)}  {path.name}\n")


def test_dumps_get_the_commits_name_and_what_its_code_does_not_know(job, made, tmp_path):
    table = tmp_path / "tree/dsv4/taps.py"
    table.parent.mkdir(parents=True)
    table.write_text((Path(__file__).parents[1] / "taps.py").read_text().replace('name="lse"', 'name="lsf"'))
    adopt(replace(job, name="renamed"), tmp_path / "tree", made, tmp_path / "target")
    with DumpReader(tmp_path / "target/one.h5", {"variant": "renamed"}) as dump:
        assert dump.attrs["declared_missing"] == ["lse"]


@pytest.mark.parametrize(
    ("attrs", "says"),
    [
        ({"commit": "f" * 40}, "one.h5: made by the code of " + "f" * 40),
        ({"dirty": True}, "one.h5: made by the code of"),
        ({"plan": '{"norm_quant": "unfused"}'}, "its plan has norm_quant = unfused, not fused"),
        ({"plan": "{}"}, "its plan has norm_quant = nothing, not fused"),
        ({"schema": 2}, "schema is 2, expected 1"),
        ({"checkpoint": "other"}, "checkpoint is 'other'"),
        ({"error": "what went wrong"}, "what went wrong"),
    ],
)
def test_dumps_of_something_else_are_refused(job, made, tmp_path, attrs, says):
    change(made / "one.h5", **attrs)
    with pytest.raises(RunError) as caught:
        adopt(job, tmp_path, made, tmp_path / "target")
    assert says in str(caught.value)
    assert not (tmp_path / "target/one.h5").exists()


def test_a_dump_that_is_not_there_is_said(job, made, tmp_path):
    (made / "two.h5").unlink()
    with pytest.raises(RunError, match=r"no dump that can be read: two\.h5: no such dump"):
        adopt(job, tmp_path, made, tmp_path / "target")


@pytest.fixture
def branch(small, tmp_path) -> Branch:
    """The branch of the small audit, with folders of its own for what is found."""
    results = tmp_path / "results"
    shutil.copytree(small.results, results, ignore=shutil.ignore_patterns("commits", ".trees"))
    return Branch.of(results, small.config, small.shas["breaks"])


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Commits that were run, in order; none is in fact."""
    found = []
    monkeypatch.setattr("dsv4.commits.run.run_and_adopt", lambda job, target: found.append(job.sha))
    return found


def test_a_proof_is_of_the_code_that_proved_it(small, branch, runs, monkeypatch):
    words, broken = small.shas["documents"], small.shas["breaks"]
    assert (ensure(branch, words).state, runs) == ("equal", [broken])
    monkeypatch.setattr("dsv4.commits.code.fingerprint", lambda tree, backend: None)
    assert (ensure(branch, words).state, runs) == ("equal", [broken])
    monkeypatch.setattr("dsv4.commits.code.prover_sha256", lambda: "another prover")
    assert fingerprint(branch, words) is None
    assert (ensure(branch, words).state, runs) == ("ran", [broken, words])
    ensure(branch, broken)
    assert runs == [broken, words]  # its own run rests on no proof


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        ("RuntimeError: no such shape, kernels/op/ref.py:34", True),
        ("it did not end within 9 s (commits.timeout in config.yaml)", True),
        ("ended with signal 9; its last line: none", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("OSError: [Errno 28] No space left on device", False),
    ],
)
def test_a_failure_is_kept_if_it_is_the_commits_own(small, branch, monkeypatch, error, kept):
    runs = []

    def fail(job, target):
        runs.append(job.sha)
        raise RunError(error)

    monkeypatch.setattr("dsv4.commits.run.run_and_adopt", fail)
    for _ in range(2):
        assert verdict(branch.results, branch.config, branch.base)["status"] == "cannot_measure"
    assert len(runs) == 1 if kept else len(runs) > 1
    if kept:
        longer = replace(branch.config, commits=replace(branch.config.commits, timeout=9999.0))
        verdict(branch.results, longer, branch.base)
        assert len(runs) == 2


def test_a_run_rests_on_the_versions_below_it(small, branch, runs, monkeypatch):
    ensure(branch, branch.base)
    monkeypatch.setattr("dsv4.commits.branch.versions", lambda: {"torch": "0.0"})
    ensure(replace(branch), branch.base)
    assert runs == [branch.base] * 2


def test_a_run_of_an_engine_rests_on_the_files_that_its_command_names(small, tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text("x = 1")
    engine = Engine(name="e", key="engines.e", command=("python3", str(wrapper), "own.py"))
    commits = replace(small.config.commits, engine="e")
    config = replace(small.config, commits=commits, engines={"e": engine})
    before = Branch(small.results, config, small.shas["base"]).run_identity
    slower = replace(config, engines={"e": replace(engine, timeout=1.0)})
    assert Branch(small.results, slower, small.shas["base"]).run_identity == before
    wrapper.write_text("x = 2")
    assert Branch(small.results, config, small.shas["base"]).run_identity != before


def test_findings_rest_on_the_floor(small, branch, monkeypatch):
    measured = []

    class Nothing:
        """A commit without findings."""

        def __init__(self, branch, sha):
            measured.append(sha)
            self.findings, self.notes = [], SimpleNamespace(error="")

    monkeypatch.setattr("dsv4.commits.audit.Measured", Nothing)
    branch.folder(branch.base).mkdir(parents=True)
    for _ in range(2):
        assert own_findings(branch, branch.base) == ([], "")
    assert len(measured) == 1
    floor = sidecar(branch.floor(branch.base) / "two.h5")
    floor.write_text(f"{'0' * 64}  two.h5\n")
    own_findings(branch, branch.base)
    assert len(measured) == 2


@pytest.mark.parametrize("file", ["reference/one.h5", "reference/two.h5.sha256", "plain/two.h5"])
def test_a_commit_that_writes_into_the_references_ends_the_audit(branch, monkeypatch, tmp_path, file):
    def write(command, tree, timeout):
        with (tree.parent / "results" / file).open("ab") as stream:
            stream.write(b"0")
        raise RunError("and fails")

    monkeypatch.setattr("dsv4.commits.run._start", write)
    for path in (tmp_path / "room/tree", tmp_path / "room/results"):
        path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"{file}: changed while commit {branch.base[:10]} ran.*delete"):
        run_tree(branch.job(branch.base), tmp_path / "room", ["one", "two"])
