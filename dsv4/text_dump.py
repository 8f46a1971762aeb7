"""The reference's own texts, in one file: what every rung is forced along. Needs h5py and numpy only.

Layout: ``/<prompt>/tokens`` (n,) int32, the reference's own greedy continuation with the stop id that ended it last;
``/<prompt>/logits`` (n, V) FP32, whose row i chose ``tokens[i]``. Attributes of a prompt's group: ``kind`` of the
prompt, ``reason`` why the text ended, ``prompt``, the hash of the prompt's token ids. Attributes of the file, its hash
beside it and how it is written are those of every dump, see :mod:`dsv4.dump`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsv4.dump import DumpWriter
from dsv4.dump_reader import DumpReader

FILE = "text/trained.h5"  # below results/<run>
ROWS = 64  # logits that are packed, and held in FP64, at a time


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text of the reference, without its logits.

    Attributes
    ----------
    tokens : ids, the stop id that ended them last.
    kind, reason : of its prompt; why it ended.
    prompt : hash of the prompt's token ids.
    """

    tokens: tuple[int, ...]
    kind: str
    reason: str
    prompt: str


class TextWriter(DumpWriter):
    """Write the texts; use as a context manager, as :class:`~dsv4.dump.DumpWriter`."""

    required: ClassVar[Sequence[str]] = ("kind", "variant", "plan", "checkpoint")
    kinds: ClassVar[Sequence[str]] = ("text",)

    def text(self, name: str, text: Text, vocabulary: int) -> None:
        """Store the text of one prompt, and make room for (n, ``vocabulary``) logits."""
        group, count = self._file.create_group(name), len(text.tokens)
        for key in ("kind", "reason", "prompt"):
            group.attrs[key] = getattr(text, key)
        group.create_dataset("tokens", data=np.asarray(text.tokens, np.int32))
        packing: dict[str, Any] = {"chunks": (min(count, ROWS), vocabulary), "shuffle": True} if count else {}
        packing |= {"compression": "gzip", "compression_opts": 1} if count else {}
        group.create_dataset("logits", (count, vocabulary), np.float32, fillvalue=np.nan, **packing)

    def logits(self, name: str, step: int, rows: np.ndarray) -> None:
        """Store logits (r, V) FP32 of a text's tokens from ``step`` on."""
        self._file[f"{name}/logits"][step : step + len(rows)] = rows


class TextReader(DumpReader):
    """Read the texts after the checks of :class:`~dsv4.dump_reader.DumpReader`."""

    @property
    def texts(self) -> Mapping[str, Text]:
        """Every text by its prompt's id, in the order of their writing."""
        found = {}
        for name in self.attrs["prompts"]:
            group = self._file[name]
            attrs = {key: str(group.attrs[key]) for key in ("kind", "reason", "prompt")}
            found[name] = Text(tokens=tuple(group["tokens"][()].tolist()), **attrs)
        return found

    def logits(self, name: str, rows: slice) -> np.ndarray:
        """Logits of some tokens of a text: (r, V) FP32."""
        return self._file[f"{name}/logits"][rows]
