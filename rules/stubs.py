"""A copy of the workflow whose stages are stubs: the real Snakefile, rules and configuration, no numerics."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from dsv4.code_inputs import ONLY_WHERE
from dsv4.config import load
from dsv4.ladder import B5
from dsv4.prompts import with_taps

ROOT = Path(__file__).resolve().parent.parent
COPIED = ["Snakefile", "config.yaml", "profiles", "data/prompts.yaml"]
COPIED += [f"rules/{path.name}" for path in (ROOT / "rules").glob("*.*") if path.suffix in (".smk", ".yaml")]
COPIED += ["dsv4/judge/limits.json"]
COPIED += [
    f"data/nano/{name}.json" for name in ("config", "tokenizer", "tokenizer_config", "generation_config")
]
COPIED += [
    f"dsv4/{name}.py"
    for name in (
        "__init__",
        "__main__",
        "config",
        "engine/__init__",
        "engine/spec",
        "files",
        "ladder",
        "identity",
        "plan",
        "attribute/__init__",
        "report/__init__",
        "prompts",
        "preflight",
        "taps",
        "judge/limits",
        "judge/onsets",
        "judge/residual_verdict",
        "model/__init__",
        "model/config",
        "salvage",
        "schema",
        "source_names",
        "code_inputs",
        "archived",
        "commits/__init__",
        "commits/branch",
        "commits/history",
        "commit_options",
        "generate/__init__",
        "generate/options",
        "generate/stops",
    )
]
COPIED += [
    f"dsv4/closure/{path.name}"
    for path in (ROOT / "dsv4/closure").glob("*.py")
    if not path.name.startswith(("test_", "conftest"))
]
STAGES = ["run.checkpoint", "run.reference", "run.variant", "run.floor", "run.noise", "run.times"]
STAGES += [
    "run.text_reference",
    "run.text",
    "attribute.__main__",
    "engine.cross_check",
    "judge.measure",
    "judge.gate",
    "judge.reached",
    "judge.collect",
]
STAGES += ["judge.repetition", "judge.residual", "judge.enforce", "casts", "report.__main__"]
STAGES += ["commits.audit", "commits.enforce", "commits.bisect", "commits.verify", "report.commits"]
MODEL = ["kernels.op.ref", *(file.removesuffix(".py").replace("/", ".") for file in ONLY_WHERE)]
IMPORTS = {
    **{f"run.{stage}": MODEL for stage in ("checkpoint", "reference", "variant", "floor", "noise")},
    **{f"run.{stage}": MODEL for stage in ("text_reference", "text")},
    "judge.gate": ["dsv4.judge.limits", *MODEL],
    "commits.audit": ["dsv4.judge.limits"],
}


class Workflow:
    """One copy."""

    def __init__(self, folder):
        self.folder = folder
        for name in COPIED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, folder / name)
        (folder / "data/nano/model.safetensors").write_bytes(b"weights")
        for name in [*ONLY_WHERE, "kernels/op/ref.py", "data/claims.yaml"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("VALUE = 1\n")
        stub = (ROOT / "rules/stage_stub.py").read_text()
        for stage in STAGES:
            needs = "".join(f"    import {module}\n" for module in IMPORTS.get(stage, []))
            path = folder / "dsv4" / (stage.replace(".", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(stub + (f"\n\ndef needs():\n{needs}" if needs else ""))
        self.ladder = load(folder / "config.yaml").ladder
        self.script()

    def script(self, **changes):
        """Tell the stubs what to do, see stage_stub.py."""
        content = {"status": {}, "equal": [], "crash": [], "sleep": {}, "repeats": []}
        content["prompts"] = with_taps(self.folder / "data/prompts.yaml")
        content["spine"] = [rung.id for rung in self.ladder.spine()]
        targets = [rung.id for rung in self.ladder] + ([B5] if self.ladder.residuals() else [])
        content["lineage"] = {name: [low.id for low in self.ladder.about(name)] for name in targets}
        (self.folder / "script.json").write_text(json.dumps(content | changes))

    def edit(self, name, old, new):
        """Replace ``old`` in a file; it must be there."""
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new, 1))

    @property
    def environment(self):
        """As a user's, without what pytest adds; the copy's modules come first."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        return clean | {"PYTHONPATH": str(self.folder)}

    def run(self, *arguments):
        """Run Snakemake to its end."""
        command = [sys.executable, "-m", "snakemake", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        done.text = done.stdout + done.stderr
        return done

    def ran(self):
        """Stages that ran since the last call, stage -> variants."""
        path = self.folder / "ran.txt"
        jobs = defaultdict(set)
        for line in path.read_text().splitlines() if path.exists() else []:
            stage, _, variant = line.partition(" ")
            jobs[stage].add(variant)
        path.unlink(missing_ok=True)
        return dict(jobs)

    def planned(self, *targets):
        """Jobs that a dry run plans, rule -> number."""
        done = self.run("-n", *targets)
        assert done.returncode == 0, done.text
        found = re.findall(r"^(\w+) +(\d+)$", done.text.rpartition("Job stats:")[2], re.MULTILINE)
        return {rule: int(count) for rule, count in found if rule != "total"}

    @property
    def results(self):
        """Folder of the run."""
        return (self.folder / "results/latest").resolve()

    def page(self):
        """Return the stub's page: the target and the states that it shows."""
        return json.loads((self.folder / "reports/index.html").read_text())
