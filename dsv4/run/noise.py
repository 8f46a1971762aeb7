"""How far free runs of one plan drift apart that differ in rounding noise alone: the report's band.

A draw runs the plan once more as compounded mode does, with its own cache history and its own
choices, and with FP32 accumulation's noise in every value before it is stored
(:mod:`dsv4.run.noisy`). What is stored is its distance to the plan's run without noise, by layer
and tap and by decode step, in the judge's own measures. So one side of each distance carries
noise and the other none: a draw is where another correct implementation of the plan would be seen.

What to expect. In one layer the noise moves few values over a rounding boundary, and none by more
than a step of its format. Running freely, each step that moved is itself an error of the layers
above, where it moves more codes and the choices near a tie; so the distance grows with depth. It
cannot grow for ever: two runs whose rounding errors have nothing in common any more are the root
of 2 times as far from each other as each is from the truth, and there the band levels out. Where
a rung's compounded distance is inside the band, it is no more than what noise gives.

It judges nothing: what an op computes is judged in isolated mode, where noise cannot add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pyarrow as pa
import torch

from dsv4.console import main_guard, progress
from dsv4.dump import DumpReader, DumpWriter
from dsv4.files import write_parquet
from dsv4.floor.dither import Dither, draw_seed
from dsv4.judge.compare import compare
from dsv4.ladder import Variant
from dsv4.model import numerics
from dsv4.run.isolated import Reference
from dsv4.run.modes import Input, open_reference, run_compounded
from dsv4.run.noisy import with_noise
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import write_trace

DRAWS = 2  # each costs as much as a free run of a variant
OWN = "own run"  # what a draw is compared with, in the column ``against``


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.noise --config C --results R --variant ID``."""
    options = parse(__doc__ or "", arguments, variant=True)
    setup = prepare(options.config, options.results)
    write_noise(setup, setup.config.ladder[options.variant])


def write_noise(setup: Setup, variant: Variant, draws: int = DRAWS) -> None:
    """Draw a plan's free runs and write ``noise/<variant>.parquet``.

    One row a draw (column ``draw``), prompt, phase, layer, tap and, for some taps, decode step;
    the other columns are those of the metrics table.
    """
    inputs = read_inputs(setup)
    shown = progress([f"draw {draw}" for draw in range(draws)], f"{variant.id}, noise of free runs")
    tables = [measure_draw(setup, variant, inputs, draw) for draw, _ in enumerate(shown)]
    table = pa.Table.from_pandas(pd.concat(tables, ignore_index=True), preserve_index=False)
    write_parquet(setup.results / "noise" / f"{variant.id}.parquet", table)


def read_inputs(setup: Setup) -> dict[str, Input]:
    """Tokens and judged rows of every prompt, as the reference's dumps have them."""
    inputs = {}
    for prompt in setup.tokens:
        with open_reference(setup, prompt) as dump:
            reference = Reference(dump, setup.checkpoint.config)
            inputs[prompt] = reference.tokens, reference.rows
    return inputs


def measure_draw(
    setup: Setup, variant: Variant, inputs: Mapping[str, Input], draw: int | None
) -> pd.DataFrame:
    """Run one draw (None: without noise) and compare it with the variant's own free run, tap by tap."""
    seed = None if draw is None else draw_seed(setup.config.seed, "free runs", draw)
    model = setup.model(numerics.of_plan(variant.plan, setup.checkpoint.config))
    noisy = replace(model, ops=with_noise(model.ops, Dither(seed, normals=torch.float32)))
    traces, _ = run_compounded(setup, noisy, inputs)
    tables = []
    with TemporaryDirectory() as folder:
        for prompt, trace in traces.items():
            path = Path(folder) / f"{prompt}.h5"
            with DumpWriter(path, setup.attrs(prompt, "variant", variant.id, variant.plan)) as writer:
                write_trace(writer, "compounded", trace)
            own = setup.results / "variants" / variant.id / f"{prompt}.h5"
            with DumpReader(path) as test, DumpReader(own, setup.identity(prompt)) as truth:
                # as against a reference: each decode step of some taps is a row of its own
                tables.append(compare(test, truth, modes=("compounded",), against="trained"))
    table = pd.concat(tables, ignore_index=True)
    return table[table["part"] == "all"].assign(against=OWN, draw=draw)


if __name__ == "__main__":
    main_guard(main)
