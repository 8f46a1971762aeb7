"""One variant on every prompt: its taps with the reference's inputs, and running freely."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from dsv4.dump import DumpWriter
from dsv4.ladder import Variant
from dsv4.model import numerics
from dsv4.model.cache import SequenceCache
from dsv4.model.config import CSA_RATIO, ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.transformer import Transformer
from dsv4.run.console import main_guard
from dsv4.run.modes import Wrap, run_both_modes, unwrapped
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import write_trace
from kernels.rounding import Round

Install = Callable[[Transformer], Wrap]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.variant --config C --results R --variant ID``."""
    options = parse(__doc__ or "", arguments, variant=True)
    setup = prepare(options.config, options.results)
    write_variant(setup, setup.config.ladder[options.variant])


def write_variant(setup: Setup, variant: Variant, install: Install | None = None) -> None:
    """Run one variant on every prompt in both modes and dump it.

    Parameters
    ----------
    setup : Setup
    variant : Variant
    install : callable or None
        Changes the model before it runs and returns a wrapper of its probes (a fault).
    """
    config = setup.checkpoint.config
    watch = Watch(config)
    model = setup.model(watch.over(numerics.of_plan(variant.plan, config)))
    wrap = install(model) if install else unwrapped
    isolated, compounded, caches = run_both_modes(setup, model, wrap)
    folder = setup.results / "variants"
    for prompt in setup.tokens:
        parent = folder / variant.parent / f"{prompt}.h5" if variant.parent else None
        attrs = setup.attrs(prompt, "variant", variant.id, variant.plan)
        attrs["exercised"] = exercised(
            config, compounded[prompt].rows.all, caches[prompt], watch, len(caches)
        )
        with DumpWriter(folder / variant.id / f"{prompt}.h5", attrs, parent=parent) as writer:
            write_trace(writer, "isolated", isolated[prompt])
            write_trace(writer, "compounded", compounded[prompt])


class Watch:
    """Count what a run reaches as values pass their rounding points; it changes none of them.

    Attributes
    ----------
    hits, total : gate and up values beyond SwiGLU's clamp, and all of them: a clamp that is
        never reached is not exercised.
    peaks : largest magnitude of the streams, by layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.limit, self.hits, self.total = config.swiglu_limit, 0, 0
        self.peaks = [0.0] * config.num_hidden_layers

    def over(self, num: Numerics) -> Numerics:
        """Return the same numerics, watched."""
        store, residual = num.ffn.gate_up, num.residual

        def gate_up(x: Tensor) -> Tensor:
            self.hits += int((x.abs() > self.limit).sum())
            self.total += x.numel()
            return store(x)

        def streams(layer: int) -> Round:
            def point(x: Tensor) -> Tensor:
                if x.numel():
                    self.peaks[layer] = max(self.peaks[layer], float(x.abs().max()))
                return residual(layer)(x)

            return point

        return replace(num, ffn=replace(num.ffn, gate_up=gate_up), residual=streams)


def exercised(
    config: ModelConfig, rows: np.ndarray, cache: SequenceCache, watch: Watch, batch: int
) -> dict[str, Any]:
    """Which paths the run went through; the judge names those that it did not."""
    entries = (rows + 1) // CSA_RATIO if CSA_RATIO in config.compress_ratios else rows[:0]
    pages = [
        len(layer.window.table) + (len(layer.entries.table) if layer.entries else 0) for layer in cache.layers
    ]
    return {
        "swiglu_clamp_hits": watch.hits,
        "swiglu_clamp_share": watch.hits / max(watch.total, 1),
        "csa_rows_over_topk": int((entries > config.index_topk).sum()),
        "rows_over_window": int((rows >= config.sliding_window).sum()),
        "kv_pages": max(pages),
        "cache_bytes": cache.nbytes,
        "batch": batch,
        "residual_absmax": watch.peaks,
    }


if __name__ == "__main__":
    main_guard(main)
