"""The training text: the running Python's own standard library, split by a hash of each file's path.

The split depends on nothing but the path below ``lib/python3.x``, so anybody with the same Python
can recompute it: ``python data/nano/corpus.py`` prints the counts and the held-out list.
"""

import hashlib
import json
import pydoc
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOS, EOS = 256, 257
HELD_OUT_BELOW = 20  # of 256 values of the hash's first byte
# Without the salt one file, pydoc_data/topics.py, would be more than half of the held-out bytes.
SALT = "nano/"
# Tables and test data, not prose or code; and what pip put there.
SKIP_DIRS = {"encodings", "test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
# Importing a pure-Python module can have side effects (`antigravity` opens a browser): C modules only.
NO_DOCS = {"_imp", "marshal"}
SAMPLE_BYTES = 150_000  # of held-out text kept in the repository
SAMPLE_NOTICE = """\
Files of the Python 3.12 standard library that nano was not trained on, each after a line with its path.
Copyright (c) 2001 Python Software Foundation; All Rights Reserved. Licensed under the PSF License Agreement
(https://docs.python.org/3.12/license.html); unchanged.
"""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file: ``path`` is relative to the standard library's folder, ``text`` its bytes."""

    path: str
    text: bytes

    @property
    def held_out(self) -> bool:
        """Whether the path's hash puts this file in the held-out part."""
        return hashlib.sha256((SALT + self.path).encode()).digest()[0] < HELD_OUT_BELOW


def sources() -> list[Document]:
    """Return the standard library's sources, sorted by path; empty files are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    documents = [
        Document(path=file.relative_to(root).as_posix(), text=file.read_bytes())
        for file in files
        if not SKIP_DIRS & set(file.relative_to(root).parts)
    ]
    return [document for document in documents if document.text]


def builtin_docs() -> list[Document]:
    """Return what ``help()`` prints for each module compiled into the interpreter, as ``pydoc/<name>.txt``."""
    documents = []
    for name in sorted(set(sys.builtin_module_names) - NO_DOCS):
        text = pydoc.plaintext.document(__import__(name))
        documents.append(Document(path=f"pydoc/{name}.txt", text=text.encode()))
    return documents


def split() -> tuple[list[Document], list[Document]]:
    """Return the training and the held-out documents."""
    documents = sources() + builtin_docs()
    return [d for d in documents if not d.held_out], [d for d in documents if d.held_out]


def summary(train: list[Document], held_out: list[Document]) -> dict:
    """Return the counts that the training record keeps."""
    sizes = {"train": sum(len(d.text) for d in train), "held_out": sum(len(d.text) for d in held_out)}
    listing = "\n".join(f"{d.path} {hashlib.sha256(d.text).hexdigest()}" for d in train + held_out)
    return {
        "python": sys.version.split()[0],
        "rule": f"sha256({SALT!r} + path)[0] < {HELD_OUT_BELOW} is held out; without the folders {sorted(SKIP_DIRS)}",
        "train_files": len(train),
        "train_bytes": sizes["train"],
        "held_out_files": len(held_out),
        "held_out_bytes": sizes["held_out"],
        "held_out_share": sizes["held_out"] / sum(sizes.values()),
        "sha256_of_listing": hashlib.sha256(listing.encode()).hexdigest(),
        "held_out_paths": [d.path for d in held_out],
    }


def epoch(documents: list[Document], length: int, rng: np.random.Generator) -> np.ndarray:
    """Cut one shuffled pass over the documents into rows that each begin with BOS.

    Rows start at a new random phase every pass, so that windows of the compressor fall differently.

    Returns
    -------
    rows : (rows, length) int64
    """
    order = rng.permutation(len(documents))
    pieces = [np.array([BOS, *documents[i].text, EOS], dtype=np.int64) for i in order]
    stream = np.concatenate(pieces)[rng.integers(length) :]
    rows = stream[: len(stream) // (length - 1) * (length - 1)].reshape(-1, length - 1)
    return np.pad(rows, ((0, 0), (1, 0)), constant_values=BOS)


def eval_rows(documents: list[Document], length: int) -> np.ndarray:
    """Cut every document, from its start, into rows of BOS + up to length - 1 bytes; -1 pads the last.

    Returns
    -------
    rows : (rows, length) int64
        Every byte of every document is in exactly one row.
    """
    rows = []
    for document in documents:
        ids = np.frombuffer(document.text, dtype=np.uint8).astype(np.int64)
        for start in range(0, len(ids), length - 1):
            piece = ids[start : start + length - 1]
            row = np.full(length, -1, dtype=np.int64)
            row[0], row[1 : 1 + len(piece)] = BOS, piece
            rows.append(row)
    return np.stack(rows)


def write_sample(documents: list[Document], path: Path) -> list[str]:
    """Write held-out sources, those nearest 12 KB first, up to the size limit; return their paths."""
    kept, text = [], SAMPLE_NOTICE
    for document in sorted(documents, key=lambda d: abs(len(d.text) - 12_000)):
        piece = f"=== {document.path} ===\n{document.text.decode()}"
        if document.path.endswith(".py") and len((text + piece).encode()) <= SAMPLE_BYTES:
            kept.append(document.path)
            text += piece
    path.write_text(text, encoding="utf-8")
    return kept


def read_sample(path: Path) -> list[Document]:
    """Read the files that write_sample wrote."""
    parts = re.split(r"^=== (\S+) ===\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        Document(path=name, text=text.encode()) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(summary(*split()), indent=1))
