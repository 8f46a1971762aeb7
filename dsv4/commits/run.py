"""Run a commit's own code in its own process, once; or prove that it is its parent's and run nothing."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import yaml
from filelock import FileLock

from dsv4 import archived
from dsv4.commits import code
from dsv4.commits.adopt import RunError, adopt
from dsv4.commits.branch import Branch, Job, TrailerError
from dsv4.commits.gpus import own_gpu
from dsv4.commits.history import environment, git
from dsv4.commits.tree import checked_out
from dsv4.config import ConfigError, backend_of
from dsv4.files import write_json
from dsv4.plan import Plan, difference
from dsv4.stored import sidecar
from kernels.process import die_with_parent, end_group

ARGUMENTS = (
    "checkpoint",
    "prompts",
    "seed",
    "decode_steps",
    "prefill_rows",
    "floor_draws",
    "page_size",
    "backend",
)
# Deaths that say more about the machine at that hour than about the commit: asked again, it is run again.
CHANCE = re.compile(
    r"ended with signal|out of memory|OutOfMemoryError|MemoryError|[Cc]an(no|')t allocate memory"
    r"|No space left on device|Disk quota exceeded"
)
FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+)')


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a commit's run.

    Attributes
    ----------
    state : "ran"; "equal": proved to be a parent's code, not run; "failed".
    of : hash of the commit whose dumps are this one's, or "".
    files : how many files were compared for the proof.
    error : why it does not run, or "".
    seconds : wall time of the run.
    key : hash of what the outcome rests on; "" if it is not to be kept.
    """

    state: str
    of: str
    key: str
    files: int = 0
    error: str = ""
    seconds: float = 0.0


def ensure(branch: Branch, sha: str) -> Outcome:
    """Run a commit unless it ran before or is proved to be its parent's code.

    Raises
    ------
    ConfigError
        No reference, or git refuses.
    """
    folder = branch.folder(sha)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        branch.key(sha)
    except TrailerError as error:
        return Outcome(state="failed", of="", key="", error=str(error))
    path = folder / "run.json"
    with FileLock(folder / ".run.lock"):
        known = _known(branch, sha, path)
        if known and (known.state != "equal" or not branch.ground(sha)):
            return known
        outcome = (None if branch.ground(sha) else _proved(branch, sha)) or _run(branch, sha)
        write_json(path, asdict(outcome))
        return outcome


def _known(branch: Branch, sha: str, path: Path) -> Outcome | None:
    if not path.is_file():
        return None
    found = Outcome(**json.loads(path.read_text()))
    return found if found.key == _key(branch, sha, found.state, found.error) != "" else None


def _key(branch: Branch, sha: str, state: str, error: str = "") -> str:
    """Hash of what an outcome rests on; "" if it may be another one the next time.

    Of one that is no run of its own also what proved that none is needed, of a failure how long it had.
    """
    if CHANCE.search(error):
        return ""
    more: dict[str, object] = {} if state == "ran" else {"prover": code.prover_sha256()}
    if state == "failed":
        engine = branch.config.commits.engine
        more["timeout"] = [branch.config.commits.timeout, engine and branch.config.engines[engine].timeout]
    return branch.key(sha, **more)


def _proved(branch: Branch, sha: str) -> Outcome | None:
    """The outcome of a parent whose plan and running code this commit has, or None."""
    own = fingerprint(branch, sha)
    for parent in branch.commit(sha).parents:
        below = ensure(branch, parent) if own and own == fingerprint(branch, parent) else None
        if below and below.key and branch.rung(parent).plan == branch.rung(sha).plan:
            state = "failed" if below.state == "failed" else "equal"
            return Outcome(
                state=state,
                of=below.of,
                key=_key(branch, sha, state),
                files=len(own or ()),
                error=below.error and f"{below.error} (as {parent[:10]}, whose code it is)",
            )
    return None


def fingerprint(branch: Branch, sha: str) -> dict[str, str] | None:
    """Files that run of a commit, with their hashes; see :func:`dsv4.commits.code.fingerprint`."""
    if branch.config.commits.engine:  # of another project nothing is known but its files
        lines = git(branch.repo, "ls-tree", "-r", "-z", sha).rstrip("\0").split("\0")
        return {name: about for about, _, name in (line.partition("\t") for line in lines)}
    backend = backend_of(branch.config).kind
    path, of = branch.folder(sha) / "code.json", {"backend": backend, "prover": code.prover_sha256()}
    if path.is_file() and (found := json.loads(path.read_text())).items() >= of.items():
        return found["files"]
    with checked_out(branch.repo, sha, branch.results) as room:
        files = code.fingerprint(room / "tree", backend)
    write_json(path, of | {"files": files})
    return files


def _run(branch: Branch, sha: str) -> Outcome:
    started = time.monotonic()
    error = ""
    try:
        run_and_adopt(branch.job(sha), branch.folder(sha))
    except RunError as caught:
        error = str(caught)
    state = "failed" if error else "ran"
    return Outcome(
        state=state,
        of="" if error else sha,
        key=_key(branch, sha, state, error),
        error=error,
        seconds=round(time.monotonic() - started, 1),
    )


def run_and_adopt(job: Job, target: Path) -> None:
    """Run a commit's code in a tree of its own and move its dumps to ``target``.

    Raises
    ------
    RunError
        See :func:`run_tree` and :func:`dsv4.commits.adopt.adopt`.
    """
    with checked_out(job.repo, job.sha, job.results) as room:
        adopt(job, room / "tree", run_tree(job, room, job.prompts), target)


def run_tree(job: Job, room: Path, prompts: Sequence[str]) -> Path:
    """Run the code in ``room/tree`` on some prompts; return the folder of its dumps.

    Raises
    ------
    RunError
        It ends with an error, or not in time.
    ConfigError
        It changed the audit's own references.
    """
    results = room / "results"
    results.mkdir(exist_ok=True)
    for name in ("reference", "plain", "checkpoint.json"):
        link = results / name
        if not link.is_symlink():
            link.symlink_to((job.results / name).resolve())
    with _untouched(job), _gpu_of(job):
        _run_in(job, room, prompts)
    return results / "variants" / job.rung.id


def _gpu_of(job: Job) -> AbstractContextManager[None]:
    """A GPU of the run's own, where it needs one; which ones an engine takes, nobody else knows."""
    engine = job.config.commits.engine is not None
    if not engine and backend_of(job.config).kind == "ref":
        return nullcontext()
    return own_gpu(job.results, every=engine)


def _run_in(job: Job, room: Path, prompts: Sequence[str]) -> None:
    results = room / "results"
    if job.config.commits.engine:
        from dsv4.commits.foreign import run_engine

        run_engine(job, room, prompts)
        return
    config = room / "config.yaml"
    content = own_config(job, room, prompts)
    config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", code.STAGE, "--config", str(config.resolve())]
    command += ["--results", str(results.resolve()), "--variant", job.rung.id]
    try:
        archived.check(job.config, backend_of(job.config).kind, room / "tree")
    except ConfigError as error:
        raise RunError(f"refused: {error}") from error
    _start(command, room / "tree", job.config.commits.timeout)


@contextmanager
def _untouched(job: Job) -> Iterator[None]:
    """See to it that a commit's code, which finds the references through links, leaves them as they are."""
    before = _state_of_references(job)
    try:
        yield
    finally:
        after = _state_of_references(job)
        changed = [path for path in before if before[path] != after[path]]
        if changed:
            raise ConfigError(
                f"{changed[0]}: changed while commit {job.sha[:10]} ran; its code writes into the references that"
                f" every verdict of this audit rests on: delete {changed[0].parent} and run `snakemake reference`"
                " again, and leave this commit out or correct it"
            )


def _state_of_references(job: Job) -> dict[Path, tuple[int, int, bytes] | None]:
    """Size, time of the last change, and for a hash its content, of each file; None for one that is not there."""
    found: dict[Path, tuple[int, int, bytes] | None] = {}
    for path in (
        job.results / kind / f"{name}.h5" for kind in ("reference", "plain") for name in job.prompts
    ):
        for file in (path, sidecar(path)):
            stat = file.stat() if file.is_file() else None
            content = file.read_bytes() if stat and file != path else b""
            found[file] = stat and (stat.st_size, stat.st_mtime_ns, content)
    return found


def own_config(job: Job, room: Path, prompts: Sequence[str]) -> dict[str, object]:
    """Configuration for a commit's code: keys that its schema has, and a ladder of one rung that is the whole plan.

    Fields at their default are left out, so that code from before a field was made can be run.
    """
    config = job.config
    values: dict[str, object] = {name: getattr(config, name) for name in ARGUMENTS}
    values["checkpoint"] = str(config.checkpoint.resolve())
    values["text_tokens"] = 1  # a commit's texts are not run; its code may still look whether they would fit
    values["prompts"] = str(_prompt_file(config.prompts, room, prompts).resolve())
    changed = {name: new for name, (_, new) in difference(Plan(), job.rung.plan).items()}
    rung: dict[str, object] = {"spine": True, "why": "the plan of this commit"}
    values["ladder"] = {job.rung.id: rung | ({"set": changed} if changed else {})}
    schema = room / "tree" / "rules" / "config.schema.yaml"
    known = yaml.safe_load(schema.read_text(encoding="utf-8"))["properties"] if schema.is_file() else values
    return {name: value for name, value in values.items() if name in known}


def _prompt_file(path: Path, room: Path, prompts: Sequence[str]) -> Path:
    """A file of these prompts alone, without `use`, which code from before there were texts does not know."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    chosen = [
        {key: value for key, value in entry.items() if key != "use"}
        for entry in entries
        if entry["id"] in prompts
    ]
    if chosen == entries:
        return path
    some = room / "prompts.yaml"
    some.write_text(yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return some


def _start(command: list[str], tree: Path, timeout: float) -> None:
    """Run a commit's stage to its end; it ends with us, however we end, and with it all that it started."""
    paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    env = environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    with TemporaryFile() as said:  # no pipe: a helper that outlives the stage would hold it open
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"it did not end within {timeout:g} s (commits.timeout in config.yaml)") from error
        finally:
            end_group(process)
        if status:
            said.seek(0)
            raise RunError(last_word(said.read().decode(errors="replace"), status, tree))


def last_word(said: str, status: int, tree: Path) -> str:
    """Last line of an error, and the file and line of the tree that it names last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if status < 0:
        return f"ended with signal {-status}; its last line: {lines[-1] if lines else 'none'}"
    root, place = f"{tree.resolve()}{os.sep}", ""
    for line in said.splitlines():
        found = FRAME.match(line)
        if found and found["file"].startswith(root):
            place = f", {found['file'].removeprefix(root)}:{found['line']}"
    said = lines[-1].replace(root, "") if lines else f"exit status {status}, nothing said"
    return f"{said}{place}"
