"""The prompts of an audit, and their token ids.

A prompt file is a list (``rules/prompts.schema.yaml``). Kind ``plain`` is text that the model
continues; kind ``chat`` is turns, laid out by the checkpoint's own chat template, so that the
model sees what it was trained on. Imports no torch.
"""

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dsv4.config import Config, ConfigError, model_config, read_yaml

Role = Literal["user", "assistant"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes
    ----------
    id : name of its dump files.
    kind : ``plain`` (``text`` is set) or ``chat`` (``turns`` is).
    text : what a plain prompt continues.
    turns : (role, text) pairs; the last is the user's.
    rows : token positions that are always dumped.
    """

    id: str
    kind: Literal["plain", "chat"]
    text: str | None = None
    turns: tuple[tuple[Role, str], ...] = ()
    rows: tuple[int, ...] = ()


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read and check a prompt file.

    Raises
    ------
    ConfigError
        Not what the schema says, text and turns mixed up, an id given twice, or roles that do not take turns.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    for entry in read_yaml(path, "prompts"):
        content, other = ("text", "turns") if entry["kind"] == "plain" else ("turns", "text")
        if content not in entry or other in entry:
            raise ConfigError(f"{path}: {entry['id']}: kind {entry['kind']} has {content}, and no {other}")
        turns = tuple(next(iter(turn.items())) for turn in entry.get("turns", ()))
        rows = tuple(sorted(entry.get("rows", ())))
        prompt = Prompt(id=entry["id"], kind=entry["kind"], text=entry.get("text"), turns=turns, rows=rows)
        if any(prompt.id == other.id for other in prompts):
            raise ConfigError(f"{path}: id {prompt.id!r} stands twice; dump files are named by it")
        expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
        if [role for role, _ in turns] != expected or (turns and turns[-1][0] != "user"):
            raise ConfigError(f"{path}: {prompt.id}: turns must go user, assistant, ..., user")
        prompts.append(prompt)
    return prompts


class PromptTokenizer:
    """A checkpoint's tokenizer and chat template.

    Parameters
    ----------
    checkpoint : folder with ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises
    ------
    ConfigError
        A file is missing or unreadable.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file}: missing; prompts cannot be tokenised without it")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file}: no valid tokenizer: {error}") from error
        settings = checkpoint / "tokenizer_config.json"
        try:
            self._settings: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{settings}: cannot be read: {error}") from error

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, from the beginning-of-sequence token on.

        A control token's name that stands in a prompt's *text* is text, never the control token.

        Raises
        ------
        ConfigError
            The checkpoint names no beginning-of-sequence token, or has no chat template for a chat.
        """
        if prompt.text is not None:
            return [*self._control(self._special("bos_token")), *self._text(prompt.text)]
        ids: list[int] = []
        for piece, turn in self._laid_out(prompt):
            ids += self._control(piece)
            if turn is not None:
                ids += self._text(prompt.turns[turn][1])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens by name."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _named(self, name: str) -> str | None:
        value = self._settings.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def _special(self, name: str) -> str:
        text = self._named(name)
        if not isinstance(text, str) or self._tokenizer.token_to_id(text) is None:
            raise ConfigError(f"{self._folder}/tokenizer_config.json: {name} = {text!r} is no known token")
        return text

    def _laid_out(self, prompt: Prompt) -> list[tuple[str, int | None]]:
        """Split the filled template into (template's own text, turn that follows it)."""
        template = self._settings.get("chat_template")
        file = self._folder / "chat_template.jinja"
        if template is None and file.is_file():
            template = file.read_text(encoding="utf-8")
        if not isinstance(template, str):
            raise ConfigError(
                f"{self._folder}: no chat_template, which the chat prompt {prompt.id!r} needs;"
                " add one to tokenizer_config.json or use plain prompts"
            )
        # Each text is stood for by a mark, so that the template's tokens and the text are encoded apart.
        messages = [{"role": role, "content": f"\ue000{i}\ue001"} for i, (role, _) in enumerate(prompt.turns)]
        names = {name: self._named(name) or "" for name in ("bos_token", "eos_token")}
        try:
            jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            filled = jinja.from_string(template).render(
                messages=messages, add_generation_prompt=True, **names
            )
        except TemplateError as error:
            raise ConfigError(
                f"{self._folder}: chat_template fails on prompt {prompt.id!r}: {error}"
            ) from error
        pieces = re.split("\ue000(\\d+)\ue001", filled)
        turns: list[int | None] = [int(mark) for mark in pieces[1::2]]
        if turns != list(range(len(messages))):
            raise ConfigError(
                f"{self._folder}: chat_template drops or reorders turns of prompt {prompt.id!r}"
            )
        return list(zip(pieces[::2], [*turns, None], strict=True))

    def _control(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _text(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def token_sha256(ids: Sequence[int]) -> str:
    """Hash token ids (little-endian int32): the ``prompt`` attribute of a dump."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def encode_all(config: Config) -> dict[str, list[int]]:
    """Token ids of every prompt by id, checked against what the model takes.

    Raises
    ------
    ConfigError
        A prompt with its decode steps is longer than the model's positions, or one of its
        ``rows`` lies behind its end.
    """
    limit = model_config(config.checkpoint).get("max_position_embeddings")
    if not isinstance(limit, int):
        raise ConfigError(
            f"{config.checkpoint}/config.json: max_position_embeddings = {limit!r} is no whole number"
        )
    tokenizer = PromptTokenizer(config.checkpoint)
    encoded: dict[str, list[int]] = {}
    for prompt in load_prompts(config.prompts):
        ids = tokenizer.encode(prompt)
        if len(ids) + config.decode_steps > limit:
            raise ConfigError(
                f"{config.prompts}: {prompt.id}: {len(ids)} tokens + {config.decode_steps} decode steps"
                f" are over max_position_embeddings = {limit} of {config.checkpoint};"
                f" shorten it to {limit - config.decode_steps} tokens"
            )
        if prompt.rows and prompt.rows[-1] >= len(ids):
            raise ConfigError(
                f"{config.prompts}: {prompt.id}: row {prompt.rows[-1]} lies behind its {len(ids)} tokens"
            )
        encoded[prompt.id] = ids
    return encoded
