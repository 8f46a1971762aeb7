"""Read what the text stages wrote, whole and of this run, or refuse it. Imports no torch.

``text/trained.h5``: the reference's own continuation of each prompt. ``text/<id>.json``: how a rung's texts ended.
``text/<id>.parquet``: one row a forced position, along the reference's continuation.
``text/attribution/<id>.json``: which ops give the change back.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import jsonschema
import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from jsonschema.exceptions import best_match

from dsv4.dump import DumpError, DumpReader
from dsv4.files import newest
from dsv4.ladder import Variant
from dsv4.plan import flatten

SCHEMA = 1
JSON_SCHEMA = yaml.safe_load(Path(__file__).with_name("text.schema.yaml").read_text())
VALUES = ("kl_nats", "nll", "nll_trained", "margin", "margin_trained")  # FP64, finite in a sound text
AGAIN = "delete it and run again"


class TextError(DumpError):
    """A text that must not be read; names both sides and what to do."""


@dataclass(frozen=True)
class Reference:
    """The reference's own texts.

    Attributes
    ----------
    path : the dump.
    tokens : prompt -> (n,) int32, its continuation.
    """

    path: Path
    tokens: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Text:
    """A rung's texts.

    Attributes
    ----------
    head : ``text/<id>.json``.
    table : ``text/<id>.parquet``, prompts and steps in order.
    """

    head: Mapping[str, Any]
    table: pd.DataFrame


def files(results: Path, name: str) -> tuple[Path, Path]:
    """The two files of a rung's texts: account and table."""
    return results / "text" / f"{name}.json", results / "text" / f"{name}.parquet"


def read_reference(results: Path) -> Reference:
    """The reference's texts, of the checkpoint that this run audits.

    Raises
    ------
    DumpError
        Not there, changed since it was written, of another schema or checkpoint.
    """
    path, manifest = results / "text" / "trained.h5", results / "checkpoint.json"
    audited = json.loads(manifest.read_text()).get("sha256") if manifest.exists() else None
    if audited is None:
        raise TextError(f"{manifest}: names no checkpoint, so no text can be told to be of it; run again")
    with DumpReader(path, {"checkpoint": audited}):
        pass
    with h5py.File(path, "r") as file:
        tokens = {
            name: np.asarray(group["tokens"])
            for name, group in file.items()
            if isinstance(group, h5py.Group) and "tokens" in group
        }
    return Reference(path, tokens)


def read_text(results: Path, variant: Variant, reference: Reference) -> Text:
    """A rung's texts, of its plan and along the reference's.

    Raises
    ------
    TextError
        Not there, older than the reference's, not what the stage writes, or of another rung, plan or reference.
    """
    account, table = files(results, variant.id)
    for path in (account, table):
        if not path.is_file():
            raise TextError(f"{path}: not there; no text of {variant.id} was generated")
        if not newest(path, [reference.path]):
            raise TextError(f"{path}: older than {reference.path}, along which it was forced; {AGAIN}")
    head = _account(account, variant)
    frame = _table(table)
    _along(account, {name: each["reference"]["tokens"] for name, each in head["prompts"].items()}, reference)
    by_prompt = frame.groupby("prompt", sort=False, observed=True)["token"]
    forced = {str(name): tokens.tolist() for name, tokens in by_prompt}
    _along(table, dict.fromkeys(reference.tokens, ()) | forced, reference)  # no rows of a text without tokens
    steps = by_prompt.cumcount()
    if not np.array_equal(steps, frame["step"]):
        raise TextError(f"{table}: its steps are not 0, 1, 2, ... of each prompt; {AGAIN}")
    return Text(head, frame)


def _account(path: Path, variant: Variant) -> dict[str, Any]:
    head = _json(path)
    if not isinstance(head, dict):
        raise TextError(f"{path}: {type(head).__name__}, expected an object; {AGAIN}")
    wanted = {
        "schema": SCHEMA,
        "variant": variant.id,
        "parent": variant.parent,
        "plan": flatten(variant.plan),
    }
    for name, value in wanted.items():
        if head.get(name) != value:
            found, value = _difference(head.get(name), value)
            raise TextError(
                f"{path}: {name} is {found!r}, expected {value!r}; this text belongs to another run: {AGAIN}"
            )
    error = best_match(jsonschema.Draft202012Validator(JSON_SCHEMA).iter_errors(head))
    if error:
        place = ".".join(str(step) for step in error.absolute_path) or "top level"
        raise TextError(f"{path}: {place}: {error.message[:300]}; {AGAIN}")
    return head


def _difference(found: Any, wanted: Any) -> tuple[Any, Any]:
    """Of two plans, only the fields in which they differ."""
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return found, wanted
    fields = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    return {name: found.get(name) for name in fields}, {name: wanted.get(name) for name in fields}


COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(("prompt", "kind", "token_class"), "O"),
    **dict.fromkeys(("step", "token", "top"), "i"),
    "top1": "b",
    **dict.fromkeys((*VALUES, "residual_absmax"), "f"),
}  # column -> kind of its NumPy dtype; O: text


def _table(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TextError(f"{path}: not a readable Parquet file ({error}); {AGAIN}") from error
    found = {str(name): "O" if _is_text(frame[name]) else frame[name].dtype.kind for name in frame.columns}
    for name, kind in COLUMNS.items():
        if found.get(name) != kind:
            raise TextError(f"{path}: column {name} is of kind {found.get(name)}, expected {kind}; {AGAIN}")
    return frame


def _is_text(column: pd.Series) -> bool:
    return pd.api.types.is_string_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype)


def _along(path: Path, found: Mapping[str, Sequence[int]], reference: Reference) -> None:
    """Refuse texts that were forced along another continuation than the reference's."""
    if found.keys() != reference.tokens.keys():
        raise TextError(
            f"{path}: prompts {sorted(found)}, {reference.path} has {sorted(reference.tokens)}; {AGAIN}"
        )
    for name, tokens in reference.tokens.items():
        if not np.array_equal(tokens, found[name]):
            both = zip(tokens.tolist(), found[name], strict=False)
            end = min(len(tokens), len(found[name]))
            at = next((step for step, (one, other) in enumerate(both) if one != other), end)
            raise TextError(
                f"{path}: along {len(found[name])} tokens of {name}, {reference.path} has {len(tokens)}; they differ"
                f" from step {at} on; {AGAIN}"
            )


def read_attribution(results: Path, name: str) -> dict[str, Any] | None:
    """Which ops give a rung's change back, None where that was not asked.

    Raises
    ------
    TextError
        Older than the text that it is about, of another schema or rung.
    """
    path = results / "text" / "attribution" / f"{name}.json"
    if not path.is_file():
        return None
    if not newest(path, list(files(results, name))):
        raise TextError(f"{path}: older than the text of {name}; {AGAIN}")
    found = _json(path)
    for key, value in {"schema": SCHEMA, "variant": name}.items():
        if not isinstance(found, dict) or found.get(key) != value:
            has = found.get(key) if isinstance(found, dict) else found
            raise TextError(f"{path}: {key} is {has!r}, expected {value!r}; {AGAIN}")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"{path}: not readable JSON ({error}); {AGAIN}") from error
