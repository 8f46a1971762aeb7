"""compute-sanitizer's racecheck on the Hopper kernels, where it can judge them, and on a hand-over read too early.

A write reaches its reader over two barriers (``bar.sync`` of the writers, then one thread's arrival at an mbarrier).
What was run and found is in docs/races.md. ``python -m kernels.sparse_attn.test_races NAME`` launches one program.
"""

import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import allocate_shared_memory
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.sparse_attn.hopper_layouts_kernel import copy_layout, tile_layout
from kernels.sparse_attn.test_bound import case, run
from kernels.sparse_attn.test_hopper_kernel import FP8_PATHS, on_hopper
from kernels.toolchain import sanitizer

STEPS = gl.constexpr(2)
SANITIZER = sanitizer()
BARRIERS = "64"
HANDED_OVER = ("stored", "copied")  # small examples: a tile goes from one warp group to another


@gluon.constexpr_function
def _read_layout():
    """Another layout than the writers': a thread reads what others wrote."""
    return gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])


@gluon.jit
def _write(in_ptr, tile, full, empty, COPY: gl.constexpr):
    row = gl.arange(0, 64, gl.SliceLayout(1, copy_layout()))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, copy_layout()))[None, :]
    for step in range(STEPS):
        at = in_ptr + step * 4096 + row * 64 + column
        mbarrier.wait(empty, (step & 1) ^ 1)
        if COPY:
            async_copy.async_copy_global_to_shared(tile, at)
            async_copy.mbarrier_arrive(full, increment_count=False)
        else:
            tile.store(gl.load(at))
            mbarrier.arrive(full)


@gluon.jit
def _read(out_ptr, tile, full, empty, LATE: gl.constexpr):
    row = gl.arange(0, 64, gl.SliceLayout(1, _read_layout()))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, _read_layout()))[None, :]
    for step in range(STEPS):
        if not LATE:
            mbarrier.wait(full, step & 1)
        values = tile.load(_read_layout())
        if LATE:
            mbarrier.wait(full, step & 1)
        mbarrier.arrive(empty)
        gl.store(out_ptr + step * 4096 + row * 64 + column, values)


@gluon.jit
def hand_over_kernel(in_ptr, out_ptr, COPY: gl.constexpr, LATE: gl.constexpr):
    """A writing and a reading warp group, one tile, one mbarrier each way."""
    tile = allocate_shared_memory(gl.bfloat16, [64, 64], tile_layout())
    full = allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=128 if COPY else 1)
    mbarrier.init(empty, count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [(_read, (out_ptr, tile, full, empty, LATE)), (_write, (in_ptr, tile, full, empty, COPY))], [4], [64]
    )


def hand_over(copy: bool, late: bool) -> None:
    """Launch the example; what it writes is anything if it waits only after it has read."""
    given = torch.randn(STEPS.value, 64, 64, device="cuda").bfloat16()
    got = torch.empty_like(given)
    hand_over_kernel[(1,)](given, got, COPY=copy, LATE=late, num_warps=4)
    torch.cuda.synchronize()
    if not late:
        assert torch.equal(got, given)


def launch(name: str) -> None:
    """Launch one program: an example, or attention by a path of test_bound."""
    example, _, fault = name.partition("-")
    if example in HANDED_OVER:
        hand_over(example == "copied", bool(fault))
        return
    path, _, splits = name.partition("-")
    run(path, case(1, 64, 400, nope=448), "cuda", splits=int(splits or 1), by="hopper")
    torch.cuda.synchronize()


@cache
def hazards(name: str) -> int:
    """Hazards that racecheck reports for a program."""
    kernel = "hand_over" if name.partition("-")[0] in HANDED_OVER else "attend"
    command = [
        str(SANITIZER),
        *("--tool", "racecheck", "--racecheck-report", "hazard", "--print-limit", "4"),
        *("--num-cuda-barriers", BARRIERS),  # Triton's code does not say how many it has
        "--kernel-name",
        f"kns={kernel}",
        sys.executable,
        "-m",
        "kernels.sparse_attn.test_races",
        name,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", said)
    assert found, said[-2000:]
    return int(found[1]) + int(found[2])


sanitized = pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")


@pytest.mark.gpu
@on_hopper
@sanitized
@pytest.mark.parametrize("name", ["b0", *FP8_PATHS, "b0-2", "b1-2"])
def test_racecheck_finds_nothing(name):
    if wrong := [example for example in HANDED_OVER if hazards(example)]:
        pytest.skip(f"this racecheck reports a correct hand-over too ({', '.join(wrong)}): it cannot judge")
    assert hazards(name) == 0


@pytest.mark.gpu
@on_hopper
@sanitized
@pytest.mark.parametrize("name", HANDED_OVER)
def test_racecheck_finds_a_read_before_its_wait(name):
    assert hazards(f"{name}-late") > 0


if __name__ == "__main__":
    launch(sys.argv[1])
