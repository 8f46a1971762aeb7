"""Which ops give the KL back when they are swapped to the reference's, one at a time: :func:`rank`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.attribute.ops import Place
from dsv4.attribute.own_run import OwnRun, own_run
from dsv4.attribute.words import standing_out, words
from dsv4.judge.text_change import LEAST_KL, mean_of_blocks
from dsv4.logits import kl_nats, log_softmax
from dsv4.model.transformer import Transformer
from dsv4.run.modes import Wrap, unwrapped

BLOCK = 8  # positions a block of the error; a byte's KL is as good as uncorrelated with the next one's (see the tests)
LEADING, ENOUGH = 3, 0.9  # ops taken apart by layer: at most so many, until so much of the KL is returned
Shown = Callable[[Sequence[str], str], Iterator[str]]


@dataclass(frozen=True, kw_only=True)
class ForcedText:
    """A text to run along.

    Attributes
    ----------
    tokens : (T,) int64, the prompt and the continuation without its last token.
    truth : (n, V) FP32, the reference's logits at the last n of these.
    """

    tokens: Tensor
    truth: np.ndarray


def unshown(items: Sequence[str], what: str) -> Iterator[str]:
    """Show no progress."""
    return iter(items)


def rank(
    variant: Transformer,
    reference: Transformer,
    texts: Sequence[ForcedText],
    wrap: Wrap = unwrapped,
    shown: Shown = unshown,
) -> dict[str, Any]:
    """Swap the variant's ops to the reference's one at a time, in all layers, then the leading ones layer by layer.

    ``returned`` is the share of the KL that is gone without the op's rounding: (kl - kl_without) / kl. Ops interact.
    Errors that cancel, or that a later rounding hides, return more together than apart, or less; an op whose swap moves
    other values over their rounding boundaries may return a negative share. So the shares need not add up to 1:
    ``explained`` states their sum beside what the leading ops return when they are swapped together.

    A share is effect and chance, for each swap draws the noise of all that follows anew. ``se`` is its standard error
    over positions; :func:`~dsv4.attribute.words.standing_out` says which ops are beyond chance. Only these are taken
    apart by layer: three at most, until they return 90%.

    Parameters
    ----------
    variant, reference, wrap : see :class:`~dsv4.attribute.swap.Swapped`.
    texts : one or more.
    shown : called with the names of runs and what they are, yields these names: progress.

    Returns
    -------
    dict
        ``kl_nats`` mean over ``positions``; ``ops``: ``op``, ``kl_without``, ``returned``, ``se``, most returned first;
        ``same_bits`` says of one that needed no run: in every layer the reference's stage gives the variant's bits on
        the variant's inputs; ``layers``: the same with ``layer``, of the leading ops; ``explained``; ``words``.
        No ops where the KL is not finite, or under 1e-9.

    Raises
    ------
    ValueError
        A text without tokens, too long for the model, or with a token id out of range.
    """
    run = own_run(variant, reference, [text.tokens for text in texts], wrap)
    kl = Measured(run, texts)
    found: dict[str, Any] = {"positions": len(kl.own), "kl_nats": kl.total, "ops": [], "layers": []}
    if not (np.isfinite(kl.own).all() and kl.total > LEAST_KL):
        finite = bool(np.isfinite(kl.own).all())
        why = f"nothing to attribute: the KL is under {LEAST_KL:g} nats" if finite else "the KL is not finite"
        return found | {"kl_nats": kl.total if finite else None, "explained": None, "words": why}
    moving = [op for op, at in run.places.items() if not run.same.issuperset(at)]
    ops = [{"op": op, **kl.without(run.places[op])} for op in shown(moving, "ops swapped")]
    ops += [{"op": op, **kl.unchanged()} for op in run.places if op not in moving]
    found["ops"] = ops = _sorted(ops)
    leading = list(_leading(ops))
    apart = {f"{op}, layer {place[0]}": place for op in leading for place in run.places[op]}
    layers = []
    for name in shown([name for name, place in apart.items() if place not in run.same], "layer by layer"):
        layer, op = apart[name]
        layers.append({"op": op, "layer": layer, **kl.without([apart[name]])})
    layers += [
        {"op": op, "layer": layer, **kl.unchanged()}
        for layer, op in apart.values()
        if (layer, op) in run.same
    ]
    found["layers"] = layers = _sorted(layers)
    together = (
        kl.without([place for op in leading for place in run.places[op]])["returned"] if leading else 0.0
    )
    sum_of_ops = float(sum(entry["returned"] or 0.0 for entry in ops))
    found["explained"] = {"sum_of_ops": sum_of_ops, "leading": leading, "leading_together": together}
    return found | {"words": words(ops, layers)}


class Measured:
    """KL of a run and of swapped ones, position by position.

    Attributes
    ----------
    own : (n,) FP64 nats, of the variant. total : its mean.
    """

    def __init__(self, run: OwnRun, texts: Sequence[ForcedText]) -> None:
        self._run, self._truth = run, [log_softmax(text.truth) for text in texts]
        self._ends = np.cumsum([len(text.tokens) for text in texts]).tolist()
        sizes = [len(text.truth) for text in texts]
        starts = np.cumsum([0, *(-(-size // BLOCK) for size in sizes)])
        blocks = [start + np.arange(size) // BLOCK for start, size in zip(starts, sizes, strict=False)]
        self._blocks = np.concatenate(blocks)
        self.own = self._of(run.logits)
        self.total = float(self.own.mean())

    def _of(self, logits: Tensor) -> np.ndarray:
        rows = [logits[end - len(truth) : end] for end, truth in zip(self._ends, self._truth, strict=True)]
        with np.errstate(invalid="ignore"):
            pairs = zip(self._truth, rows, strict=True)
            return np.concatenate([kl_nats(truth, log_softmax(part.numpy())) for truth, part in pairs])

    def without(self, swap: Iterable[Place]) -> dict[str, Any]:
        """What is left with some ops swapped, None where that is not finite."""
        kl = self._of(self._run.swapped(list(swap)))
        if not np.isfinite(kl).all():
            return {"kl_without": None, "returned": None, "se": None, "same_bits": False}
        returned = (self.total - float(kl.mean())) / self.total
        # of a ratio of means, linearised: Cochran, "Sampling Techniques", 3rd ed., 1977, section 2.11
        _, se, _ = mean_of_blocks(self.own - kl - returned * self.own, self._blocks)
        return {
            "kl_without": float(kl.mean()),
            "returned": returned,
            "se": None if se is None else se / self.total,
            "same_bits": False,
        }

    def unchanged(self) -> dict[str, Any]:
        """What is left with an op swapped that changes no bit: everything."""
        return {"kl_without": self.total, "returned": 0.0, "se": 0.0, "same_bits": True}


def _leading(ops: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Ops to take apart by layer: those that stand out, until they return enough."""
    total = 0.0
    for entry in standing_out(ops)[:LEADING]:
        if total < ENOUGH:
            yield entry["op"]
        total += entry["returned"]


def _sorted(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Most returned first; what is not finite last."""
    return sorted(entries, key=lambda entry: np.inf if entry["returned"] is None else -entry["returned"])


def as_forced(prompt: Sequence[int], continuation: Sequence[int], truth: np.ndarray) -> ForcedText:
    """A prompt with the first n tokens of its continuation, n the rows of ``truth`` (n, V) FP32."""
    tokens = [*prompt, *continuation[: len(truth)]][:-1]
    return ForcedText(tokens=torch.tensor(tokens, dtype=torch.int64), truth=truth)
