"""Which commits are judged: `commits` in ``config.yaml``, and what ``--config base=main head=mine`` puts over it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

OPTIONS = ("base", "head", "repo", "rung")  # what `--config` may say of them
ASKED = ("tap", "limit", "metric")  # and what bisect asks of each
TIMEOUT = 3600.0  # seconds


class CommitsError(ValueError):
    """What cannot be said of commits: the key, the value, and what there is."""


@dataclass(frozen=True, kw_only=True)
class Commits:
    """Which commits are judged as variants.

    Attributes
    ----------
    repo : the audited repository; None: this one.
    rung : whose plan they implement where no trailer says another; None: the topmost rung of the spine.
    engine : what runs them, a name of `engines`; None: their own ``dsv4.run.variant``.
    base, head : names of commits: what ``head`` holds above its fork from ``base`` is judged.
    timeout : seconds until a commit's run is ended.
    """

    repo: Path | None = None
    rung: str | None = None
    engine: str | None = None
    base: str | None = None
    head: str | None = None
    timeout: float = TIMEOUT

    @property
    def words(self) -> list[str]:
        """Options of a command line that say the same: ``--base main --head my-branch``."""
        given = {name: getattr(self, name) for name in OPTIONS}
        return [
            word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))
        ]


def parse_commits(content: Mapping[str, Any], rungs: Collection[str], engines: Collection[str]) -> Commits:
    """Build it from its checked entry in ``config.yaml``.

    Raises
    ------
    CommitsError
        A rung or an engine that there is not.
    """
    for name, known in (("rung", rungs), ("engine", engines)):
        if content.get(name) not in (None, *known):
            there = ", ".join(known) or "none"
            raise CommitsError(f"commits.{name} = {content[name]!r}: no such {name}; there are: {there}")
    return Commits(**{**content, "repo": Path(content["repo"]) if "repo" in content else None})


def overridden(commits: Commits, options: Mapping[str, Any], rungs: Collection[str]) -> Commits:
    """Put the options of a command line over what the file says.

    Raises
    ------
    CommitsError
        A name of neither :data:`OPTIONS` nor :data:`ASKED`, a rung that there is not, a hash read as a number.
    """
    for name, value in options.items():
        if name not in (*OPTIONS, *ASKED):
            raise CommitsError(
                f"--config {name}: is not read, the stages read a file: use --configfile;"
                f" --config takes {', '.join((*OPTIONS, *ASKED))}"
            )
        if name in ("base", "head") and isinstance(value, float):
            raise CommitsError(
                f"--config {name}={value}: Snakemake read a number; give all digits of the hash, or a name"
            )
    given = {name: str(options[name]) for name in ("base", "head", "rung") if options.get(name) is not None}
    if given.get("rung", commits.rung) not in (None, *rungs):
        raise CommitsError(f"--config rung={given['rung']}: no such rung; `python -m dsv4 ladder` lists them")
    repo = Path(options["repo"]) if options.get("repo") else commits.repo
    return replace(commits, **given, repo=repo)
