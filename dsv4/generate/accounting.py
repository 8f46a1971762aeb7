"""The account of generated texts: how each ended, how long it is, and where it began to repeat itself.

Reads tokens and reasons alone, so that it checks the loop that wrote them: a stop id that was generated and did not
end the text is named, whatever that loop believed. Imports no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4.generate.repetition import Loop, distinct, final_loop
from dsv4.generate.stops import KINDS, Kind, Stops, first_in

DISTINCT = (1, 2, 4)  # n of the n-grams that are counted


@dataclass(frozen=True, kw_only=True)
class Account:
    """One text.

    Attributes
    ----------
    kind : of its prompt.
    reason : why it ended, see :class:`dsv4.generate.batch.Continuation`.
    stop : the stop id that ended it, None for every other reason.
    own_stop : whether that is the turn end of this kind of prompt.
    ran_past : step of the first stop id that did not end it, None if there is none. Any is a fault.
    length : tokens, without the stop id.
    loop : what it ends in, see :func:`~dsv4.generate.repetition.final_loop`; None for a text that stopped.
    distinct : n -> share of different n-grams.
    """

    kind: Kind
    reason: str
    stop: int | None
    own_stop: bool
    ran_past: int | None
    length: int
    loop: Loop | None
    distinct: Mapping[int, float | None]

    @property
    def onset(self) -> int | None:
        """First step after which an n-gram loop never ends, None if every loop ends."""
        return self.loop.onset if self.loop else None


def account(tokens: Sequence[int], reason: str, kind: Kind, stops: Stops) -> Account:
    """Account for one text.

    Parameters
    ----------
    tokens : generated ids, the stop id that ended them last.
    reason : why they ended.
    kind : of the prompt.
    stops : the checkpoint's for this kind.

    Raises
    ------
    ValueError
        ``reason`` is ``stop_id``, and the last token is none.
    """
    first = first_in(tokens, stops.every)
    ended = reason == "stop_id"
    if ended and (not tokens or tokens[-1] not in stops.every):
        raise ValueError(f"ended by a stop id, but the last of {len(tokens)} tokens is none of {stops.every}")
    written = tokens[:-1] if ended else tokens
    return Account(
        kind=kind,
        reason=reason,
        stop=tokens[-1] if ended else None,
        own_stop=ended and tokens[-1] == stops.own,
        ran_past=None if first is None or (ended and first == len(written)) else first,
        length=len(written),
        loop=None if reason in ("stop_id", "stop_string") else final_loop(tokens),
        distinct={n: distinct(written, n) for n in DISTINCT},
    )


@dataclass(frozen=True, kw_only=True)
class KindAccount:
    """All texts of one kind of prompt.

    Attributes
    ----------
    texts : how many.
    stops : stop id -> texts that it ended.
    not_stopped : reason -> texts that ended otherwise.
    ran_past : texts that went on after a stop id.
    repeating : texts that end in a loop.
    """

    texts: int
    stops: Mapping[int, int]
    not_stopped: Mapping[str, int]
    ran_past: int
    repeating: int


def by_kind(accounts: Sequence[Account]) -> dict[Kind, KindAccount]:
    """Stop ids and other ends by kind of prompt; kinds without a text are left out."""
    found: dict[Kind, KindAccount] = {}
    for kind in KINDS:
        if not (own := [one for one in accounts if one.kind == kind]):
            continue
        found[kind] = KindAccount(
            texts=len(own),
            stops=Counter(one.stop for one in own if one.stop is not None),
            not_stopped=Counter(one.reason for one in own if one.stop is None),
            ran_past=sum(one.ran_past is not None for one in own),
            repeating=sum(one.loop is not None for one in own),
        )
    return found
