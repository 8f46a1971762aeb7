"""Rungs forced along the reference's own texts: logits of the same contexts, compared token by token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dsv4.generate.token_class import token_class
from dsv4.logits import kl_nats, log_softmax
from dsv4.model.prefill import CHUNK, read
from dsv4.model.transformer import Layer, Probe, Transformer, unchanged
from dsv4.prompts import PromptTokenizer
from dsv4.taps import RESIDUAL
from dsv4.text_dump import ROWS, TextReader

Rows = Iterator[tuple[str, int, Tensor, slice]]


def forced_rows(
    model: Transformer,
    prompts: Mapping[str, Sequence[int]],
    texts: Mapping[str, Sequence[int]],
    chunk: int = CHUNK,
    probe: Probe = unchanged,
) -> Rows:
    """Read prompts with their texts through prefill, all in one batch of several passes.

    Parameters
    ----------
    model : Transformer
    prompts : id -> its token ids.
    texts : id -> the tokens that stand behind it; of a text without any nothing is read.
    chunk, probe : see :func:`dsv4.model.prefill.read`.

    Yields
    ------
    id : of a prompt
    step : int
        Of the first row's token in the text.
    logits : (r, V) FP32 on the CPU
        Row i is what chooses the text's token ``step + i``. A text's rows come in order, and texts one after the other.
    at : slice
        Where these rows are in the pass that was the last one.
    """
    names = [name for name, tokens in texts.items() if tokens]
    if not names:
        return
    sequences = [torch.tensor([*prompts[name], *texts[name][:-1]], dtype=torch.int64) for name in names]
    for cut, logits in read(model, [model.new_cache() for _ in names], sequences, chunk, probe):
        end = 0
        for sequence, rows in cut:
            end += rows.stop - rows.start
            last = len(prompts[names[sequence]]) - 1  # the prompt's last row chooses the first token
            if rows.stop > last:
                first = max(rows.start, last)
                at = slice(end - (rows.stop - first), end)
                yield names[sequence], first - last, logits[at].cpu(), at


class Peaks:
    """Probe of the residual's magnitude: max abs X of a pass's rows, by layer, both sites of a block."""

    def __init__(self) -> None:
        self._largest: dict[tuple[Layer, str], Tensor] = {}

    def __call__(self, layer: Layer, name: str, value: Any) -> Any:
        """See :data:`dsv4.model.transformer.Probe`; streams are (T, N, D)."""
        if name in RESIDUAL:
            self._largest[layer, name] = value.abs().amax((1, 2)).float().cpu()
        return value

    def of(self, rows: slice) -> np.ndarray:
        """Rows of the last pass, a column a layer: (r, L) FP32."""
        sites = [
            torch.stack([peak[rows] for (_, name), peak in self._largest.items() if name == site], 1)
            for site in RESIDUAL
        ]
        return torch.stack(sites).amax(0).numpy()


@dataclass(kw_only=True)
class Forced:
    """What forcing gave.

    Attributes
    ----------
    columns : of the table, name -> one value a forced position.
    squares, count : sum of squares of logit differences, each row's mean difference taken off, for a common shift
        chooses no token; and how many there are.
    kept : id -> step, and the rung's logits (V,) FP32 and the reference's of it; of each text one step at most.
    by_layer : max abs X of each layer over all forced positions; empty of none.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SCHEMA.names})
    squares: float = 0.0
    count: int = 0
    kept: dict[str, tuple[int, np.ndarray, np.ndarray]] = field(default_factory=dict)
    by_layer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def rms(self) -> float:
        """Root mean square difference of logits over all forced positions; NaN where one is not finite, or of none."""
        return float(np.sqrt(self.squares / self.count)) if self.count else float("nan")

    @property
    def table(self) -> pa.Table:
        """One row a forced position."""
        return pa.table(self.columns, SCHEMA)


SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("kind", pa.string()),
        ("step", pa.int32()),
        ("token", pa.int32()),
        ("token_class", pa.string()),
        ("kl_nats", pa.float64()),
        ("top1", pa.bool_()),
        ("top", pa.int32()),
        ("nll", pa.float64()),
        ("nll_trained", pa.float64()),
        ("margin", pa.float64()),
        ("margin_trained", pa.float64()),
        ("residual_absmax", pa.float32()),
    ]
)


def force(
    model: Transformer,
    tokenizer: PromptTokenizer,
    reference: TextReader,
    prompts: Mapping[str, Sequence[int]],
    keep: Mapping[str, int] | None = None,
) -> Forced:
    """Force a model along the reference's texts and compare its logits with theirs, in FP64.

    Parameters
    ----------
    model : Transformer
        On refs or on kernels.
    tokenizer : of its checkpoint.
    reference : the texts.
    prompts : id -> token ids.
    keep : id -> the step whose logits are kept; None: of each text the first that chooses another token, or none.

    Returns
    -------
    Forced
        A row that is not finite has a KL, a likelihood and a margin of NaN; its ``top`` is the first such token.
    """
    found, texts, peaks = Forced(), reference.texts, Peaks()
    tokens = {name: text.tokens for name, text in texts.items()}
    for name, first, logits, at in forced_rows(model, prompts, tokens, probe=peaks):
        largest = peaks.of(at)
        found.columns["residual_absmax"].extend(largest.max(1))
        found.by_layer = np.maximum(largest.max(0), found.by_layer) if len(found.by_layer) else largest.max(0)
        for start in range(0, len(logits), ROWS):
            test = logits[start : start + ROWS].numpy()
            steps = np.arange(first + start, first + start + len(test))
            truth = reference.logits(name, slice(steps[0], steps[-1] + 1))
            chosen = np.asarray(tokens[name])[steps]
            classes = [token_class(tokenizer, token) for token in chosen.tolist()]
            about = {"prompt": [name] * len(test), "kind": [texts[name].kind] * len(test)}
            about |= {"step": steps, "token": chosen, "token_class": classes}
            measures = compare(test, truth, chosen)
            for column, values in (about | measures).items():
                found.columns[column].extend(values)
            with np.errstate(invalid="ignore"):
                apart = test.astype(np.float64) - truth
                apart -= apart.mean(-1, keepdims=True)
            found.squares += float(np.square(apart).sum())
            found.count += apart.size
            asked = steps == keep.get(name, -1) if keep is not None else ~measures["top1"]
            if name not in found.kept and asked.any():
                row = int(asked.argmax())
                found.kept[name] = int(steps[row]), test[row].copy(), truth[row]
    return found


def compare(test: np.ndarray, truth: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Measures of a rung's rows beside the reference's, each (r,).

    Parameters
    ----------
    test, truth : (r, V) FP32
        Logits of the rung and of the reference.
    tokens : (r,) int
        What the reference chose.
    """
    with np.errstate(invalid="ignore"):
        p, q = log_softmax(truth), log_softmax(test)
        kl = kl_nats(p, q)
    at = np.arange(len(test)), tokens
    return {
        "kl_nats": kl,
        "top1": (test.argmax(-1) == truth.argmax(-1)) & np.isfinite(kl),
        "top": test.argmax(-1),
        "nll": -q[at],
        "nll_trained": -p[at],
        "margin": gap(test),
        "margin_trained": gap(truth),
    }


def gap(logits: np.ndarray) -> np.ndarray:
    """Largest logit less the second, FP64: ``(r, V) -> (r,)``."""
    two = np.partition(logits.astype(np.float64), -2, axis=-1)[:, -2:]
    return two[:, 1] - two[:, 0]
