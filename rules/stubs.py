"""A copy of the workflow whose stages are stubs: the real Snakefile, rules and configuration, no numerics."""

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dsv4.code_inputs import ONLY_WHERE
from dsv4.config import load
from dsv4.ladder import B5
from dsv4.prompts import with_taps

ROOT = Path(__file__).resolve().parent.parent
COPIED = ["Snakefile", "config.yaml", "profiles", "data/prompts.yaml"]
COPIED += [f"rules/{path.name}" for path in (ROOT / "rules").glob("*.*") if path.suffix in (".smk", ".yaml")]
COPIED += ["dsv4/judge/limits.json", "rules/fork_client.py", "rules/fork_server.py", "kernels/process.py"]
COPIED += [
    f"data/nano/{name}.json" for name in ("config", "tokenizer", "tokenizer_config", "generation_config")
]
COPIED += [
    f"dsv4/{name}.py"
    for name in (
        "__init__",
        "__main__",
        "backend/__init__",
        "backend/paths",
        "config",
        "device",
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
        "judge/__init__",
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


class Done(NamedTuple):
    """A call of Snakemake that ended."""

    returncode: int
    text: str  # stdout and stderr


def without_libraries(folder):
    """Let stages be forked from a process that loads nothing first: stubs need nothing, and it takes 3 s."""
    server = folder / "rules/fork_server.py"
    server.write_text(re.sub(r"^LIBRARIES .*\n", "LIBRARIES = []\n", server.read_text(), flags=re.MULTILINE))


@cache
def interpreter():
    """Return a Python with this one's packages that starts in a third of its time: each job of a stub is a start.

    An environment without the files that an editable install and others let every start run; what is installed so is
    this project, of which a workflow has its own copy.
    """
    folder = Path(tempfile.mkdtemp(prefix="interpreter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    own = Path(sys.executable).resolve()
    (folder / "pyvenv.cfg").write_text(f"home = {own.parent}\ninclude-system-site-packages = false\n")
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(own)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    packages.mkdir(parents=True)
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "installed.pth").write_text("\n".join(installed))
    return folder / "bin/python"


@cache
def snakemake():
    """Return a process that has loaded Snakemake and forks itself for each call."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen(
        [interpreter(), ROOT / "rules/preloaded.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean,
    )
    atexit.register(server.communicate)  # which closes its stdin, and so ends it
    return server


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
        without_libraries(folder)
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
        (self.folder / "script.txt").write_text(repr(content | changes))

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
        """Run Snakemake to its end, in a process of its own that is forked from one which has loaded it."""
        output = self.folder / "output.txt"
        asked = {"arguments": arguments, "folder": str(self.folder), "environment": self.environment}
        server = snakemake()
        print(json.dumps(asked | {"output": str(output)}), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return Done(status, output.read_text())

    def python(self, *arguments):
        """Run Python in the copy."""
        return subprocess.run(
            [interpreter(), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

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
