"""Archived files: dead code of the tree that no variant may run again."""

from collections.abc import Mapping
from pathlib import Path

from dsv4.closure.graph import Reached, Search
from dsv4.closure.module import Rank
from dsv4.closure.tree import Tree, matches
from dsv4.code_inputs import ROOT, elsewhere
from dsv4.config import Config, ConfigError
from dsv4.ladder import Variant
from dsv4.plan import flatten

ENTRY = "dsv4.run.variant"  # the stage that runs a variant


def named(config: Config, tree: Tree) -> dict[str, list[str]]:
    """Files of the tree that each glob of ``archived`` names."""
    return {glob: sorted(file for file in tree.files if matches(file, glob)) for glob in config.archived}


def met(config: Config, search: Search, backend: str) -> dict[str, dict[str, list[Reached]]]:
    """Archived files that variants reach: glob -> variant -> files with their chains.

    Parameters
    ----------
    search : has :data:`ENTRY` among its entries.
    backend : "ref" or "kernel": on refs no variant runs a kernel.
    """
    globs = {glob: set(files) for glob, files in named(config, search.tree).items() if files}
    found: dict[str, dict[str, list[Reached]]] = {glob: {} for glob in config.archived}
    reached: dict[frozenset[str], Mapping[str, Reached]] = {}
    for variant in config.ladder if globs else ():
        left = elsewhere(flatten(variant.plan), backend)
        if left not in reached:
            reached[left] = search.closure((ENTRY,), left).reached
        for glob, files in globs.items():
            if both := [each for file, each in reached[left].items() if file in files]:
                found[glob][variant.id] = both
    return found


def check(config: Config, backend: str, root: Path = ROOT) -> None:
    """Refuse a ladder of which a variant runs an archived file.

    Raises
    ------
    ConfigError
        Names the glob, the variants, the file, and the chain by which the first of them reaches it.
    """
    if not any(named(config, Tree(root)).values()):
        return
    for glob, variants in met(config, Search(root, [ENTRY]), backend).items():
        live = {name: each for name, found in variants.items() for each in found if each.rank is Rank.LIVE}
        if live:
            first = next(iter(live.values()))
            raise ConfigError(
                f"{config.path}: archived: {glob}: {_listed(config, live)} reaches {first.file}: {first.shown()};"
                " cut the chain, or take the file out of `archived`"
            )


def _listed(config: Config, names: Mapping[str, Reached]) -> str:
    rungs: list[Variant] = list(config.ladder)
    return "every variant" if len(names) == len(rungs) else ", ".join(names)
