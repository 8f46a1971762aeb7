"""Both modes of one model on every prompt: isolated on the reference's inputs, and compounded."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsv4.dump import DumpReader
from dsv4.model.cache import SequenceCache
from dsv4.model.stages import embed
from dsv4.model.transformer import Transformer
from dsv4.run.forward import Seen, run_free
from dsv4.run.isolated import Reference, run_isolated
from dsv4.run.rows import Rows
from dsv4.run.setup import Setup
from dsv4.run.trace import Trace, tap_names
from kernels.rounding import exact

Traces = dict[str, Trace]
Input = tuple[Tensor, Rows]
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
    config, isolated, inputs = setup.checkpoint.config, {}, {}
    for name in setup.tokens:
        with open_reference(setup, name) as dump:
            reference = Reference(dump, config)
            isolated[name] = Trace(config, reference.rows, tap_names(config, "isolated"))
            run_isolated(model, reference, first_streams(setup, reference), wrap(isolated[name].at))
            inputs[name] = reference.tokens, reference.rows
    return isolated, *run_compounded(setup, model, inputs, wrap)


def open_reference(setup: Setup, prompt: str) -> DumpReader:
    """Open the ``trained`` reference of a prompt."""
    return DumpReader(setup.results / "reference" / f"{prompt}.h5", setup.identity(prompt))


def run_compounded(
    setup: Setup, model: Transformer, inputs: Mapping[str, Input], wrap: Wrap = unwrapped
) -> tuple[Traces, dict[str, SequenceCache]]:
    """Run a model freely on every prompt, fed with the reference's tokens.

    Parameters
    ----------
    setup : Setup
    model : Transformer
    inputs : prompt id -> tokens (T,) int64 of the prompt and its decode steps, and the judged rows.
    wrap : see :func:`run_both_modes`.

    Returns
    -------
    compounded : prompt id -> Trace
    caches : prompt id -> the cache after the run
    """
    config = setup.checkpoint.config
    traces = {
        name: Trace(config, rows, tap_names(config, "compounded")) for name, (_, rows) in inputs.items()
    }
    seen = [wrap(trace.at) for trace in traces.values()]
    prompts = [tokens[: rows.prompt] for tokens, rows in inputs.values()]
    forced = [tokens[rows.prompt :] for tokens, rows in inputs.values()]
    _, caches = run_free(model, prompts, setup.config.decode_steps, seen, forced)
    return traces, dict(zip(inputs, caches, strict=True))
