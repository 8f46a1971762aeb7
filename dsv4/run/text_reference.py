"""The reference's own texts: greedy continuations of the prompts with text, and the logits that chose each token."""

from collections.abc import Sequence

import torch

from dsv4.console import main_guard, progress
from dsv4.generate.batch import generate
from dsv4.generate.stops import kind_of
from dsv4.model import numerics
from dsv4.model.transformer import greedy
from dsv4.prompts import PromptTokenizer, token_sha256
from dsv4.run.forced import forced_rows
from dsv4.run.own_text import requests
from dsv4.run.setup import Setup, parse, prepare
from dsv4.text_dump import FILE, Text, TextWriter


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.text_reference --config C --results R``."""
    options = parse(__doc__ or "", arguments)
    write_text_reference(prepare(options.config, options.results))


def write_text_reference(setup: Setup) -> None:
    """Continue every prompt with text under ``trained``, all as one batch, and write ``text/trained.h5``.

    The logits are those of a second reading, of prompt and text through prefill, as a rung is forced: both see the
    same contexts the same way. On refs these are the logits of the decode bit for bit.

    Raises
    ------
    CheckpointError
        See :func:`dsv4.generate.stops.stops_of`.
    RuntimeError
        The second reading would have chosen another token: prefill and decode of the reference are not one model.
    """
    model = setup.model(numerics.trained(setup.checkpoint.config))
    steps = progress(["greedy continuations", "logits of their tokens"], "the reference's texts")
    next(steps)
    made = generate(model, PromptTokenizer(setup.config.checkpoint), requests(setup), drafts=())
    texts = {
        name: Text(
            tokens=one.tokens,
            kind=kind_of(setup.prompts[name]),
            reason=one.reason,
            prompt=token_sha256(tokens),
        )
        for (name, tokens), one in zip(setup.texts.items(), made, strict=True)
    }
    next(steps)
    attrs = setup.origin("text", "trained", None) | {"prompts": list(texts)}
    with TextWriter(setup.results / FILE, attrs) as writer:
        for name, text in texts.items():
            writer.text(name, text, setup.checkpoint.config.vocab_size)
        tokens = {name: text.tokens for name, text in texts.items()}
        for name, step, logits, _ in forced_rows(model, setup.texts, tokens):
            chosen = torch.tensor(tokens[name][step : step + len(logits)])
            if bool((other := greedy(logits) != chosen).any()):
                raise RuntimeError(
                    f"{name}: read through prefill, token {step + int(other.nonzero()[0])} of the reference's own text"
                    " is not its choice: its prefill and its decode differ, and no rung can be compared with both"
                )
            writer.logits(name, step, logits.numpy())
    next(steps, None)


if __name__ == "__main__":
    main_guard(main)
