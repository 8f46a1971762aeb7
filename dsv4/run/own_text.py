"""Free texts of the audit's prompts: what is asked of the model, what is said of an answer, and where two part."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsv4.generate.accounting import account
from dsv4.generate.batch import Request, generate
from dsv4.generate.stops import Kind, Stops, kind_of, stops_of
from dsv4.generate.text import text_of
from dsv4.model.transformer import Transformer
from dsv4.prompts import PromptTokenizer
from dsv4.run.setup import Setup
from dsv4.text_dump import Text


@dataclass(frozen=True)
class Own:
    """A free text: its ids, the stop id that ended it last, and why it ended."""

    tokens: tuple[int, ...]
    reason: str


def requests(setup: Setup) -> list[Request]:
    """One greedy request a prompt with text, in their order; errors as of :func:`dsv4.generate.stops.stops_of`."""
    tokenizer, checkpoint = PromptTokenizer(setup.config.checkpoint), setup.config.checkpoint
    stops = {name: stops_of(tokenizer, checkpoint, kind_of(setup.prompts[name])) for name in setup.texts}
    budget = setup.config.text_tokens
    return [
        Request(tokens=tokens, budget=budget, stop_ids=stops[name].every)
        for name, tokens in setup.texts.items()
    ]


def written(setup: Setup, model: Transformer, tokenizer: PromptTokenizer) -> dict[str, Own]:
    """Free texts, all prompts one batch; by the prompts' ids."""
    made = generate(model, tokenizer, requests(setup))
    return {name: Own(one.tokens, one.reason) for name, one in zip(setup.texts, made, strict=True)}


def written_on(
    setup: Setup,
    model: Transformer,
    tokenizer: PromptTokenizer,
    texts: Mapping[str, Text],
    parted: Mapping[str, int],
) -> dict[str, Own]:
    """Free texts of a model that was forced along the reference's, as :func:`written` gives them.

    Up to the first token that it chooses otherwise a greedy text is the reference's, and the forced rows are its
    steps, if a row is the same bits in any pass (:attr:`Transformer.row_alone`). So only what follows is generated,
    with the reference's texts as drafts: many come back to them.

    Parameters
    ----------
    texts : the reference's.
    parted : id -> the first step at which the model chooses another token; without one its text is the reference's.
    """
    asked = dict(zip(setup.texts, requests(setup), strict=True))
    begun = [
        replace(
            asked[name],
            tokens=[*asked[name].tokens, *texts[name].tokens[:step]],
            budget=asked[name].budget - step,
        )
        for name, step in parted.items()
    ]
    made = generate(model, tokenizer, begun, drafts=[text.tokens for text in texts.values()])
    own = {name: Own(text.tokens, text.reason) for name, text in texts.items()}
    for (name, step), one in zip(parted.items(), made, strict=True):
        own[name] = Own(texts[name].tokens[:step] + one.tokens, one.reason)
    return own


def described(
    tokenizer: PromptTokenizer, tokens: Sequence[int], reason: str, kind: Kind, stops: Stops
) -> dict[str, Any]:
    """What the audit's JSON says of a text: its tokens, and their :class:`~dsv4.generate.accounting.Account`."""
    found = account(tokens, reason, kind, stops)
    loop = found.loop
    return {
        "tokens": list(tokens),
        "text": text_of(tokenizer, tokens[: found.length]),
        "reason": reason,
        "stop": found.stop,
        "stop_name": None if found.stop is None else tokenizer.name_of(found.stop),
        "own_stop": found.own_stop,
        "ran_past": found.ran_past,
        "length": found.length,
        "loop": loop and {"onset": loop.onset, "period": loop.period, "copies": loop.copies},
        "distinct": {str(n): share for n, share in found.distinct.items()},
    }


def divergence(own: Sequence[int], reference: Sequence[int]) -> int | None:
    """First step at which two texts differ; None where one begins with all of the other."""
    pairs = zip(own, reference, strict=False)
    return next((step for step, (one, other) in enumerate(pairs) if one != other), None)


def parting(
    own: Sequence[int],
    reference: Sequence[int],
    step: int,
    logits: np.ndarray,
    reference_logits: np.ndarray,
    rounding: float,
) -> dict[str, Any]:
    """What happened where two texts part.

    Both models had read the same tokens, so the step is one of the forced positions, and the logits are those of
    the forced pass. It is a *near tie* if the reference itself preferred its token by no more than twice
    ``rounding``: the root mean square difference of the rung's logits from the reference's, over all forced
    positions (each row's mean difference taken off). Two logits that each move by that much, in opposite directions,
    close such a gap, so that the other token is no sign of more than rounding; a wider gap needs an error that is
    larger than this rung's usual one.

    Parameters
    ----------
    own, reference : token ids; they are equal before ``step``.
    logits, reference_logits : (V,) FP32
        Of that step.
    rounding : float
        In logits.

    Returns
    -------
    dict
        ``step``, ``token`` and ``reference_token``; ``margin``: the rung's logit of its token less that of the
        reference's (under 0 only where its prefill is not its decode); ``reference_margin``: the reference's logit
        of its own token less that of the rung's; ``near_tie``. A margin that is not finite is None.
    """
    token, expected = own[step], reference[step]
    margin = float(logits[token]) - float(logits[expected])
    preferred = float(reference_logits[expected]) - float(reference_logits[token])
    return {
        "step": step,
        "token": token,
        "reference_token": expected,
        "margin": margin if math.isfinite(margin) else None,
        "reference_margin": preferred if math.isfinite(preferred) else None,
        "near_tie": preferred <= 2 * rounding,
    }
