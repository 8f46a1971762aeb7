"""One variant on every prompt: its taps with the reference's inputs, and running freely."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.dump import DumpReader, DumpWriter
from dsv4.ladder import Variant
from dsv4.model import numerics
from dsv4.model.cache import SequenceCache
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.transformer import Transformer
from dsv4.run.console import main_guard, progress
from dsv4.run.forward import Seen, run_compounded
from dsv4.run.isolated import Reference, run_isolated
from dsv4.run.reference import first_streams
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import Trace, tap_names, write_trace
from kernels.rounding import Round


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.variant --config C --results R --variant ID``."""
    options = parse(__doc__ or "", arguments, variant=True)
    setup = prepare(options.config, options.results)
    variant = setup.config.ladder[options.variant]
    for prompt in progress(list(setup.tokens), variant.id):
        write_variant(setup, variant, prompt)


def write_variant(setup: Setup, variant: Variant, prompt: str, install: "Install | None" = None) -> None:
    """Run one variant on one prompt in both modes and dump it.

    Parameters
    ----------
    install : callable or None
        Changes the model before it runs and may wrap the probe (fault injection).
    """
    config = setup.checkpoint.config
    clamp = ClampCount(config.swiglu_limit)
    model = setup.model(clamp.watch(numerics.of_plan(variant.plan, config)))
    wrap = install(model) if install else _bare
    with DumpReader(setup.results / "reference" / f"{prompt}.h5", setup.identity(prompt)) as dump:
        reference = Reference(dump, config)
        isolated = Trace(config, reference.rows, tap_names(config, "isolated"))
        run_isolated(model, reference, first_streams(setup, reference), wrap(isolated.at))
        compounded = Trace(config, reference.rows, tap_names(config, "compounded"))
        cache = run_compounded(model, reference.tokens, reference.rows.prompt, wrap(compounded.at))
    folder = setup.results / "variants"
    parent = folder / variant.parent / f"{prompt}.h5" if variant.parent else None
    attrs = setup.attrs(prompt, "variant", variant.id, variant.plan)
    attrs["exercised"] = exercised(config, reference, compounded, cache, clamp)
    with DumpWriter(folder / variant.id / f"{prompt}.h5", attrs, parent=parent) as writer:
        write_trace(writer, "isolated", isolated)
        write_trace(writer, "compounded", compounded)


def _bare(seen: Seen) -> Seen:
    return seen


class ClampCount:
    """Count how often SwiGLU's clamp acts: a clamp that is never reached is not exercised."""

    def __init__(self, limit: float) -> None:
        self.limit, self.hits, self.total = limit, 0, 0

    def watch(self, num: Numerics) -> Numerics:
        """Same numerics, with gate and up counted as they pass their rounding point."""
        store = num.ffn.gate_up

        def counted(x: Tensor) -> Tensor:
            self.hits += int((x.abs() > self.limit).sum())
            self.total += x.numel()
            return store(x)

        rounding: Round = counted
        return replace(num, ffn=replace(num.ffn, gate_up=rounding))


def exercised(
    config: ModelConfig, reference: Reference, trace: Trace, cache: SequenceCache, clamp: ClampCount
) -> dict[str, Any]:
    """Which paths the run went through; the judge names those that it did not."""
    rows = torch.from_numpy(reference.rows.all)
    csa = [ratio for ratio in config.compress_ratios if ratio == 4]
    entries = (rows + 1) // 4 if csa else rows[:0]
    peaks = [
        float(abs(trace.get(layer, "streams")[1]).max(initial=0.0)) for layer in range(config.num_hidden_layers)
    ]
    return {
        "swiglu_clamp_hits": clamp.hits,
        "swiglu_clamp_share": clamp.hits / max(clamp.total, 1),
        "csa_rows_over_topk": int((entries > config.index_topk).sum()),
        "rows_over_window": int((rows >= config.sliding_window).sum()),
        "kv_pages": max(len(layer.window.table) + len(layer.entries.table if layer.entries else ()) for layer in cache.layers),
        "cache_bytes": cache.nbytes,
        "batch": 1,
        "residual_absmax": peaks,
    }


class Install:
    """Type of a fault: changes a model in place and returns a wrapper of its probes."""

    def __call__(self, model: Transformer) -> Any:
        """Install into ``model``."""
        raise NotImplementedError


if __name__ == "__main__":
    main_guard(main)
