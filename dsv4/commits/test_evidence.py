"""What a message says is what the audit found, and of what was judged by the code of now."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from dsv4.__main__ import main as dsv4_main
from dsv4.commits import audit, evidence
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
    assert (found["Audit-Variant"], found["Audit-Parent"]) == ("P5", "P4")
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


def test_the_command_prints_the_trailers_or_one_line(audited, monkeypatch, capsys):
    words = ["--config", str(audited.config.path), "--results", str(audited.results)]
    monkeypatch.setattr(sys, "argv", ["dsv4", "commit-evidence", "P5", *words])
    assert dsv4_main() == 0
    found = evidence.of_rung(audited.results, audited.config, "P5")
    assert capsys.readouterr().out.splitlines() == evidence.lines(found)
    (audited.results / "gates/P5.json").unlink()
    assert dsv4_main() == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err[:24]) == ("", "error: P5 was not judged")


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
        monkeypatch.setattr(audit, "own_sha256", lambda _: "0" * 64)
    elif stale == "reference":
        (audited.results / "reference/one.h5.sha256").write_text("2" * 64)
    else:
        config = replace(config, page_size=2 * config.page_size)
    with pytest.raises(
        evidence.EvidenceError, match="by older code or reference: run `snakemake commits` again"
    ):
        evidence.of_commit(audited.results, config, sha)
