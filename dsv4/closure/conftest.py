"""Trees with known answers."""

from dsv4.closure.graph import Search
from dsv4.closure.module import Rank

HERE = "from pathlib import Path\nHERE = Path(__file__).parent\n"
LOAD = "from torch.utils.cpp_extension import load\n"


def search(folder, files, entries=("main.py",)):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Search(folder, entries)


def ranks(closure):
    """Files that were reached, without the entry: live, maybe, types."""
    entries = {step.file for reached in closure.reached.values() for step in reached.chain[:1]}
    return tuple(set(closure.of(rank)) - entries for rank in Rank)


def check(folder, case):
    """Exactly these files are live and these may be; all others are dead."""
    text, files, live, maybe = case
    closure = search(folder, {"main.py": text, "unused.py": "", **files}).closure()
    assert ranks(closure) == (live, maybe, set())
    assert set(closure.dead) == {"unused.py", *files} - live - maybe
