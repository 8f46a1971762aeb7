"""A small audit, and a repository with six commits on top of this project's own code."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from dsv4.config import Config, load
from dsv4.model.random_model import SMALL, random_tensors, small_config
from dsv4.run.floor import write_floors
from dsv4.run.reference import write_plain, write_trained
from dsv4.run.setup import prepare

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"num_hidden_layers": 6, "compress_ratios": [0, 0, 8, 4, 0, 4], "vocab_size": 320}
TEXT = (ROOT / "data/nano/heldout.txt").read_text(encoding="utf-8")
STAGES, ROUTE = "dsv4/model/stages.py", "kernels/route/ref.py"


class Repository:
    """A git repository that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        """Run git as somebody whom no configuration of the machine knows."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        who = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        command = ["git", *who, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace ``old`` in a file; it must be there."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, (file, old)
        path.write_text(text.replace(old, new))

    def commit(self, subject: str, *more: str) -> str:
        """Commit everything; return the hash."""
        self.git("add", "--all")
        words = [word for text in (subject, *more) for word in ("-m", text)]
        self.git("commit", "--quiet", "--allow-empty", *words)
        return self.git("rev-parse", "HEAD")


def copy_code(folder: Path) -> None:
    """Copy the code that a variant runs, without tests."""
    left = ("test_*", "conftest.py", "__pycache__", "examples", "report", "bench", "build", "commits")
    for name in ("dsv4", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*left))
    (folder / "rules").mkdir()
    for path in (ROOT / "rules").glob("*.schema.yaml"):
        shutil.copy2(path, folder / "rules" / path.name)


def write_model(folder: Path) -> None:
    """Write random weights of six layers, the last with an indexer, and nano's tokenizer."""
    folder.mkdir()
    config = small_config(**SIZES)
    tensors = {name: tensor.contiguous() for name, tensor in random_tensors(config, 0).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SMALL | SIZES))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy2(ROOT / "data/nano" / name, folder / name)


def write_config(folder: Path, repo: Path) -> Path:
    """Write the configuration of an audit with two short prompts and one rung."""
    prompts = [
        {"id": name, "kind": "plain", "text": TEXT[at : at + 50]} for name, at in (("one", 200), ("two", 900))
    ]
    (folder / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    content = {"checkpoint": str(folder / "model"), "prompts": str(folder / "prompts.yaml"), "seed": 0}
    content |= {"decode_steps": 4, "prefill_rows": 24, "floor_draws": 8, "page_size": 16, "backend": "ref"}
    content |= {"commits": {"repo": str(repo), "base": "base"}}
    content["ladder"] = {
        "P4": {"set": {"norm_quant": "fused"}, "spine": True, "why": "what the branch implements"},
        "P5": {
            "parent": "P4",
            "set": {"mhc_quant": "fused"},
            "spine": True,
            "on_request": True,
            "why": "next",
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@dataclass(frozen=True)
class Small:
    """A small audit: its configuration, results with reference and floor, the repository and its commits by name."""

    config: Config
    results: Path
    repository: Repository
    shas: dict[str, str]


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Small:
    """Six commits: good, two sites, only a renaming, a merge of both, a broken indexer, a crash; and two more."""
    folder = tmp_path_factory.mktemp("commits")
    repo = Repository(folder / "repo")
    write_model(folder / "model")
    copy_code(repo.folder)
    shas = {"base": repo.commit("The project")}
    repo.git("tag", "base")
    write_history(repo, shas)
    config = load(write_config(folder, repo.folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    setup = prepare(config.path, folder / "results")
    write_trained(setup)
    write_plain(setup)
    (setup.results / "checkpoint.json").write_text(json.dumps({"formats": setup.checkpoint.formats}))
    write_floors(setup, config.ladder["P4"])
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)
    return Small(config, setup.results, repo, shas)


def write_history(repo: Repository, shas: dict[str, str]) -> None:
    """Write the six commits, one of words alone on the broken one, and one whose trailer names no rung."""
    repo.edit(ROUTE, "matmul(x, weight.double().T)", "(x @ weight.T)")
    shas["good"] = repo.commit("Router scores are summed in FP32")
    repo.git("checkout", "--quiet", "-b", "side")
    repo.edit(STAGES, "low_rank", "narrow")
    shas["renames"] = repo.commit("low_rank is called narrow")
    repo.git("checkout", "--quiet", "main")
    repo.edit(STAGES, "(weights.double() * scale).float()", "weights * (scale + 1e-9)")
    repo.edit(STAGES, 'env["routed"] + env["shared"]', '(env["routed"] + env["shared"]) * (1 + 2**-20)')
    shas["two sites"] = repo.commit("Index weights and the sum of experts, together")
    repo.git("merge", "--quiet", "--no-ff", "-m", "Merge the renaming", "side")
    shas["merges"] = repo.git("rev-parse", "HEAD")
    wrong = 'self.ops.index_topk(-env["index_scores"] if self.layer == 5 else env["index_scores"], '
    repo.edit(STAGES, 'self.ops.index_topk(env["index_scores"], ', wrong)
    shas["breaks"] = repo.commit("The indexer of layer 5")
    repo.edit(
        "dsv4/model/memory.py",
        "from dsv4.model.records import Fp4Key",
        "from dsv4.model.records import Fp5Key",
    )
    shas["crashes"] = repo.commit("Keys in five bits")
    repo.git("checkout", "--quiet", "-b", "documents", shas["breaks"])
    repo.edit(STAGES, '"""The stages of one layer under', '"""All stages of one layer under')
    (repo.folder / "README.md").write_text("What this is.")
    shas["documents"] = repo.commit("Words only")
    repo.git("checkout", "--quiet", "-b", "misspelt", "base")
    shas["misspelt"] = repo.commit("Nothing", "Audit-Variant: P9")
