"""What a commit's verdict rests on: the repository, plans, folders, and which commits are the ground below."""

import json
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from dsv4.code_inputs import ROOT
from dsv4.commits import history
from dsv4.commits.history import Commit
from dsv4.config import Config, ConfigError, backend_of
from dsv4.engine.spec import Engine, named_files
from dsv4.identity import versions
from dsv4.ladder import Variant
from dsv4.plan import flatten
from dsv4.prompts import with_taps


class TrailerError(ConfigError):
    """A commit whose trailer names no rung of the ladder."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A commit's code that is to be run.

    Attributes
    ----------
    config : the audit's configuration.
    results : ``results/<run>``, with the references.
    repo : the commit's repository.
    sha : its hash.
    rung : whose plan it implements.
    name : what its dumps are to be called.
    """

    config: Config
    results: Path
    repo: Path
    sha: str
    rung: Variant
    name: str

    @cached_property
    def prompts(self) -> list[str]:
        """Ids of the prompts that are dumped."""
        return with_taps(self.config.prompts)


@dataclass(frozen=True)
class Branch:
    """A repository's commits as variants of an audit.

    Attributes
    ----------
    results : ``results/<run>``.
    config : the audit's configuration.
    base : hash of the ground: it and its ancestors are run, and judged against no other commit.
    """

    results: Path
    config: Config
    base: str

    @classmethod
    def of(cls, results: Path, config: Config, sha: str) -> "Branch":
        """The branch on which ``sha`` is judged: from its fork off the configured base, or from its parent."""
        repo = repository(config)
        if config.commits.base:
            base = history.fork_point(repo, config.commits.base, config.commits.head or sha)
            if history.is_ancestor(repo, base, sha):
                return cls(results, config, base)
        parents = history.read(repo, sha).parents
        return cls(results, config, parents[0] if parents else sha)

    @property
    def repo(self) -> Path:
        """The audited repository."""
        return repository(self.config)

    @cached_property
    def prompts(self) -> list[str]:
        """Ids of the prompts that are dumped."""
        return with_taps(self.config.prompts)

    def commit(self, sha: str) -> Commit:
        """One commit."""
        return _commit(self.repo, sha)

    def folder(self, sha: str) -> Path:
        """Where a commit's dumps and verdict lie."""
        return self.results / "commits" / sha

    def job(self, sha: str) -> Job:
        """What is run of a commit.

        Raises
        ------
        TrailerError
            See :meth:`rung`.
        """
        return Job(
            config=self.config,
            results=self.results,
            repo=self.repo,
            sha=sha,
            rung=self.rung(sha),
            name=self.commit(sha).short,
        )

    def ground(self, sha: str) -> bool:
        """Whether a commit is the base or below it."""
        return _below(self.repo, sha, self.base)

    def rung(self, sha: str) -> Variant:
        """Rung whose plan a commit implements.

        Raises
        ------
        TrailerError
            A trailer names a rung that the ladder does not have.
        """
        name = _rung(self.repo, sha, default_rung(self.config))
        if name not in self.config.ladder:
            known = ", ".join(rung.id for rung in self.config.ladder)
            raise TrailerError(
                f"its plan is unknown: {history.TRAILER}: {name}: no such rung; rungs: {known}"
            )
        return self.config.ladder[name]

    def floor(self, sha: str) -> Path:
        """Folder of the noise floor of a commit's plan; commits of one plan share it."""
        return self.results / "floor" / self.rung(sha).id

    @cached_property
    def run_identity(self) -> dict[str, Any]:
        """What a commit's dumps depend on beside its own code and plan."""
        sidecars = [self.results / "reference" / f"{prompt}.h5.sha256" for prompt in self.prompts]
        missing = [str(path) for path in sidecars if not path.is_file()]
        if missing:
            raise ConfigError(f"{missing[0]}: no reference yet; run `snakemake reference` first")
        engine = self.config.commits.engine
        backend = backend_of(self.config)
        return {
            "reference": sha256(b"".join(path.read_bytes() for path in sidecars)).hexdigest(),
            "page_size": self.config.page_size,
            "backend": [backend.kind, backend.name],
            "engine": engine and _engine_identity(self.config.engines[engine]),
            "versions": versions(),
        }

    def key(self, sha: str, **more: Any) -> str:
        """Hash of what a commit's result rests on."""
        content = self.run_identity | {"commit": sha, "plan": flatten(self.rung(sha).plan)} | more
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _engine_identity(engine: Engine) -> dict[str, Any]:
    """Its entry, and the files that its command names from the root: no commit holds those."""
    outside = [word for word in engine.command if Path(word).is_absolute()]
    entry = {key: str(value) for key, value in vars(engine).items() if key != "timeout"}
    return entry | {"files": named_files(outside, engine.folder)}


def repository(config: Config) -> Path:
    """The audited repository: the configured one, or this project's."""
    return (config.commits.repo or ROOT).resolve()


def pinned(config: Config) -> Config:
    """The configuration with base and head by their hashes: a branch that moves meanwhile changes nothing.

    Raises
    ------
    ConfigError
        There are no such commits.
    """
    named = {"base": config.commits.base, "head": config.commits.head}
    found = {name: history.resolve(repository(config), given) for name, given in named.items() if given}
    return replace(config, commits=replace(config.commits, **found))


def default_rung(config: Config) -> str:
    """The configured rung, or the topmost one of the spine that is not on request."""
    return config.commits.rung or [rung.id for rung in config.ladder.spine() if not rung.on_request][-1]


@cache
def _commit(repo: Path, sha: str) -> Commit:
    return history.read(repo, sha)


@cache
def _below(repo: Path, sha: str, base: str) -> bool:
    return history.is_ancestor(repo, sha, base)


@cache
def _rung(repo: Path, sha: str, default: str) -> str:
    return history.rung_of(repo, sha, default)
