"""The two references of every prompt: ``trained`` (reference/) and ``plain`` (plain/)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dsv4.console import main_guard, progress
from dsv4.dump import DumpWriter
from dsv4.model import numerics
from dsv4.model.transformer import Layer, Probe
from dsv4.run.forward import run_free
from dsv4.run.isolated import HISTORY_TAPS
from dsv4.run.modes import run_both_modes
from dsv4.run.rows import choose_rows
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import Trace, tap_names, write_trace
from dsv4.taps import HISTORY, MODEL


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.reference --config C --results R``."""
    options = parse(__doc__ or "", arguments)
    setup = prepare(options.config, options.results)
    for step in progress(["trained", "plain"], "reference"):
        (write_trained if step == "trained" else write_plain)(setup)


def write_trained(setup: Setup) -> None:
    """Run the ``trained`` reference, continue greedily, dump its taps and its history."""
    config, steps = setup.checkpoint.config, setup.config.decode_steps
    prompts = {name: torch.tensor(tokens, dtype=torch.int64) for name, tokens in setup.tokens.items()}
    history_taps: dict[Layer, tuple[str, ...]] = {
        layer: HISTORY_TAPS[config.kind(layer)] for layer in range(config.num_hidden_layers)
    }
    judged, history = {}, {}
    for name, tokens in prompts.items():
        rows = choose_rows(len(tokens), setup.prompts[name].rows, setup.config.prefill_rows, steps)
        judged[name] = Trace(config, rows, tap_names(config, "isolated"))
        history[name] = Trace(config, rows, history_taps | {MODEL: ()}, every_row=True)
    seen = [partial(_both, judged[name], history[name]) for name in prompts]
    model = setup.model(numerics.trained(config))
    continued, _ = run_free(model, list(prompts.values()), steps, seen)
    for name, tokens in zip(prompts, continued, strict=True):
        attrs = setup.attrs(name, "reference", "trained", None) | {"tokens": tokens.tolist()}
        with DumpWriter(setup.results / "reference" / f"{name}.h5", attrs) as writer:
            write_trace(writer, "compounded", judged[name])
            write_trace(writer, HISTORY, history[name])


def _both(one: Trace, other: Trace, positions: Tensor) -> Probe:
    one.at(positions)
    other.at(positions)

    def probe(layer: Layer, name: str, value: object) -> object:
        return other(layer, name, one(layer, name, value))

    return probe


def write_plain(setup: Setup) -> None:
    """Run the ``plain`` reference on the same tokens, in both modes."""
    isolated, compounded, _ = run_both_modes(setup, setup.model(numerics.plain(setup.checkpoint.config)))
    for name in setup.tokens:
        source = setup.results / "reference" / f"{name}.h5"
        with DumpWriter(
            setup.results / "plain" / f"{name}.h5", setup.attrs(name, "plain", "plain", None), parent=source
        ) as writer:
            write_trace(writer, "isolated", isolated[name])
            write_trace(writer, "compounded", compounded[name])


if __name__ == "__main__":
    main_guard(main)
