"""One variant on every prompt: its taps with the reference's inputs, and running freely."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
from dsv4.run.trace import Trace, write_trace
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
    clamp = ClampCount(config.swiglu_limit)
    model = setup.model(clamp.watch(numerics.of_plan(variant.plan, config)))
    wrap = install(model) if install else unwrapped
    isolated, compounded, caches = run_both_modes(setup, model, wrap)
    folder = setup.results / "variants"
    for prompt in setup.tokens:
        parent = folder / variant.parent / f"{prompt}.h5" if variant.parent else None
        attrs = setup.attrs(prompt, "variant", variant.id, variant.plan)
        attrs["exercised"] = exercised(config, compounded[prompt], caches[prompt], clamp, len(caches))
        with DumpWriter(folder / variant.id / f"{prompt}.h5", attrs, parent=parent) as writer:
            write_trace(writer, "isolated", isolated[prompt])
            write_trace(writer, "compounded", compounded[prompt])


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
    config: ModelConfig, trace: Trace, cache: SequenceCache, clamp: ClampCount, batch: int
) -> dict[str, Any]:
    """Which paths the run went through; the judge names those that it did not."""
    rows = trace.rows.all
    entries = (rows + 1) // CSA_RATIO if CSA_RATIO in config.compress_ratios else rows[:0]
    peaks = [
        float(abs(trace.get(layer, "streams")[1]).max(initial=0.0))
        for layer in range(config.num_hidden_layers)
    ]
    return {
        "swiglu_clamp_hits": clamp.hits,
        "swiglu_clamp_share": clamp.hits / max(clamp.total, 1),
        "csa_rows_over_topk": int((entries > config.index_topk).sum()),
        "rows_over_window": int((rows >= config.sliding_window).sum()),
        "kv_pages": max(
            len(layer.window.table) + len(layer.entries.table if layer.entries else ())
            for layer in cache.layers
        ),
        "cache_bytes": cache.nbytes,
        "batch": batch,
        "residual_absmax": peaks,
    }


if __name__ == "__main__":
    main_guard(main)
