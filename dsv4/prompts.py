"""The prompts of an audit, and their token ids.

A prompt file is a list (``rules/prompts.schema.yaml``). Kind ``plain`` is text that the model
continues; kind ``chat`` is turns, laid out by the checkpoint's own chat template, so that the
model sees what it was trained on. Imports no torch.
"""

import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dsv4.config import FETCH, CheckpointError, Config, ConfigError, json_object
from dsv4.model.config import ModelConfig, load_config
from dsv4.schema import read_yaml

Role = Literal["user", "assistant"]
Use = Literal["taps", "text", "both"]
TEMPLATE = "correct it in tokenizer_config.json, or use plain prompts"


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
    use : ``taps``: dumped and judged layer by layer; ``text``: continued; ``both``.
    """

    id: str
    kind: Literal["plain", "chat"]
    text: str | None = None
    turns: tuple[tuple[Role, str], ...] = ()
    rows: tuple[int, ...] = ()
    use: Use = "both"

    @property
    def has_taps(self) -> bool:
        """Whether it is dumped and judged layer by layer."""
        return self.use != "text"

    @property
    def has_text(self) -> bool:
        """Whether it is continued, freely and forced."""
        return self.use != "taps"


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read and check a prompt file.

    Raises
    ------
    ConfigError
        Not what the schema says, text and turns mixed up, an id given twice, roles that do not take turns, rows of a
        prompt without taps, or no prompt with taps.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    for entry in read_yaml(path, "prompts"):
        content, other = ("text", "turns") if entry["kind"] == "plain" else ("turns", "text")
        if content not in entry or other in entry:
            raise ConfigError(f"{path}: {entry['id']}: kind {entry['kind']} has {content}, and no {other}")
        turns = tuple(next(iter(turn.items())) for turn in entry.get("turns", ()))
        rows = tuple(sorted(entry.get("rows", ())))
        prompt = Prompt(
            id=entry["id"],
            kind=entry["kind"],
            text=entry.get("text"),
            turns=turns,
            rows=rows,
            use=entry.get("use", "both"),
        )
        if any(prompt.id == other.id for other in prompts):
            raise ConfigError(f"{path}: id {prompt.id!r} stands twice; dump files are named by it")
        expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
        if [role for role, _ in turns] != expected or (turns and turns[-1][0] != "user"):
            raise ConfigError(f"{path}: {prompt.id}: turns must go user, assistant, ..., user")
        if rows and not prompt.has_taps:
            raise ConfigError(f"{path}: {prompt.id}: use text dumps no rows; leave `rows` out, or use both")
        prompts.append(prompt)
    if not any(prompt.has_taps for prompt in prompts):
        raise ConfigError(
            f"{path}: every prompt has `use: text`; let one have taps, for rungs are judged by these"
        )
    return prompts


def with_taps(path: str | Path) -> list[str]:
    """Ids of the prompts that are dumped and judged, in the order of the file; errors as :func:`load_prompts`."""
    return [prompt.id for prompt in load_prompts(path) if prompt.has_taps]


def with_text(path: str | Path) -> list[str]:
    """Ids of the prompts that are continued, in the order of the file; errors as :func:`load_prompts`."""
    return [prompt.id for prompt in load_prompts(path) if prompt.has_text]


class PromptTokenizer:
    """A checkpoint's tokenizer and chat template.

    Parameters
    ----------
    checkpoint : folder with ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises
    ------
    CheckpointError
        A file is missing or unreadable.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; prompts cannot be tokenised without it: {FETCH}")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: no valid tokenizer ({error}); {FETCH}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = json_object(checkpoint / "tokenizer_config.json")

    def encode(self, prompt: Prompt, written: Mapping[int, Sequence[int]] | None = None) -> list[int]:
        """Token ids of a prompt, from the beginning-of-sequence token on.

        A control token's name that stands in a prompt's *text* is text, never the control token.

        Parameters
        ----------
        prompt : Prompt
        written : turn -> the ids that a model wrote for it; they stand for its text, whose own ids may be others.

        Raises
        ------
        CheckpointError
            The checkpoint names no beginning-of-sequence token, has no chat template for a chat, or one that
            fails, or its tokenizer does.
        """
        if prompt.text is not None:
            return [*self._ids(self._special("bos_token"), control=True), *self._ids(prompt.text)]
        ids: list[int] = []
        for piece, turn in self._laid_out(prompt):
            ids += self._ids(piece, control=True)
            if turn is not None:
                ids += (written or {}).get(turn) or self._ids(prompt.turns[turn][1])
        return ids

    def eos(self) -> int:
        """Token that ends a document.

        Raises
        ------
        CheckpointError
            The checkpoint names none.
        """
        return self._ids(self._special("eos_token"), control=True)[0]

    def turn_end(self) -> int:
        """Token that the chat template writes after an assistant's turn.

        Raises
        ------
        CheckpointError
            No chat template, one that fails, or one that writes nothing there; or its tokenizer fails.
        """
        turns: tuple[tuple[Role, str], ...] = (("user", "a"), ("assistant", "b"), ("user", "c"))
        pieces = self._laid_out(Prompt(id="turn end", kind="chat", turns=turns))
        if not (ids := self._ids(pieces[2][0], control=True)):
            raise CheckpointError(f"{self._folder}: chat_template ends no assistant's turn; {TEMPLATE}")
        return ids[0]

    def stream(self) -> Callable[[int], str | None]:
        """Text of tokens one by one, control tokens by name; None while a character is not whole."""
        stream, tokenizer = DecodeStream(skip_special_tokens=False), self._tokenizer
        return lambda token: stream.step(tokenizer, token)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens by name."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def name_of(self, token: int) -> str | None:
        """A token's own text, None for one that is unknown."""
        return self._tokenizer.id_to_token(token)

    def is_control(self, token: int) -> bool:
        """Whether a token was added to the vocabulary: beginnings, ends, names of turns; no text is split into it."""
        return token in self._tokenizer.get_added_tokens_decoder()

    def _named(self, name: str) -> Any:
        value = self._settings.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def _special(self, name: str) -> str:
        text = self._named(name)
        if not isinstance(text, str) or self._tokenizer.token_to_id(text) is None:
            raise CheckpointError(
                f"{self._folder}/tokenizer_config.json: {name} = {text!r} is no known token; {FETCH}"
            )
        return text

    def _laid_out(self, prompt: Prompt) -> list[tuple[str, int | None]]:
        """Split the filled template into (template's own text, turn that follows it)."""
        template = self._template(prompt)
        # Each text is stood for by a mark, so that the template's tokens and the text are encoded apart.
        messages = [{"role": role, "content": f"\ue000{i}\ue001"} for i, (role, _) in enumerate(prompt.turns)]
        names = {name: self._named(name) or "" for name in ("bos_token", "eos_token")}
        try:
            jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            filled = jinja.from_string(template).render(
                messages=messages, add_generation_prompt=True, **names
            )
        except Exception as error:  # a template is a program, and fails in any way
            raise CheckpointError(
                f"{self._folder}: chat_template fails on prompt {prompt.id!r} ({error!r}); {TEMPLATE}"
            ) from error
        pieces = re.split("\ue000(\\d+)\ue001", filled)
        turns: list[int | None] = [int(mark) for mark in pieces[1::2]]
        if turns != list(range(len(messages))):
            raise CheckpointError(
                f"{self._folder}: chat_template drops or reorders turns of prompt {prompt.id!r}; {TEMPLATE}"
            )
        return list(zip(pieces[::2], [*turns, None], strict=True))

    def _template(self, prompt: Prompt) -> str:
        template, file = self._settings.get("chat_template"), self._folder / "chat_template.jinja"
        if template is None and file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file}: cannot be read ({error}); {TEMPLATE}") from error
        if not isinstance(template, str):
            found = "no chat_template" if template is None else f"chat_template = {template!r} is no text"
            raise CheckpointError(
                f"{self._folder}: {found}, which the chat prompt {prompt.id!r} needs; {TEMPLATE}"
            )
        return template

    def _ids(self, text: str, control: bool = False) -> list[int]:
        """Token ids of a text, in which names of control tokens are these tokens or, by default, text."""
        self._tokenizer.encode_special_tokens = not control
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{self._folder}/tokenizer.json: cannot encode {text[:60]!r} ({error}); {FETCH}"
            ) from error


def token_sha256(ids: Sequence[int]) -> str:
    """Hash token ids (little-endian int32): the ``prompt`` attribute of a dump."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def encode_all(config: Config) -> dict[str, list[int]]:
    """Token ids of every prompt by id, checked against what the model takes.

    Raises
    ------
    ConfigError
        A prompt with its decode steps, or with the longest text, is longer than the model's positions, one of its
        ``rows`` lies behind its end, or one of its tokens behind the model's vocabulary.
    """
    sizes = load_config(config.checkpoint)
    tokenizer = PromptTokenizer(config.checkpoint)
    encoded: dict[str, list[int]] = {}
    for prompt in load_prompts(config.prompts):
        encoded[prompt.id] = tokenizer.encode(prompt)
        _check(prompt, encoded[prompt.id], config, sizes, tokenizer)
    return encoded


def _check(
    prompt: Prompt, ids: Sequence[int], config: Config, sizes: ModelConfig, tokenizer: PromptTokenizer
) -> None:
    where, limit = f"{config.prompts}: {prompt.id}", sizes.max_position_embeddings
    if not ids:
        raise ConfigError(f"{where}: has no tokens; write a longer text")
    steps = [(prompt.has_taps, config.decode_steps, "decode steps", "")]
    steps += [(prompt.has_text, config.text_tokens, "of its text (text_tokens)", ", or use taps alone")]
    for counts, more, what, otherwise in steps:
        if counts and len(ids) + more > limit:
            raise ConfigError(
                f"{where}: {len(ids)} tokens + {more} {what}"
                f" are over max_position_embeddings = {limit} of {config.checkpoint};"
                f" shorten it to {limit - more} tokens{otherwise}"
            )
    if prompt.rows and prompt.rows[-1] >= len(ids):
        raise ConfigError(f"{where}: row {prompt.rows[-1]} lies behind its {len(ids)} tokens")
    if max(ids) >= sizes.vocab_size:
        raise CheckpointError(
            f"{config.checkpoint}/tokenizer.json: token {max(ids)} ({tokenizer.name_of(max(ids))!r}) of prompt"
            f" {prompt.id!r} is not below vocab_size = {sizes.vocab_size} of config.json: tokenizer and"
            f" weights are not of one model; {FETCH}"
        )
