"""What a message says is what the audit found; and the hook writes it in a real repository, or says why not."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from dsv4.code_inputs import closure
from dsv4.commits import audit, evidence, hook
from dsv4.commits.branch import Branch
from dsv4.commits.conftest import ROOT, Repository
from dsv4.config import Commits, Config, load
from dsv4.dump import DumpWriter

PER_LAYER = [0.99996188922765, 0.9999804549944, 1.0]
COS = {"tap": "attn_out", "min": 0.9997942048793046, "mean": 0.99997384330520, "per_layer": PER_LAYER}
COS |= {"worst": {"prompt": "one", "step": None, "layer": 1, "tap": "attn_out", "row": 127}}
VERDICT = {
    "id": "P5",
    "parent": "P4",
    "change": {"mhc_quant": ["separate", "fused"]},
    "status": "pass",
    "reasons": ["good"],
    "culprit": None,
    "label": "emulated on cpu",
    "device": "cpu (x86_64)",
    "taps": [315, 508],
    "cos": COS,
    "fidelity": "within",
    "fidelity_counts": {"within": 3},
    "quantisation": [],
    "e2e": {"kl_nats": 0.004},
    "cost": {"time": None, "note": "time: not measured on this device"},
}
TIME = {"parent": "P4", "step_us": {"median": 90.0}, "ratio": {"median": 0.9, "q1": 0.89, "q3": 0.913}}


@dataclass(frozen=True)
class Audited:
    """A results folder in which P4 and P5 were judged."""

    config: Config
    results: Path

    def judge(self, name: str, **changes: object) -> None:
        """Write a verdict."""
        gates = self.results / "gates"
        gates.mkdir(parents=True, exist_ok=True)
        (gates / f"{name}.json").write_text(json.dumps(VERDICT | {"id": name} | changes))


@pytest.fixture
def audited(tmp_path) -> Audited:
    prompts = [{"id": "one", "kind": "plain", "text": "Once upon a time"}]
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    content = {"checkpoint": str(ROOT / "data/nano"), "prompts": str(tmp_path / "prompts.yaml"), "seed": 0}
    content |= {"decode_steps": 3, "prefill_rows": 4, "floor_draws": 8, "page_size": 16, "backend": "ref"}
    content["ladder"] = {
        "P4": {"set": {"norm_quant": "fused"}, "spine": True, "why": "below"},
        "P5": {"parent": "P4", "set": {"mhc_quant": "fused"}, "spine": True, "why": "above"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    found = Audited(load(tmp_path / "config.yaml"), tmp_path / "results")
    for name in ("P4", "P5"):
        found.judge(name)
        write_dump(found.results / "variants" / name / "one.h5")
    return found


def write_dump(path: Path) -> None:
    attrs = {name: "" for name in ("variant", "checkpoint", "prompt")} | {"kind": "variant", "plan": {}}
    attrs |= {"prompt_id": "one", "compress_ratios": [0]}
    attrs |= {"versions": {"torch": "2.13.0", "numpy": "2.4.6", "triton": "3.6.0", "snakemake": "9"}}
    with DumpWriter(path, attrs) as writer:
        writer.rows("isolated", "decode", np.arange(1))


def parsed(message: str) -> dict[str, str]:
    """Trailers as git reads them."""
    done = subprocess.run(
        ["git", "interpret-trailers", "--parse"], input=message, capture_output=True, text=True, check=True
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_trailers_are_what_git_reads_and_what_the_verdict_says(audited):
    found = evidence.evidence(audited.results, audited.config, "P5")
    assert parsed("Fuse it\n\nWhy.\n\n" + "\n".join(evidence.lines(found)) + "\n") == found
    assert found["Audit-Variant"], found["Audit-Parent"] == ("P5", "P4")
    assert found["Audit-Verdict"] == "pass"
    assert found["Audit-Cosine"] == "attn_out 0.999961889 0.999980455 1.000000000"
    assert found["Audit-Cosine-Min"] == "0.999794205 layer 1, attn_out (one, token 127)"
    assert found["Audit-Cosine-Mean"] == "0.999973843"
    assert found["Audit-Time"] == "not measured on this device"
    assert found["Audit-Taps"] == "315 of 508"
    assert found["Audit-Device"] == "emulated on cpu, cpu (x86_64); torch 2.13.0, numpy 2.4.6, triton 3.6.0"
    assert found["Audit-Reference"].endswith(
        "decode_steps 3, prefill_rows 4, page_size 16, floor_draws 8, seed 0"
    )
    assert evidence.of_rung(audited.results, audited.config, "P4")["Audit-Parent"] == "none"
    for key, form in evidence.FORMATS.items():
        assert form.fullmatch(found[key]), key


def test_a_failure_names_its_culprit_and_a_device_its_time(audited):
    culprit = {"layer": "model", "tap": "logits", "stage": "head", "kind": "limit"}
    audited.judge("P5", status="fail", culprit=culprit)
    times = {"sequences": [5, 9], "device": "NVIDIA H200", "variants": {"P5": TIME}}
    (audited.results / "times.json").write_text(json.dumps(times))
    found = evidence.evidence(audited.results, audited.config, "P5")
    assert found["Audit-Verdict"] == "fail"
    assert found["Audit-Culprit"] == "after the last layer, logits (head), limit"
    assert found["Audit-Time"] == "0.900 of P4 (0.890 to 0.913), NVIDIA H200"
    first = TIME | {"parent": None, "ratio": None}
    alone = evidence.time_words({"time": first, "note": "one step, on NVIDIA H200"}, "P4")
    for words in (found["Audit-Time"], alone):
        assert evidence.FORMATS["Audit-Time"].fullmatch(words)["gpu"] == "NVIDIA H200"


def test_the_report_hash_is_of_what_was_measured_and_of_nothing_else(audited):
    same = evidence.measured_sha256(VERDICT)
    assert evidence.measured_sha256(VERDICT | {"id": "else", "commit": "1" * 40, "why": "moved"}) == same
    for name in evidence.MEASURED:
        assert evidence.measured_sha256(VERDICT | {name: "other"}) != same
    moved = VERDICT | {"cos": COS | {"per_layer": [*PER_LAYER[:2], 1.0 - 2**-53]}}
    assert evidence.measured_sha256(moved) != same


def test_what_was_not_judged_has_no_evidence(audited):
    (audited.results / "gates/P5.json").unlink()
    with pytest.raises(evidence.EvidenceError, match=r"P5 was not judged.*snakemake P5"):
        evidence.evidence(audited.results, audited.config, "P5")
    audited.judge("P5", cos=None, reasons=["no dump"])
    with pytest.raises(evidence.EvidenceError, match="P5 has no evidence: no dump"):
        evidence.evidence(audited.results, audited.config, "P5")
    with pytest.raises(evidence.EvidenceError, match="B7: neither a rung nor a commit; rungs: P4, P5"):
        evidence.evidence(audited.results, audited.config, "B7")
    with pytest.raises(evidence.EvidenceError, match="was not judged: run `snakemake commits`"):
        evidence.evidence(audited.results, audited.config, "HEAD")


def test_code_that_is_newer_than_the_verdict_has_no_evidence(audited):
    os.utime(audited.results / "gates/P5.json", (1, 1))
    with pytest.raises(evidence.EvidenceError, match=r"dsv4/\S+ was written after P5 was judged"):
        evidence.evidence(audited.results, audited.config, "P5")


def judge_commit(audited: Audited, repo: Repository, sha: str, **changes: object) -> None:
    """Write a commit's verdict, with the key of one that stands on two others, and its dump."""
    write_dump(audited.results / "commits" / sha / "one.h5")
    config = replace(audited.config, commits=Commits(repo=repo.folder, rung="P5"))
    (audited.results / "reference").mkdir(exist_ok=True)
    (audited.results / "reference/one.h5.sha256").write_text("1" * 64)
    base = repo.git("rev-list", "--max-parents=0", sha)
    key = audit._key(Branch(audited.results, config, base), sha)
    verdict = VERDICT | {"id": sha[:10], "rung": "P5", "dump_of": sha, "key": key} | changes
    (audited.results / "commits" / sha / "verdict.json").write_text(json.dumps(verdict))


def test_a_commits_evidence_is_that_of_the_dumps_that_it_has(audited, tmp_path):
    repo = Repository(tmp_path / "judged")
    _, of, sha = (repo.commit(name) for name in ("Base", "One", "Two"))
    config = replace(audited.config, commits=Commits(repo=repo.folder))
    judge_commit(audited, repo, of)
    judge_commit(audited, repo, sha, dump_of=of)
    for each in (of, sha):
        assert evidence.of_commit(audited.results, config, each) == evidence.of_rung(
            audited.results, config, "P5"
        )
    judge_commit(audited, repo, sha, dump_of=None, reasons=["does not run: x"])
    with pytest.raises(evidence.EvidenceError, match=f"commit {sha[:10]} has no evidence: does not run: x"):
        evidence.of_commit(audited.results, config, sha)


@pytest.mark.parametrize("stale", ["judge", "reference", "config"])
def test_a_commits_stale_verdict_is_no_evidence(audited, tmp_path, monkeypatch, stale):
    repo = Repository(tmp_path / "judged")
    repo.commit("Base")
    sha = repo.commit("One")
    judge_commit(audited, repo, sha)
    config = replace(audited.config, commits=Commits(repo=repo.folder))
    assert evidence.evidence(audited.results, config, "P5") == evidence.of_commit(
        audited.results, config, sha
    )
    if stale == "judge":
        monkeypatch.setattr(audit, "_judge_sha256", lambda: "0" * 64)
    elif stale == "reference":
        (audited.results / "reference/one.h5.sha256").write_text("2" * 64)
    else:
        config = replace(config, page_size=2 * config.page_size)
    with pytest.raises(
        evidence.EvidenceError, match="by older code or reference: run `snakemake commits` again"
    ):
        evidence.of_commit(audited.results, config, sha)


@pytest.fixture
def repo(audited, tmp_path) -> Repository:
    """A repository with the files that P5 runs, and the hook."""
    repo = with_code(tmp_path / "repo")
    hook.install(repo.folder, audited.config, audited.results)
    repo.git("config", "audit.variant", "P5")
    return repo


def with_code(folder: Path) -> Repository:
    """A repository whose one commit holds the files that a rung runs, as they are here."""
    repo = Repository(folder)
    for file in closure("dsv4.run.variant"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)
    repo.commit("The project")
    return repo


def message(repo: Repository) -> str:
    return repo.git("log", "-1", "--format=%B")


def test_a_commit_carries_the_evidence_of_the_configured_rung(audited, repo):
    repo.commit("Fuse mHC", "Why it is good.")
    expected = evidence.of_rung(audited.results, audited.config, "P5")
    assert parsed(message(repo)) == expected
    assert message(repo).startswith("Fuse mHC\n\nWhy it is good.\n\nAudit-Variant: P5\n")
    for key in ("Audit-Variant", "audit-variant"):
        repo.git("commit", "--quiet", "--amend", "--allow-empty", "-m", f"Fuse mHC, reworded\n\n{key}: P4")
        assert parsed(message(repo)) == {key: "P4"}


def test_files_that_were_not_judged_get_no_evidence(repo):
    """What counts is what is staged: not what lies beside it, and not what the rung does not run."""
    path = repo.folder / "kernels/route/ref.py"
    judged = path.read_text()
    path.write_text(judged + "\n")
    done = commit(repo, "-m", "An edit", "--all")
    assert done.returncode == 0
    assert done.stderr.startswith(
        "audit: these staged files are not those that were judged: kernels/route/ref.py\n"
    )
    assert message(repo) == "An edit"
    path.write_text(judged)
    (repo.folder / "README.md").write_text("What this is.")
    repo.git("add", "--all")
    path.write_text(judged + "\n")
    commit(repo, "-m", "As it was judged")
    assert parsed(message(repo))["Audit-Variant"] == "P5"


def test_another_repository_gets_no_evidence(audited, tmp_path):
    repo = Repository(tmp_path / "other")
    hook.install(repo.folder, audited.config, audited.results)
    done = commit(repo, "-m", "Of something else", AUDIT_VARIANT="P5")
    assert done.returncode == 0
    assert "audit: these staged files are not those that were judged: dsv4/" in done.stderr
    assert message(repo) == "Of something else"


def test_the_hook_stays_out_of_amends_rebases_and_merges(repo):
    repo.commit("Fuse mHC")
    before = message(repo)
    repo.git("commit", "--quiet", "--amend", "--no-edit", "--allow-empty")
    assert message(repo) == before
    repo.git("config", "--unset", "audit.variant")
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Plain")
    assert "Audit" not in message(repo)
    repo.git("config", "audit.variant", "P5")
    repo.git("checkout", "--quiet", "main")
    repo.git("commit", "--quiet", "--allow-empty", "--no-verify", "-m", "Beside it\n\nAudit-Variant: P4")
    repo.git("cherry-pick", "--allow-empty", "side")
    assert message(repo) == "Plain"
    repo.git("merge", "--quiet", "--no-ff", "-m", "Merge", "side")
    assert message(repo) == "Merge"
    repo.git("checkout", "--quiet", "side")
    repo.git("rebase", "--quiet", "--force-rebase", "--empty=keep", "main~2")
    assert message(repo) == "Plain"


def commit(repo: Repository, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Commit nothing, with the hooks; the result as the user sees it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", *who, "commit", "--allow-empty", *options]
    return subprocess.run(command, cwd=repo.folder, env=clean | env, capture_output=True, text=True)


def test_an_editor_that_writes_nothing_ends_the_commit(repo, tmp_path):
    done = commit(repo, GIT_EDITOR="true")
    assert done.returncode == 1
    assert "evidence and nothing else" in done.stderr
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\n{ echo Subject; cat "$1"; } > "$1.new" && mv "$1.new" "$1"\n')
    editor.chmod(0o755)
    done = commit(repo, "-v", GIT_EDITOR=str(editor))
    assert done.returncode == 0, done.stderr
    assert message(repo).startswith("Subject\n\nAudit-Variant: P5\n")
    assert "#" not in message(repo)


def test_a_hook_that_fails_says_one_line_and_lets_the_commit_go_on(audited, repo):
    done = commit(repo, "-m", "No such rung", AUDIT_VARIANT="B77")
    assert done.returncode == 0
    assert "no commit 'B77'; give a branch, a tag or a hash" in done.stderr
    (audited.results / "gates/P5.json").unlink()
    done = commit(repo, "-m", "Not judged")
    assert done.returncode == 0
    assert "audit: P5 was not judged" in done.stderr
    assert "Traceback" not in done.stderr
    path = hook.hook_path(repo.folder, hook.PREPARE)
    path.write_text(path.read_text().replace(sys.executable, "/gone/python"))
    done = commit(repo, "-m", "No interpreter")
    assert done.returncode == 0
    assert "no evidence of P5 was added, the commit goes on" in done.stderr
    assert message(repo) == "No interpreter"


def test_a_commit_that_was_judged_gets_its_evidence_by_an_amend(audited, repo):
    """Of its own files alone: what is staged beside them was not judged."""
    repo.git("config", "--unset", "audit.variant")
    (repo.folder / "code.py").write_text("x = 1\n")
    sha = repo.commit("A change")
    judge_commit(audited, repo, sha)
    (repo.folder / "code.py").write_text("x = 2\n")
    done = commit(repo, "--amend", "--no-edit", "--all", AUDIT_VARIANT="HEAD")
    assert "HEAD holds other files than this commit" in done.stderr
    assert message(repo) == "A change"
    repo.git("reset", "--quiet", "--hard", sha)
    done = commit(repo, "--amend", "--no-edit", AUDIT_VARIANT="HEAD")
    assert parsed(message(repo)) == evidence.of_rung(audited.results, audited.config, "P5"), done.stderr


def test_installing_twice_is_installing_once_and_uninstalling_leaves_nothing(audited, repo):
    path = hook.hook_path(repo.folder, hook.PREPARE)
    before = path.read_text()
    hook.install(repo.folder, audited.config, audited.results)
    assert path.read_text() == before
    assert os.access(path, os.X_OK)
    hook.uninstall(repo.folder)
    assert not path.exists()
    assert not hook.hook_path(repo.folder, hook.CHECK).exists()
    assert "not there" in hook.uninstall(repo.folder)[0]


def test_a_hook_of_somebody_else_stays(audited, tmp_path):
    repo = Repository(tmp_path / "other")
    repo.git("config", "core.hooksPath", "tools")
    path = repo.folder / "tools" / hook.PREPARE
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(hook.HookError, match="another hook is there, and it stays"):
        hook.install(repo.folder, audited.config)
    hook.uninstall(repo.folder)
    assert path.read_text() == "#!/bin/sh\nexit 0\n"
    assert not hook.hook_path(repo.folder, hook.CHECK).exists()


def test_the_line_for_another_hook_works_there(audited, tmp_path):
    repo = with_code(tmp_path / "other")
    repo.git("config", "audit.variant", "P5")
    path = hook.hook_path(repo.folder, hook.PREPARE)
    path.write_text("#!/bin/sh\n")
    with pytest.raises(hook.HookError) as error:
        hook.install(repo.folder, audited.config, audited.results)
    line = str(error.value).partition("put this line into it: ")[2]
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    repo.commit("Fuse mHC")
    assert parsed(message(repo))["Audit-Variant"] == "P5"


def test_no_repository_is_one_sentence(audited, tmp_path):
    with pytest.raises(hook.HookError, match="not a git repository"):
        hook.install(tmp_path, audited.config)
