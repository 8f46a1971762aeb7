"""What a stage says while it works, and how it says what is wrong."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dsv4.config import ConfigError
from dsv4.engine.spec import EngineError
from dsv4.files import WriteError
from dsv4.ladder import LadderError
from dsv4.stored import DumpError

USER_ERRORS = (ConfigError, DumpError, EngineError, LadderError, WriteError)


def progress(items: Sequence[str], what: str) -> Iterator[str]:
    """Yield ``items``, with a bar on a terminal and a line an item elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _lines(items, what, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=len(items))
        for item in items:
            bar.update(task, description=f"{what}: {item}")
            yield item
            bar.advance(task)


def _lines(items: Iterable[str], what: str, console: Console) -> Iterator[str]:
    listed = list(items)
    for index, item in enumerate(listed, start=1):
        console.print(f"{what}: {item} ({index} of {len(listed)})", highlight=False)
        yield item


def main_guard(main: Callable[[], int | None]) -> NoReturn:
    """Run a command line and exit with its status; what the user can mend is one clear line and exit code 1."""
    try:
        sys.exit(main())
    except USER_ERRORS as error:
        sys.exit(f"error: {error}")
