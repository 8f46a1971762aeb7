"""Options of the stages that judge a branch: the configuration, the results, and which commits."""

import argparse
from pathlib import Path

from dsv4.commit_options import OPTIONS
from dsv4.config import Config, ConfigError, load, with_options


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of what all of them take; a stage adds its own."""
    found = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    found.add_argument("--config", type=Path, default=Path("config.yaml"))
    found.add_argument("--results", type=Path, required=True, help="folder of the run, results/<run>")
    for name in OPTIONS:
        found.add_argument(f"--{name}", help="as in config.yaml: commits")
    return found


def configured(options: argparse.Namespace) -> Config:
    """The configuration, with the commits that the command line names.

    Raises
    ------
    ConfigError
        A mistake in the file or in an option.
    """
    return with_options(load(options.config), {name: getattr(options, name) for name in OPTIONS})


def ends(config: Config, target: str) -> tuple[str, str]:
    """Base and head, as they are named.

    Raises
    ------
    ConfigError
        One is missing; ``target`` is what was called.
    """
    base, head = config.commits.base, config.commits.head
    if not (base and head):
        raise ConfigError(f"{target}: give base and head, as in --config base=main head=my-branch")
    return base, head
