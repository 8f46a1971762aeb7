"""The two references of every prompt: ``trained`` (reference/) and ``plain`` (plain/)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.dump import DumpReader, DumpWriter
from dsv4.model import numerics
from dsv4.model.stages import embed
from dsv4.model.transformer import Layer, Probe
from dsv4.run.console import main_guard, progress
from dsv4.run.forward import run_compounded, run_greedy
from dsv4.run.isolated import HISTORY_TAPS, Reference, run_isolated
from dsv4.run.rows import choose_rows
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import Trace, tap_names, write_trace
from dsv4.taps import HISTORY, MODEL
from kernels.rounding import exact


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.reference --config C --results R``."""
    options = parse(__doc__ or "", arguments)
    setup = prepare(options.config, options.results)
    for prompt in progress(list(setup.tokens), "reference"):
        write_trained(setup, prompt)
        write_plain(setup, prompt)


def write_trained(setup: Setup, prompt: str) -> None:
    """Run the ``trained`` reference, continue greedily, dump its taps and its history."""
    config = setup.checkpoint.config
    model = setup.model(numerics.trained(config))
    tokens = torch.tensor(setup.tokens[prompt], dtype=torch.int64)
    rows = choose_rows(
        len(tokens), setup.prompts[prompt].rows, setup.config.prefill_rows, setup.config.decode_steps
    )
    judged = Trace(config, rows, tap_names(config, "isolated"))
    history_taps: dict[Layer, tuple[str, ...]] = {
        layer: HISTORY_TAPS[config.kind(layer)] for layer in range(config.num_hidden_layers)
    }
    history = Trace(config, rows, history_taps | {MODEL: ()}, every_row=True)
    tokens = run_greedy(model, tokens, setup.config.decode_steps, lambda at: _both(judged, history, at))
    path = setup.results / "reference" / f"{prompt}.h5"
    attrs = setup.attrs(prompt, "reference", "trained", None) | {"tokens": tokens.tolist()}
    with DumpWriter(path, attrs) as writer:
        write_trace(writer, "compounded", judged)
        write_trace(writer, HISTORY, history)


def _both(one: Trace, other: Trace, positions: Tensor) -> Probe:
    one.at(positions)
    other.at(positions)

    def probe(layer: Layer, name: str, value: object) -> object:
        return other(layer, name, one(layer, name, value))

    return probe


def write_plain(setup: Setup, prompt: str) -> None:
    """Run the ``plain`` reference on the same tokens, in both modes."""
    config = setup.checkpoint.config
    model = setup.model(numerics.plain(config))
    source = setup.results / "reference" / f"{prompt}.h5"
    with DumpReader(source, setup.identity(prompt)) as dump:
        reference = Reference(dump, config)
        isolated = Trace(config, reference.rows, tap_names(config, "isolated"))
        run_isolated(model, reference, first_streams(setup, reference), isolated.at)
        compounded = Trace(config, reference.rows, tap_names(config, "compounded"))
        run_compounded(model, reference.tokens, reference.rows.prompt, compounded.at)
    path = setup.results / "plain" / f"{prompt}.h5"
    with DumpWriter(path, setup.attrs(prompt, "plain", "plain", None), parent=source) as writer:
        write_trace(writer, "isolated", isolated)
        write_trace(writer, "compounded", compounded)


def first_streams(setup: Setup, reference: Reference) -> Tensor:
    """Streams that enter layer 0 at the judged rows, as the reference has them."""
    tokens = reference.tokens[torch.from_numpy(reference.rows.all)]
    return embed(setup.checkpoint.weights, setup.checkpoint.config, tokens, exact)


if __name__ == "__main__":
    main_guard(main)
