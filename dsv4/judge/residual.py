"""The FP32 residual's A/B: what it moves, what it costs, how large the residual is -> ``residual.json``.

The residual is the four mHC streams, stored in BF16 between blocks. The A/B (``snakemake B5``) stores them in FP32 in
chosen layers, on top of the last rung of B4. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dsv4.config import Config, load
from dsv4.console import main_guard
from dsv4.dump import DumpError
from dsv4.files import write_json
from dsv4.judge.collect import published, wanted
from dsv4.judge.launches import FLASH, PRO, Sizes, step_bytes, stream_bytes
from dsv4.judge.measure import arguments, read_notes
from dsv4.judge.mixing import mixing
from dsv4.judge.onsets import asked_by, onsets
from dsv4.judge.repetition import texts_of
from dsv4.judge.residual_verdict import FILE, Found, Tried, decide
from dsv4.judge.streams import lines, peaks, step_peaks, text_peaks, text_step_peaks
from dsv4.judge.summary import number
from dsv4.judge.text_change import paired_change
from dsv4.judge.text_files import Text
from dsv4.ladder import State, Variant
from dsv4.plan import Plan, flatten

SCHEMA = 1
BUFFERS = 2  # a stage reads one set of streams and writes the next


@dataclass(frozen=True)
class Audit:
    """What was judged, of the whole ladder or of a target; a file that is missing is one that was not run."""

    results: Path
    config: Config
    target: str | None = None

    @cached_property
    def states(self) -> dict[str, State]:
        """State of every rung with a verdict that counts, parents first."""
        every = [
            (rung.id, published(self.results, self.config, rung, self.target))
            for rung in wanted(self.config, self.target)
        ]
        return {name: State(verdict["status"]) for name, verdict in every if verdict}

    @property
    def passed(self) -> list[Variant]:
        """Rungs that passed."""
        return [self.config.ladder[name] for name, state in self.states.items() if state == State.PASS]

    @property
    def parent(self) -> Variant | None:
        """What the A/B stands on; rungs on another parent are no part of it."""
        rungs = self.config.ladder.residuals()
        return self.config.ladder[rungs[0].parent] if rungs and rungs[0].parent else None

    @property
    def rungs(self) -> list[Variant]:
        """The A/B's rungs."""
        parent = self.parent
        return [rung for rung in self.config.ladder.residuals() if parent and rung.parent == parent.id]

    @cached_property
    def texts(self) -> dict[str, Text]:
        """Texts of the spine's and the A/B's rungs that passed."""
        return texts_of(self.results, [rung for rung in self.passed if rung.spine or rung in self.rungs])

    def tried(self, rung: Variant | None) -> Tried | None:
        """A rung that passed and has a text, beside its parent's if that has one too."""
        if rung is None or rung.id not in self.texts:
            return None
        own, below = self.texts[rung.id], self.texts.get(rung.parent or "")
        kl = number(own.table["kl_nats"].mean(skipna=False))
        return Tried(rung.id, rung.plan.residual, kl, _change(own, below), onsets(own.head))

    def layer_peaks(self) -> list[float]:
        """Max abs X by layer in the free runs of all judged rungs, and along the texts of those that passed."""
        paths = [self.results / "metrics" / f"{name}.parquet" for name in self.states]
        found = [peaks(read_notes(path) for path in paths if path.exists()), text_peaks(self.texts.values())]
        both = [by_layer for by_layer in found if by_layer]
        return [float(peak) for peak in np.max(both, axis=0)] if both else []

    def step_peaks(self) -> list[float]:
        """Max abs X by step, of the highest judged rung that the A/B stands on; empty if a dump is refused.

        Along the reference's texts where that rung was forced along them, else in the decode steps of its dumps.
        """
        line = self.config.ladder.lineage(self.parent.id) if self.parent else []
        forced = next((rung.id for rung in reversed(line) if rung.id in self.texts), None)
        if forced:
            return text_step_peaks(self.texts[forced])
        name = next((rung.id for rung in reversed(line) if rung.id in self.states), None)
        try:
            return step_peaks(sorted((self.results / "variants" / name).glob("*.h5"))) if name else []
        except DumpError:  # its own verdict says what is wrong
            return []


def judge(results: Path, config: Config, target: str | None = None) -> dict[str, Any]:
    """``residual.json``; see :class:`Audit` for the parameters."""
    audit = Audit(results, config, target)
    texts = {
        rung.id: audit.texts[rung.id].head for rung in audit.passed if rung.spine and rung.id in audit.texts
    }
    below = audit.tried(audit.parent)
    by_layer, by_step = audit.layer_peaks(), audit.step_peaks()
    found = Found(
        peak=float(np.max([*by_layer, *by_step])) if by_layer or by_step else None,
        texts=list(texts),
        asked_by=asked_by(texts),
        parent=(below.variant, below.onsets) if below else ("", {}),
        tried=[tried for rung in audit.rungs if (tried := audit.tried(rung))],
        stopped={
            rung.id: state
            for rung in audit.rungs
            if (state := audit.states.get(rung.id)) not in (None, State.PASS)
        },
    )
    verdict, words = decide(found)
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "words": words,
        "asked_by": found.asked_by,
        "parent": {"variant": below.variant} | _as_dict(below) if below else None,
        "rungs": {each.variant: _as_dict(each) for each in found.tried},
        "stopped": found.stopped,
        "cost": [cost(sizes, audit.rungs) for sizes in (FLASH, PRO)],
        "by_layer": lines("layer", by_layer),
        "by_step": lines("step", by_step),
        "mixing": _mixing(results),
    }


def _change(own: Text, below: Text | None) -> dict[str, Any] | None:
    try:
        return paired_change(own.table, below.table).as_dict() if below else None
    except ValueError:  # a position without a KL
        return None


def _as_dict(tried: Tried) -> dict[str, Any]:
    own = {prompt: onset for prompt, (onset, _) in tried.onsets.items()}
    return {"kl_nats": tried.kl_nats, "onsets": own, "change": tried.change}


def cost(sizes: Sizes, rungs: Sequence[Variant]) -> dict[str, Any]:
    """What FP32 streams take at a released model's sizes, more than BF16 ones.

    Returns
    -------
    dict
        ``bytes_per_token``: of one token's streams. A step holds ``buffers`` of them for each of its tokens, all those
        of a prefill's chunk at once; nothing is kept between steps (``persistent_bytes``).
        ``bandwidth_bytes_per_step``: a token, every layer in FP32; ``by_rung``: of each rung of the A/B.
    """
    narrow, wide = (flatten(Plan()) | {"residual": value} for value in ("bf16", "fp32"))

    def moves(plan: dict[str, str]) -> int:
        return step_bytes(plan, sizes, 1)["residual"] - step_bytes(narrow, sizes, 1)["residual"]

    return {
        "layers": len(sizes.compress_ratios),
        "bytes_per_token": stream_bytes(wide, sizes, 0) - stream_bytes(narrow, sizes, 0),
        "buffers": BUFFERS,
        "persistent_bytes": 0,
        "bandwidth_bytes_per_step": moves(wide),
        "by_rung": {rung.id: moves(flatten(rung.plan)) for rung in rungs},
    }


def _mixing(results: Path) -> dict[str, Any] | None:
    try:
        return mixing(results).as_dict()
    except DumpError:  # none there, or NaN: the claim about mHC says which
        return None


def main() -> int:
    """Write ``residual.json``; exits 0 whatever it finds."""
    options = arguments(__doc__, "target").parse_args()
    found = judge(options.results, load(options.config), options.target)
    write_json(options.results / FILE, found)
    Console(stderr=True).print(found["words"], highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    main_guard(main)
