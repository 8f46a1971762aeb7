"""Which tokens end a text, by the kind of its prompt. Imports no torch.

A plain completion ends as a document does, with the tokenizer's ``eos_token``; a chat's answer, first or later turn,
with what the chat template writes after an assistant's turn. Both must be among ``eos_token_id`` of
``generation_config.json`` (of ``config.json`` where there is none), at any of which every serving stack stops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4.config import CheckpointError, json_object
from dsv4.prompts import Prompt, PromptTokenizer

Kind = Literal["plain", "chat", "second_turn"]
KINDS: tuple[Kind, ...] = ("plain", "chat", "second_turn")


@dataclass(frozen=True)
class Stops:
    """Tokens at which a text ends.

    Attributes
    ----------
    own : the turn end of this kind of prompt.
    every : all that end a text, ``own`` among them, ascending.

    Raises
    ------
    ValueError
        ``own`` is not among them.
    """

    own: int
    every: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a set that lost the one that counts."""
        if self.own not in self.every:
            raise ValueError(f"stop ids {self.every} miss {self.own}, the turn end of this kind of prompt")


def kind_of(prompt: Prompt) -> Kind:
    """A plain text, the first answer of a chat, or a later one."""
    if prompt.kind == "plain":
        return "plain"
    return "second_turn" if len(prompt.turns) > 1 else "chat"


def stops_of(tokenizer: PromptTokenizer, checkpoint: Path, kind: Kind) -> Stops:
    """Read a checkpoint's stop ids for one kind of prompt.

    Raises
    ------
    CheckpointError
        The checkpoint names no stop ids, or not the one that this kind ends with: a model that ends its turn would
        run on.
    """
    file, every = _declared(checkpoint)
    own, source = (
        (tokenizer.eos(), "eos_token of tokenizer_config.json")
        if kind == "plain"
        else (tokenizer.turn_end(), "what the chat template writes after an assistant's turn")
    )
    if own not in every:
        raise CheckpointError(
            f"{file}: eos_token_id = {list(every)} misses {own} ({tokenizer.name_of(own)!r}, {source}): a {kind}"
            " text would never be seen to end; add it"
        )
    return Stops(own, every)


def _declared(checkpoint: Path) -> tuple[Path, tuple[int, ...]]:
    """The file that names stop ids, and the ids."""
    file = checkpoint / "generation_config.json"
    if not file.is_file():
        file = checkpoint / "config.json"
    value: Any = json_object(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(one) is int for one in ids):
        raise CheckpointError(f"{file}: eos_token_id = {value!r} names no stop ids; add the checkpoint's own")
    return file, tuple(sorted(set(ids)))


def first_in(tokens: Sequence[int], ids: Sequence[int]) -> int | None:
    """Step of the first token that is one of ``ids``, or None."""
    return next((step for step, token in enumerate(tokens) if token in ids), None)
