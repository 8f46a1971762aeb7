"""What is looked at before the first job: prompts and checkpoint, the disk, stale locks."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from dsv4 import archived
from dsv4.backend.paths import NoKernelError, check_plan
from dsv4.commits import history
from dsv4.commits.branch import repository
from dsv4.config import Config, ConfigError, backend_of, checkpoint_files
from dsv4.files import cannot_write, temporary_name
from dsv4.generate.stops import kind_of, stops_of
from dsv4.prompts import PromptTokenizer, encode_all, load_prompts

NEEDED = 400 * 10**6  # bytes: dumps of one audit are 300 MB or less, then metrics and pages
LOCKS = Path(".snakemake/locks")


def check(config: Config) -> dict[str, int]:
    """Refuse what would fail later: missing checkpoint files, prompts that are too long, archived code that runs.

    Returns
    -------
    dict[str, int]
        Number of tokens of each prompt.

    Raises
    ------
    ConfigError
        Names the file and what to do; a rung that no kernel computes, or that reaches an archived file, or whose commit
        is not there; a text that would never be seen to end.
    """
    backend = backend_of(config).kind
    if backend == "kernel":
        for rung in config.ladder.default():
            if rung.engine:
                continue
            try:
                check_plan(rung.plan)
            except NoKernelError as error:
                raise ConfigError(f"{config.path}: ladder.{rung.id}: {error}") from error
    archived.check(config, backend)
    for rung in config.ladder.default():
        if rung.commit:
            history.resolve(repository(config), rung.commit)
    checkpoint_files(config.checkpoint)
    tokens = {name: len(ids) for name, ids in encode_all(config).items()}
    check_stops(config)
    return tokens


def check_stops(config: Config) -> None:
    """Refuse a checkpoint whose stop ids miss the turn end of a prompt that is continued.

    Raises
    ------
    CheckpointError
        See :func:`dsv4.generate.stops.stops_of`.
    """
    tokenizer = PromptTokenizer(config.checkpoint)
    for prompt in load_prompts(config.prompts):
        if prompt.has_text:
            stops_of(tokenizer, config.checkpoint, kind_of(prompt))


def check_disk(folder: Path, needed: int = NEEDED) -> None:
    """Make ``folder``, write a file to it, and look at the space left.

    Raises
    ------
    ConfigError
        It cannot be made or written, or has less than ``needed`` bytes left.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror}; make `{folder.parts[0]}` a link to another disk"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{folder}: {free / 1e6:.0f} MB left on its disk, an audit needs {needed / 1e6:.0f} MB;"
            f" delete old runs below {folder.parent}"
        )


def point_latest(folder: Path) -> None:
    """Let ``latest`` beside ``folder`` point to it, in one step.

    Raises
    ------
    ConfigError
        The file system takes no link.
    """
    latest = folder.parent / "latest"
    link = temporary_name(latest)
    try:
        link.symlink_to(folder.name)
        link.replace(latest)
    except OSError as error:
        raise ConfigError(cannot_write(latest, error)) from error
    finally:
        with suppress(OSError):
            link.unlink()


def _living(folder: Path, name: str) -> dict[int, str]:
    """Processes called ``name`` that work in ``folder``, id -> command; without ours and our parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {}
    for process in psutil.process_iter():
        try:
            # python -m dsv4.run.variant, python -IS rules/fork_client.py -m dsv4.run.variant, python /path/snakemake
            words = process.cmdline()[:5]
            inside = process.pid not in own and any(Path(word).name.startswith(name) for word in words)
            if inside and Path(process.cwd()).resolve() == folder.resolve():
                found[process.pid] = " ".join(process.cmdline())
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return found


def unlock(folder: Path, patience: float = 120.0) -> str:
    """Remove the locks of a Snakemake that was killed; return what was done, "" for nothing.

    Its jobs outlive it and still write their results. They are waited for, so that none of them
    replaces a file under the next run's eyes.

    Raises
    ------
    ConfigError
        A Snakemake works in ``folder``, or a job of the killed one does after ``patience`` seconds.
    """
    locks = sorted((folder / LOCKS).glob("*.lock"))
    if alive := _living(folder, "snakemake"):
        raise ConfigError(
            f"another Snakemake works in {folder}, process {_listed(alive)}; wait for it or end it"
        )
    if not locks:
        return ""
    until = time.monotonic() + patience
    while jobs := _living(folder, "dsv4."):
        if time.monotonic() > until:
            raise ConfigError(
                f"jobs of a killed Snakemake still work in {folder}: {_listed(jobs)}; end them first"
            )
        time.sleep(0.2)
    for lock in locks:
        lock.unlink(missing_ok=True)
    return (
        f"removed {len(locks)} locks of a Snakemake that lives no more;"
        " finished stages are kept, interrupted ones run again"
    )


def _listed(processes: Mapping[int, str]) -> str:
    return "; ".join(f"{number} ({command[:60]})" for number, command in processes.items())
