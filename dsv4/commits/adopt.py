"""Take a commit's dumps over: checked, given the commit's name, and put where the audit looks for them."""

import json
import re
from pathlib import Path

import h5py

from dsv4.commits.branch import Job
from dsv4.dump import DumpError, DumpReader
from dsv4.plan import Plan, flatten
from dsv4.stored import publish
from dsv4.taps import BY_NAME

TAPS = "dsv4/taps.py"


class RunError(ValueError):
    """A commit that does not run, or gives no dumps of its own; the message is its last word and where it fell."""


def adopt(job: Job, tree: Path, made: Path, target: Path) -> None:
    """Move the dumps of every prompt to ``target``.

    A dump gets the commit's name, the whole plan as today's code writes it, and as declared missing
    the taps that its code does not know.

    Raises
    ------
    RunError
        A dump is missing, of another schema, model or prompt, or was not made by this commit's code.
    """
    target.mkdir(parents=True, exist_ok=True)
    for prompt in job.prompts:
        path = made / f"{prompt}.h5"
        try:
            unknown = _checked(job, tree, path, prompt)
            with h5py.File(path, "r+") as file:
                file.attrs["variant"] = job.name
                file.attrs["plan"] = json.dumps(flatten(job.rung.plan))
                if unknown:
                    file.attrs["declared_missing"] = json.dumps(unknown)
        except DumpError as error:
            raise RunError(f"no dump that can be read: {error}".replace(f"{made}/", "")) from error
        publish(path, target / path.name)


def _checked(job: Job, tree: Path, path: Path, prompt: str) -> list[str]:
    """Refuse a dump of something else; return taps that the commit's code does not know."""
    with DumpReader(job.results / "reference" / f"{prompt}.h5") as reference:
        expected = {name: reference.attrs[name] for name in ("checkpoint", "prompt")} | {"kind": "variant"}
    with DumpReader(path, expected) as dump:
        error = dump.attrs.get("error")
        plan, declared = dump.attrs["plan"], dump.attrs.get("declared_missing", [])
        ran = dump.attrs.get("commit"), dump.attrs.get("dirty")
    if error:
        raise RunError(str(error))
    if ran != (job.sha, False):
        raise RunError(
            f"{path.name}: made by the code of {ran[0]}, not of {job.sha}: is another install in front of it?"
        )
    wanted, defaults = flatten(job.rung.plan), flatten(Plan())
    for name, value in wanted.items():
        if plan.get(name, defaults[name]) != value:
            raise RunError(f"{path.name}: its plan has {name} = {plan.get(name, 'nothing')}, not {value}")
    return sorted({*declared, *_unknown(tree)})


def _unknown(tree: Path) -> list[str]:
    """Taps that the table of a tree does not name; none if it has no such table."""
    table = tree / TAPS
    if not table.is_file():
        return []
    named = set(re.findall(r'\bname="(\w+)"', table.read_text(encoding="utf-8")))
    return [tap for tap in BY_NAME if tap not in named]
