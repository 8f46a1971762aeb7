"""Commits of another project: its command in each commit's tree, its taps, the same verdicts."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.commit_options import Commits
from dsv4.commits.audit import verdict
from dsv4.commits.conftest import Repository
from dsv4.engine.spec import Engine

pytestmark = pytest.mark.xdist_group("commits")

ROOT = Path(__file__).resolve().parents[2]
# Gives zeros for whatever is asked; it knows nothing of this project but the one file that it copied.
ENGINE = """
import sys
import numpy as np
from tap_writer import Job

SHIFT = 0.0
job = Job(sys.argv[1])
for mode in job.content["modes"]:
    for prompt, layer in job.layers(mode):
        taps = {}
        for tap in job.content["taps"][mode][str(layer)]:
            shape = prompt["shapes"][str(layer)][tap]
            kind = {"int": np.int32, "uint8": np.uint8}.get(job.content["kinds"][tap], np.float32)
            value = np.broadcast_to(np.arange(shape[-1]), shape) if kind is np.int32 else np.zeros(shape)
            taps[tap] = value.astype(kind)
        if layer == 1 and mode == "isolated":
            taps["moe_out"] = taps["moe_out"] + np.float32(SHIFT)
        job.put(mode, prompt, layer, taps)
job.finish(device="a test")
"""


@pytest.fixture(scope="module")
def foreign(small, tmp_path_factory):
    """Configuration and commits of another project, by name."""
    repo = Repository(tmp_path_factory.mktemp("foreign") / "repo")
    (repo.folder / "engine.py").write_text(ENGINE)
    shutil.copy2(ROOT / "dsv4/engine/tap_writer.py", repo.folder)
    shas = {"base": repo.commit("Zeros")}
    (repo.folder / "README.md").write_text("Words.")
    shas["words"] = repo.commit("Words")
    repo.edit("engine.py", "SHIFT = 0.0", "SHIFT = 0.5")
    shas["shifts"] = repo.commit("One tap")
    repo.edit("engine.py", "import sys\n", "import sys\nsys.exit('no weights')\n")
    shas["crashes"] = repo.commit("No weights")
    commits = Commits(repo=repo.folder, rung="P4", engine="theirs", base=shas["base"])
    engines = {
        "theirs": Engine(
            name="theirs", key="engines.theirs", command=(sys.executable, "engine.py"), timeout=60.0
        )
    }
    return replace(small.config, commits=commits, engines=engines), shas, repo


@pytest.fixture(scope="module")
def verdicts(small, foreign):
    """Verdict of each commit, by name."""
    config, shas, _ = foreign
    return {name: verdict(small.results, config, sha) for name, sha in shas.items()}


def test_what_is_wrong_in_the_base_is_inherited_with_the_same_bits(foreign, verdicts):
    assert (verdicts["base"]["status"], verdicts["base"]["kind"]) == ("fail", "base")
    found = verdicts["words"]
    assert (found["status"], found["kind"]) == ("blocked", "inherited")
    assert found["reasons"][0].startswith(
        f"stands on {foreign[1]['base'][:10]}, which fails at layer 0, attn_pre"
    )
    assert found["label"] == "engine theirs on a test"


def test_what_a_commit_adds_is_its_own(foreign, verdicts):
    found = verdicts["shifts"]
    assert (found["status"], found["kind"]) == ("fail", "one_site")
    assert (found["culprit"]["layer"], found["culprit"]["tap"]) == (1, "moe_out")
    assert found["sites"] == [{"stage": "moe_sum", "layers": [1], "taps": ["moe_out"]}]
    assert found["confirmed"]["confirmed"]
    assert found["against"] == foreign[1]["words"]


def test_an_engine_that_ends_says_why(foreign, verdicts):
    found = verdicts["crashes"]
    assert (found["status"], found["kind"]) == ("cannot_measure", "does_not_run")
    assert (
        "does not run: engine theirs ended with exit status 1; its last lines: no weights"
        in found["reasons"][0]
    )
    assert foreign[2].git("status", "--porcelain", "--ignored") == ""
