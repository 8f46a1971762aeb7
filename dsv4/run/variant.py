"""One variant on every prompt: its taps with the reference's inputs, and running freely."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv4.console import main_guard
from dsv4.dump import DumpWriter
from dsv4.ladder import Variant
from dsv4.model.cache import SequenceCache
from dsv4.model.config import CSA_RATIO, ModelConfig
from dsv4.model.transformer import Transformer
from dsv4.run.modes import Wrap, run_both_modes, unwrapped
from dsv4.run.setup import Setup, parse, prepare
from dsv4.run.trace import write_trace
from dsv4.run.watch import Watch

Install = Callable[[Transformer], Wrap]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.variant --config C --results R --variant ID``."""
    options = parse(__doc__ or "", arguments, variant=True)
    setup = prepare(options.config, options.results)
    variant = setup.config.ladder[options.variant]
    if variant.engine:
        from dsv4.engine.variant import write_engine_variant

        write_engine_variant(setup, variant)
    elif variant.commit:
        from dsv4.commits.rung import write_commit_variant

        write_commit_variant(setup, variant)
    else:
        write_variant(setup, variant)


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
    model = setup.variant_model(variant.plan, watch)
    wrap = install(model) if install else unwrapped
    isolated, compounded, caches = run_both_modes(setup, model, wrap)
    folder = setup.results / "variants"
    for prompt in setup.tokens:
        parent = folder / variant.parent / f"{prompt}.h5" if variant.parent else None
        attrs = setup.attrs(prompt, "variant", variant.id, variant.plan)
        attrs["exercised"] = exercised(
            config, compounded[prompt].rows.all, caches[prompt], watch, len(caches)
        )
        attrs["launches"] = dict(getattr(model, "launches", {}))  # of one decode step; refs launch nothing
        attrs["requantised"] = getattr(model, "requantised", 0)
        with DumpWriter(folder / variant.id / f"{prompt}.h5", attrs, parent=parent) as writer:
            write_trace(writer, "isolated", isolated[prompt])
            write_trace(writer, "compounded", compounded[prompt])


def exercised(
    config: ModelConfig, rows: np.ndarray, cache: SequenceCache, watch: Watch, batch: int
) -> dict[str, Any]:
    """Which paths the run went through; the judge names those that it did not."""
    entries = (rows + 1) // CSA_RATIO if CSA_RATIO in config.compress_ratios else rows[:0]
    stores = [store for layer in cache.layers for store in (layer.window, layer.entries) if store]
    return {
        "swiglu_clamp_hits": watch.hits,
        "swiglu_clamp_share": watch.hits / max(watch.total, 1),
        "csa_rows_over_topk": int((entries > config.index_topk).sum()),
        "rows_over_window": int((rows >= config.sliding_window).sum()),
        "kv_pages": max(len(store.table) for store in stores),  # of one store: one page each crosses none
        "cache_bytes": cache.nbytes,
        "batch": batch,
        "residual_absmax": watch.peaks,
    }


if __name__ == "__main__":
    main_guard(main)
