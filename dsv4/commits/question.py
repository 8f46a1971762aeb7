"""What a bisection asks of a commit: does its gate hold, does it at one tap, is one number inside a limit."""

from dataclasses import dataclass
from difflib import get_close_matches

import pandas as pd

from dsv4.commits.audit import need_floor, own_findings
from dsv4.commits.branch import Branch
from dsv4.commits.run import ensure
from dsv4.commits.search import Answer
from dsv4.config import ConfigError
from dsv4.dump import DumpReader
from dsv4.judge.compare import NUMBERS, compare
from dsv4.judge.evaluate import Finding, layer_value, select
from dsv4.taps import BY_NAME, MODEL, TAPS, Tap

BY_KIND = {"value": "cos", "scores": "overlap", "ids": "overlap", "lse": "max_abs"}
AT_LEAST = ("cos", "cos_min", "cos_p01", "cos_median", "overlap", "overlap_min", "top1", "margin_min")
METRICS = (*NUMBERS, "gain_error")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a bisection knows of a commit.

    Attributes
    ----------
    answer : good, bad or skip.
    why : one sentence.
    layer, tap, stage : where it is bad; None where it is not.
    """

    answer: Answer
    why: str
    layer: int | str | None = None
    tap: str | None = None
    stage: str | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of every commit.

    Attributes
    ----------
    taps : all at which the gate must hold, or whose number is meant; none: the gate as a whole.
    limit : bound of the number, layer by layer, on the reference's inputs against ``trained``; None: what the
        gate finds.
    metric : the number.
    """

    taps: tuple[Tap, ...] = ()
    limit: float | None = None
    metric: str = ""

    @classmethod
    def of(cls, tap: str | None, limit: float | None, metric: str | None) -> "Question":
        """Check what the command line says.

        Raises
        ------
        ConfigError
            No such tap or stage, no such metric, or a limit without a tap.
        """
        if tap is None:
            if limit is not None or metric:
                raise ConfigError("bisect: a limit or a metric needs a tap, as in tap=topk limit=0.9")
            return cls()
        taps = tuple(each for each in TAPS if tap in (each.name, each.stage))
        if not taps:
            known = [*dict.fromkeys(name for each in TAPS for name in (each.name, each.stage))]
            near = get_close_matches(tap, known, 3)
            listed = f"{'near it' if near else 'there are'}: {', '.join(near or known)}"
            raise ConfigError(f"bisect: tap = {tap}: no such tap or stage; {listed}")
        if limit is None:
            if metric:
                raise ConfigError(f"bisect: metric = {metric}: give a limit too, as in limit=0.9")
            return cls(taps=taps)
        taps = tuple(each for each in taps if each.reference)
        if not taps:
            raise ConfigError(
                f"bisect: tap = {tap}: the reference has none to measure against; leave limit out"
            )
        metric = metric or BY_KIND[taps[0].kind]
        if metric not in METRICS:
            raise ConfigError(f"bisect: metric = {metric}: no such number; there are: {', '.join(METRICS)}")
        return cls(taps=taps, limit=limit, metric=metric)

    @property
    def words(self) -> str:
        """What makes a commit bad."""
        if not self.taps:
            return "the gate fails"
        names = ", ".join(tap.name for tap in self.taps)
        if self.limit is None:
            return f"the gate fails at {names}"
        return (
            f"{self.metric} of {names} against the reference is {self._beyond} {self.limit:g} in some layer"
        )

    @property
    def _beyond(self) -> str:
        return "under" if self.metric in AT_LEAST else "over"

    def judge(self, branch: Branch, sha: str) -> Judged:
        """Ask a commit; runs it if that was not done.

        Raises
        ------
        ConfigError
            No reference, or no noise floor of its plan.
        """
        outcome = ensure(branch, sha)
        if outcome.state == "failed":
            return Judged(answer=Answer.SKIP, why=f"does not run: {outcome.error}")
        if self.limit is not None:
            return self.of_values(measured(branch, outcome.of, self.taps, self.metric))
        need_floor(branch, sha)
        found, error = own_findings(branch, outcome.of)
        if error:
            return Judged(answer=Answer.SKIP, why=f"its dumps cannot be compared: {error}")
        return self.of_findings(found)

    def of_findings(self, findings: list[Finding]) -> Judged:
        """Bad at the first finding that is asked for."""
        names = {tap.name for tap in self.taps}
        here = [finding for finding in findings if not names or finding.tap in names]
        if not here:
            return Judged(answer=Answer.GOOD, why="no finding")
        first = here[0]
        return _bad(first.layer if first.layer >= 0 else MODEL, first.tap, first.text)

    def of_values(self, values: pd.Series) -> Judged:
        """Bad at the first layer whose number is beyond the limit, or no number."""
        assert self.limit is not None
        if values.empty:
            return Judged(answer=Answer.SKIP, why=f"its dumps hold no {self.metric} of this tap")
        least = self.metric in AT_LEAST
        beyond = values[~(values >= self.limit if least else values <= self.limit)]  # NaN is beyond
        if beyond.empty:
            worst = values.min() if least else values.max()
            return Judged(answer=Answer.GOOD, why=f"{self.metric} is {worst:.6g} at worst")
        (layer, tap), value = next(iter(beyond.items()))  # type: ignore[misc]
        why = f"{self.metric} {value:.6g} is {self._beyond} {self.limit:g}"
        return _bad(layer if layer >= 0 else MODEL, tap, why)


def measured(branch: Branch, of: str, taps: tuple[Tap, ...], metric: str) -> pd.Series:
    """One number by (layer, tap), in the order of the layers, of a commit's dumps against the reference."""
    only, frames = frozenset(tap.name for tap in taps), []
    for prompt in branch.prompts:
        with (
            DumpReader(branch.folder(of) / f"{prompt}.h5") as own,
            DumpReader(branch.results / "reference" / f"{prompt}.h5") as reference,
        ):
            frames.append(compare(own, reference, modes=("isolated",), against="trained", only=only))
    frame = select(pd.concat(frames, ignore_index=True), part="all")
    frame = frame[frame["step"] < 0]
    found = {}
    for order, tap in enumerate(taps):
        for layer, value in layer_value(select(frame, tap=tap.name), metric).items():
            number = int(str(layer))
            found[number if number >= 0 else 1 << 16, order] = (number, tap.name), float(value)
    ordered = [found[key] for key in sorted(found)]
    return pd.Series([value for _, value in ordered], index=[key for key, _ in ordered], dtype=float)


def _bad(layer: int | str, tap: str, why: str) -> Judged:
    return Judged(answer=Answer.BAD, why=why, layer=layer, tap=tap, stage=BY_NAME[tap].stage)
