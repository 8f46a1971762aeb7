"""Every launch that is timed gives the same bytes again: the benchmark's cases, each launched many times, on a GPU.

No kernel adds to memory that others add to, but some hand parts from block to block, and the Hopper ones from warp to
warp: a race there would show as a launch that differs. Between repeats another input set is launched, so that what a
launch leaves unwritten is not taken for what it wrote.
"""

import functools
import importlib
from pathlib import Path

import pytest
import torch

from kernels.bench_case import OURS, Case

REPEATS = 20
OPS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/bench.py"))


def tensors(value, seen=None):
    """Tensors that a function reads or writes: those of its closure, of its object, of what these hold."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept: an id is good as long as its object is
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = []
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif callable(value) and hasattr(value, "__closure__"):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [*cells, value.__defaults__, value.__kwdefaults__]
    elif hasattr(value, "__self__"):
        parts = [value.__self__, value.__func__] if hasattr(value, "__func__") else []
    elif type(value).__module__.startswith("kernels."):
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from tensors(part, seen)


def bytes_of(tensor):
    """A copy: elements, as they are strided."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).clone()


def outputs(launch):
    """What other inputs change among the tensors that a launch holds; all of them if each set has its own."""
    held = [tensor for tensor in tensors(launch) if tensor.numel()]
    launch(0)
    before = [bytes_of(tensor) for tensor in held]
    launch(1)
    changed = [
        tensor for tensor, old in zip(held, before, strict=True) if not torch.equal(bytes_of(tensor), old)
    ]
    return changed or held


def assert_repeats(case):
    """Each of many launches on one input set writes the first one's bytes."""
    launch = case.paths[OURS]
    assert case.copies > 1
    written = outputs(launch)
    launch(0)
    first = [bytes_of(tensor) for tensor in written]
    for _ in range(REPEATS):
        launch(1)
        launch(0)
        for tensor, want in zip(written, first, strict=True):
            assert torch.equal(bytes_of(tensor), want), case.name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter repeats anything")
@pytest.mark.parametrize("op", OPS)
def test_launches_repeat_bit_for_bit(op):
    done = 0
    for case in importlib.import_module(f"kernels.{op}.bench").cases(torch.device("cuda")):
        assert_repeats(case)
        done += 1
        print(f"{op}: {case.group}, {case.name}: {REPEATS} repeats", flush=True)
        del case
        torch.cuda.empty_cache()
    assert done


def test_a_launch_that_differs_is_seen():
    out, sets, calls = torch.zeros(2), torch.randn(2, 2), []

    def good(i):
        out.copy_(sets[i])

    def bad(i):
        calls.append(i)
        out.copy_(sets[i] + (len(calls) == 25))

    def case(launch):
        return Case(group="", name="a case", paths={OURS: launch}, copies=2, bytes=0)

    assert [tensor is out for tensor in outputs(good)] == [True]
    assert_repeats(case(good))
    with pytest.raises(AssertionError, match="a case"):
        assert_repeats(case(bad))
