"""Both modes of one model on every prompt: isolated on the reference's inputs, and compounded."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from dsv4.dump import DumpReader
from dsv4.model.cache import SequenceCache
from dsv4.model.stages import embed
from dsv4.model.transformer import Transformer
from dsv4.run.forward import Seen, run_free
from dsv4.run.isolated import Reference, run_isolated
from dsv4.run.setup import Setup
from dsv4.run.trace import Trace, tap_names
from kernels.rounding import exact

Traces = dict[str, Trace]
Wrap = Callable[[Seen], Seen]


def unwrapped(seen: Seen) -> Seen:
    """Leave the probes as they are."""
    return seen


def first_streams(setup: Setup, reference: Reference) -> Tensor:
    """Streams that enter layer 0 at the judged rows, as the reference has them."""
    tokens = reference.tokens[torch.from_numpy(reference.rows.all)]
    return embed(setup.checkpoint.weights, setup.checkpoint.config, tokens, exact)


def run_both_modes(
    setup: Setup, model: Transformer, wrap: Wrap = unwrapped
) -> tuple[Traces, Traces, dict[str, SequenceCache]]:
    """Run a model on every prompt of the audit.

    Parameters
    ----------
    setup : Setup
        Its results hold ``reference/``.
    model : Transformer
    wrap : callable
        Put around the probes of both modes (fault injection).

    Returns
    -------
    isolated, compounded : prompt id -> Trace
    caches : prompt id -> the cache after the compounded run
    """
    config = setup.checkpoint.config
    isolated, compounded, tokens, prompts = {}, {}, {}, {}
    with ExitStack() as files:
        for name in setup.tokens:
            path = setup.results / "reference" / f"{name}.h5"
            reference = Reference(files.enter_context(DumpReader(path, setup.identity(name))), config)
            isolated[name] = Trace(config, reference.rows, tap_names(config, "isolated"))
            run_isolated(model, reference, first_streams(setup, reference), wrap(isolated[name].at))
            compounded[name] = Trace(config, reference.rows, tap_names(config, "compounded"))
            prompts[name] = reference.tokens[: reference.rows.prompt]
            tokens[name] = reference.tokens[reference.rows.prompt :]
    seen = [wrap(trace.at) for trace in compounded.values()]
    steps = setup.config.decode_steps
    _, caches = run_free(model, list(prompts.values()), steps, seen, list(tokens.values()))
    return isolated, compounded, dict(zip(prompts, caches, strict=True))
