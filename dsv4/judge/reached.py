"""Which code runs: files that a variant and the workflow reach, and that no archived file is among them."""

from typing import Any

from rich.console import Console

from dsv4.archived import ENTRY, met, named
from dsv4.closure.command import SCHEMA, record, row, verdict
from dsv4.closure.graph import Search
from dsv4.code_inputs import ROOT
from dsv4.config import Config, backend_of, load
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.judge.measure import arguments

WORKFLOW = "Snakefile"


def reached(config: Config) -> dict[str, Any]:
    """What ``closure.json`` holds: the closures of a variant's stage and of the workflow, and archived files."""
    search = Search(ROOT, [ENTRY, WORKFLOW])
    archived = []
    files = named(config, search.tree)
    for glob, variants in met(config, search, backend_of(config).kind).items():
        found = [each for both in variants.values() for each in both]
        shown = {variant: [row(each) for each in both] for variant, both in variants.items()}
        count = len(files[glob])
        archived.append({"glob": glob, "files": count, "verdict": verdict(count, found), "met": shown})
    return {
        "schema": SCHEMA,
        "variant": record(search.closure((ENTRY,))),
        "workflow": record(search.closure()),
        "archived": archived,
    }


def main() -> int:
    """Write ``closure.json``."""
    options = arguments(__doc__).parse_args()
    found = reached(load(options.config))
    write_json(options.results / "closure.json", found)
    counts = [f"{name} reaches {found[name]['counts']['live']} files" for name in ("variant", "workflow")]
    said = f"{', '.join(counts)}; {found['workflow']['counts']['dead']} dead"
    Console(stderr=True).print(f"code: {said}", highlight=False)
    return 0


if __name__ == "__main__":
    main_guard(main)
