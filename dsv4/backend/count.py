"""Launches of one decode step: ``python -m dsv4.backend.count docs`` writes ``launches_<model>.md``.

A step of fixed shapes (:mod:`dsv4.backend.step`) of each rung runs at the released models' sizes, with every launch
counted where Python makes it and torch's own operators counted as they are dispatched. Without a GPU no launch is
made, and tensors have no memory. On a GPU the step runs, and the profiler counts its graph's kernels too. Beside them
stands the plan's own counting of the sites that its rungs change (:mod:`dsv4.judge.launches`).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import config as configuration
from dsv4.backend.launches import counted, withheld
from dsv4.backend.model import KernelTransformer
from dsv4.backend.sizes import RATIOS, filled_cache, released, zero_weights
from dsv4.backend.step import DecodeStep
from dsv4.files import write_whole
from dsv4.judge.launches import Sizes, launches, mhc_site
from dsv4.ladder import Variant
from dsv4.model.config import ModelConfig
from dsv4.model.transformer import Layer
from dsv4.plan import Plan, flatten
from dsv4.taps import BY_NAME
from kernels import toolchain

CONTEXT = 32_768
LAST = "B3"  # rungs up to this one
MIX = ("hc.partial_kernel", "hc.finish_kernel")  # mHC's weights, before a site
CLOSED = {"comp_closed": "compress", "index_closed": "index_k"}
TORCH = "torch"
NO_KERNEL = ("empty", "empty_strided", "empty_like", "detach", "lift_fresh", "new_empty", "_unsafe_view")
INTRO = """# Launches of one decode step: {name}, {layers} layers

Made by `python -m dsv4.backend.count`; not edited by hand.

One sequence behind {context} tokens, weights and cache of zeros at the released model's sizes. Counted on {on}.
"ours": launches of our kernels, counted where Python makes them; a step of fixed shapes pools its open windows and
launches their stores at every position, so these are counted too. "torch": its own operators between (page tables,
rotations, lists of keys, sums), a kernel each as a rule. "replayed": kernels of one replay of the step's CUDA graph,
by the profiler. "mHC site": ours from the streams to the quantised input, two sites a layer, mHC's weights (two
launches) left out. "plan": the same by the plan's own counting, in which a norm of torch is four launches and its
quantiser two. "saved": against the first rung."""
HEAD = """| rung | ours | saved | torch | replayed | mHC site | plan: mHC site | plan: saved, all sites |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
Counted = dict[tuple[Layer, str], Counter[str]]


class TorchOps(TorchDispatchMode):
    """Counts operators of torch that compute: a kernel each, as a rule; views and new memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run one; what it computes on the CPU launches nothing."""
        made = func(*args, **(kwargs or {}))
        computes = not func.is_view and func.__name__.split(".")[0] not in NO_KERNEL
        self.count += computes and isinstance(made, torch.Tensor) and made.device.type != "cpu"
        return made


def step_launches(step: DecodeStep) -> Counted:
    """Launches of a step, by layer and stage; torch's operators as :data:`TORCH`."""
    found: Counted = {}
    with counted() as seen, TorchOps() as ops:

        def probe(layer: Layer, name: str, value: Any) -> Any:
            stage = CLOSED[name] if name in CLOSED else BY_NAME[name].stage
            found.setdefault((layer, stage), Counter()).update(seen + Counter({TORCH: ops.count}))
            seen.clear()
            ops.count = 0
            return value

        step.probe = probe
        step.run()
    return found


def step_of(config: ModelConfig, plan: Plan, device: str, context: int = CONTEXT) -> DecodeStep:
    """One sequence's step behind ``context`` tokens, of a model whose weights and cache are zeros."""
    weights = zero_weights(config, torch.device(device))
    model = KernelTransformer(config, weights, plan, device=device)
    return DecodeStep(model, [filled_cache(model, context)], 1)


def at_size(config: ModelConfig, plan: Plan, context: int = CONTEXT) -> Counted:
    """Launches of a step at these sizes, none of them made."""
    with withheld():
        return step_launches(step_of(config, plan, "meta", context))


def site(found: Counted, layer: int, which: str) -> Counter[str]:
    """Our launches from a layer's streams and mHC weights to its quantised input; ``which``: ``attn`` or ``moe``."""
    total = found[layer, f"{which}_mhc"] + found[layer, f"{which}_quant"]
    return Counter({name: count for name, count in total.items() if name not in (*MIX, TORCH)})


def profiled(step: DecodeStep) -> int:
    """Kernels on the device in one replay of a step's graph."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.replay()
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels)


def row(name: str, rung: Variant, device: str) -> dict[str, Any]:
    """One rung at one model's sizes."""
    config = released(name)
    sizes = Sizes(**{field: getattr(config, field) for field in Sizes.__annotations__})
    step = None if device == "meta" else step_of(config, rung.plan, device)
    found = at_size(config, rung.plan) if step is None else step_launches(step)
    total, plan = sum(found.values(), Counter()), flatten(rung.plan)
    return {
        "rung": rung.id,
        "ours": total.total() - total[TORCH],
        "torch": total[TORCH],
        "replayed": profiled(step) if step else None,
        "site": site(found, config.num_hidden_layers - 1, "attn"),
        "plan": sum(launches(plan, sizes).values()),
        "plan_site": mhc_site(plan),
    }


def page(model: str, found: Sequence[Mapping[str, Any]], device: str) -> str:
    """The counts as Markdown."""
    on = "no device: no launch is made" if device == "meta" else torch.cuda.get_device_name()
    first, layers = found[0], len(RATIOS[model])
    on += f", {datetime.now(UTC):%Y-%m-%d}"
    lines = [INTRO.format(name=model.capitalize(), layers=layers, context=f"{CONTEXT:,}", on=on), "", HEAD]
    for one in found:
        kernels = ", ".join(f"`{name}` {count}" for name, count in sorted(one["site"].items()))
        saved = [first[key] - one[key] for key in ("ours", "plan")]
        cells = [one["rung"], one["ours"], saved[0], one["torch"], one["replayed"] or "not run"]
        cells += [f"{one['site'].total()}: {kernels}", one["plan_site"], saved[1]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    p5 = next((one for one in found if one["rung"] == "P5"), None)
    if p5 and first["rung"] == "B0_unfused":
        lines.append(_p5(layers, first, p5))
    return "\n".join(lines) + "\n"


def _p5(layers: int, unfused: Mapping[str, Any], p5: Mapping[str, Any]) -> str:
    """What P5 saves by both countings."""
    sites, ours = 2 * layers, unfused["ours"] - p5["ours"]
    per = [unfused["site"].total(), p5["site"].total()]
    plan = [unfused["plan_site"], p5["plan_site"]]
    return (
        f"\nP5 at {layers} layers, {sites} sites: the plan counts {plan[0]} launches a site that become {plan[1]},"
        f" {sites * (plan[0] - plan[1])} saved. Counted: our own unfused kernels make {per[0]}, P5's {per[1]},"
        f" {ours} saved, half of them P4's. What the plan counts more is torch's norm (4) and quantiser (2), which"
        " here are a kernel each."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m dsv4.backend.count", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of launches_<model>.md")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--rung", action="append", help="only this one; default: the spine up to B3")
    parser.add_argument("--model", action="append", choices=tuple(RATIOS), help="default: both")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    spine = [rung for rung in configuration.load(args.config).ladder if rung.spine]
    spine = spine[: [rung.id for rung in spine].index(LAST) + 1]
    ladder = [rung for rung in spine if rung.id in args.rung] if args.rung else spine
    device = "cuda" if torch.cuda.is_available() else "meta"
    if device == "cuda":
        toolchain.select(blackwell=torch.cuda.get_device_capability()[0] >= 10)
    for model in args.model or tuple(RATIOS):
        found: list[dict[str, Any]] = []
        for rung in ladder:
            found.append(row(model, rung, device))
            write_whole(args.out / f"launches_{model}.md", page(model, found, device).encode())
            print(f"{model} {rung.id}: {found[-1]['ours']} ours, {found[-1]['torch']} of torch", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
