"""Which passing rungs repeat earlier than the reference's own text on the same prompt -> ``repetition.json``.

One of them is what asks for the FP32 residual's A/B, so that ``snakemake all`` runs it; see :mod:`dsv4.judge.residual`.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from dsv4.config import Config, load
from dsv4.console import main_guard
from dsv4.dump import DumpError
from dsv4.files import write_json
from dsv4.judge.collect import published, wanted
from dsv4.judge.measure import arguments
from dsv4.judge.onsets import REPETITION, asked_by
from dsv4.judge.text_files import Text, read_reference, read_text
from dsv4.ladder import State, Variant


def texts_of(results: Path, rungs: Iterable[Variant]) -> dict[str, Text]:
    """Texts of these rungs; one that is not there, or not of this run, plan or reference, counts for nothing."""
    found = dict[str, Text]()
    with suppress(DumpError):
        reference = read_reference(results)
        for rung in rungs:
            with suppress(DumpError):
                found[rung.id] = read_text(results, rung, reference)
    return found


def passed(results: Path, config: Config, target: str | None) -> list[Variant]:
    """Rungs that this call is about and that passed, with all below them."""
    verdicts = [(rung, published(results, config, rung, target)) for rung in wanted(config, target)]
    return [rung for rung, verdict in verdicts if verdict and verdict["status"] == State.PASS]


def main() -> int:
    """Write ``repetition.json``; exits 0 whatever it finds."""
    options = arguments(__doc__, "target").parse_args()
    rungs = passed(options.results, load(options.config), options.target)
    texts = texts_of(options.results, [rung for rung in rungs if rung.spine])
    found = asked_by({name: text.head for name, text in texts.items()})
    write_json(options.results / REPETITION, {"schema": 1, "compared": list(texts), "asked_by": found})
    said = ", ".join(f"{each['variant']} on {each['prompt']}" for each in found) or "none"
    Console(stderr=True).print(
        f"texts that repeat earlier than the reference's own: {said}, of {len(texts)} rungs",
        highlight=False,
        markup=False,
    )
    return 0


if __name__ == "__main__":
    main_guard(main)
