"""The choice's kernel against the ref, exactly: ties, limits, NaN, several segments; and what its PTX must not hold."""

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels._check import assert_bitwise, assert_differs, draw
from kernels.index_topk import kernel, ref

SPECIAL = np.array(
    [-math.inf, -1.5, -0.0, 0.0, 1e-40, 1.0, 1.0 + 2.0**-23, 7.0, math.inf, math.nan], np.float32
)


def tied(T, C, seed):
    """Scores with many ties (a few distinct values) and limits below, at and over C."""
    rng = np.random.default_rng([seed, T, C])
    return torch.from_numpy(rng.choice(SPECIAL, (T, C))), torch.from_numpy(rng.integers(-1, C + 3, T)).int()


def run(scores, visible, k, device, **kwargs):
    return kernel.index_topk(scores.to(device), visible.to(device), k, **kwargs).cpu()


def wanted(scores, visible, k):
    return ref.index_topk(scores, visible.long(), k).int()


@pytest.mark.parametrize(
    ("T", "C", "k"),
    [(0, 37, 8), (1, 1, 1), (1, 1, 40), (3, 129, 1), (5, 300, 8), (4, 300, 40), (3, 1100, 40), (2, 1100, 1)],
)
def test_equals_the_ref_on_ties(T, C, k, accelerator):
    scores, visible = tied(T, C, 1)
    assert_bitwise(run(scores, visible, k, accelerator), wanted(scores, visible, k))


@pytest.mark.parametrize(("C", "k"), [(1023, 512), (5000, 40), (9000, 512), (5000, 1024)])
def test_equals_the_ref_on_distinct_scores(C, k, accelerator):
    scores = draw(2, C, seed=2, decades=3)
    visible = torch.tensor([C - 1, k]).int()
    assert_bitwise(run(scores, visible, k, accelerator), wanted(scores, visible, k))


@pytest.mark.parametrize("k", [1, 10, 100])  # 100: three launches, no runs
def test_rows_of_several_segments(k, accelerator, monkeypatch):
    monkeypatch.setattr(kernel, "SEGMENT", 256)
    monkeypatch.setattr(kernel, "LONGEST", 256)
    scores = torch.cat((tied(1, 1100, 0)[0], draw(1, 1100, seed=1)))
    visible = torch.tensor([1100, 300]).int()
    assert_bitwise(run(scores, visible, k, accelerator), wanted(scores, visible, k))


def test_real_segments(accelerator, monkeypatch):
    monkeypatch.setattr(kernel, "LONGEST", 2**15)
    scores = draw(1, 70000, seed=3)
    scores[0, 30000:60000] = scores[0].topk(300).values[-1]  # the cut falls into a long run of ties
    visible = torch.tensor([66000]).int()
    assert_bitwise(run(scores, visible, 512, accelerator), wanted(scores, visible, 512))


def test_all_equal_scores_keep_the_first_entries(accelerator):
    scores = torch.tensor([2.5, -0.0, -math.inf, math.inf, math.nan, -1e-45])[:, None].repeat(1, 9)
    got = run(scores, torch.tensor([0, 2, 4, 9, 9, 9]).int(), 4, accelerator)
    assert got.tolist() == [[-1] * 4, [0, 1, -1, -1], *[[0, 1, 2, 3]] * 4]


def test_zeros_are_one_value_and_negative_scores_rank_in_order(accelerator):
    scores = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0], [-3.0, -1.0, -math.inf, -2.0, -1.5]])
    assert run(scores, torch.tensor([5, 5]).int(), 2, accelerator).tolist() == [[0, 1], [1, 4]]


def test_a_whole_segment_of_ties(accelerator):
    """2^15 ties fill their half of the packed count."""
    got = run(torch.zeros(1, kernel.SEGMENT), torch.tensor([kernel.SEGMENT]).int(), 512, accelerator)
    assert_bitwise(got[0], torch.arange(512).int())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, on a signalling NaN
def test_every_nan_is_one_value(accelerator):
    scores = torch.tensor([[0xFFC00000 - 2**32, 0x7F800001, 0x7FC00000, 0x7F800000]], dtype=torch.int32)
    assert run(scores.view(torch.float32), torch.tensor([4]).int(), 2, accelerator).tolist() == [[0, 1]]


def test_hidden_scores_and_strides_have_no_effect(accelerator):
    scores, _ = tied(4, 137, 3)
    visible = torch.tensor([5, 50, 100, 137]).int()
    hidden = torch.arange(137) >= visible[:, None]
    whole = run(scores, visible, 8, accelerator)
    assert_bitwise(run(scores.masked_fill(hidden, math.nan), visible, 8, accelerator), whole)
    wide = torch.full((4, 200), math.inf)
    wide[:, :137] = scores
    assert_bitwise(kernel.index_topk(wide.to(accelerator)[:, :137], visible.to(accelerator), 8).cpu(), whole)
    out = torch.full((4, 8), 77, dtype=torch.int32, device=accelerator)
    assert kernel.index_topk(scores.to(accelerator), visible.to(accelerator), 8, out=out) is out
    assert_bitwise(out.cpu(), whole)


def test_a_hidden_score_wins_no_place_for_its_run(accelerator):
    """The best lie in k runs, one each; the run that the limit cuts holds larger ones behind it."""
    scores, visible = torch.full((1, 200), -1.0), torch.tensor([161]).int()
    scores[0, : 8 * kernel.RUN : kernel.RUN] = torch.arange(8.0, 0.0, -1.0)
    scores[0, 161:] = math.inf
    assert kernel.alone(200, 8)
    assert_bitwise(run(scores, visible, 8, accelerator), wanted(scores, visible, 8))


def test_a_row_does_not_see_its_batch(accelerator):
    scores, visible = tied(5, 200, 5)
    whole = run(scores, visible, 8, accelerator)
    for row in (0, 4):
        assert_bitwise(
            run(scores[row : row + 1], visible[row : row + 1], 8, accelerator), whole[row : row + 1]
        )


def test_empty(accelerator):
    assert run(torch.zeros(2, 0), torch.tensor([0, 3]).int(), 3, accelerator).tolist() == [[-1] * 3] * 2
    assert run(torch.zeros(0, 5), torch.zeros(0).int(), 3, accelerator).shape == (0, 3)


def test_launches_depend_on_shapes_alone():
    assert kernel.block_of(32768, 512) == 32768
    assert kernel.block_of(262144, 512) == 262144
    assert kernel.block_of(262145, 512) == kernel.block_of(262144, 2048) == 32768
    assert kernel.block_of(0, 1) == kernel.MIN_BLOCK
    assert kernel.levels_of(4096, 512) == 0
    assert kernel.levels_of(32768, 512) == kernel.levels_of(32768, 2048) == kernel.levels_of(65536, 1024) == 1
    assert kernel.levels_of(40000, 512) == kernel.levels_of(262144, 1024) == 2
    assert kernel.alone(32768, 512)
    assert not kernel.alone(262145, 512)
    assert not kernel.alone(8192, 1024)
    assert kernel.warps_of(8192, 0, best=False) == 8
    assert kernel.warps_of(32768, 1, best=False) == 16


@pytest.mark.parametrize("kind", ["walk", "ties", "distinct", "cut in ties", "NaN"])
@pytest.mark.parametrize(("C", "k", "levels"), [(1100, 40, 1), (9000, 512, 1), (3000, 40, 2), (2800, 1, 2)])
def test_runs_and_runs_of_runs(kind, C, k, levels, accelerator, monkeypatch):
    """The best in few runs or in many, ties cut in runs and entries, few visible."""
    if levels == 2:
        monkeypatch.setattr(kernel, "SEGMENT", 1024)
        monkeypatch.setattr(kernel, "MIN_RUNS", 1)
    scores = {
        "walk": lambda: draw(3, C, seed=1).cumsum(1),  # the best are neighbours: few runs hold them all
        "ties": lambda: tied(3, C, 1)[0],
        "distinct": lambda: draw(3, C, seed=2, decades=3),
        "cut in ties": lambda: draw(3, C, seed=3).clamp(max=1.0),
        "NaN": lambda: draw(3, C, seed=4).masked_fill(draw(3, C, seed=5) > 1.0, math.nan),
    }[kind]()
    visible = torch.tensor([C, C // 2 + 1, 5]).int()
    assert kernel.alone(C, k)
    assert kernel.levels_of(C, k) == levels
    assert_bitwise(run(scores, visible, k, accelerator), wanted(scores, visible, k))


def test_a_real_row_of_runs_of_runs(accelerator):
    scores = draw(2, 66000, seed=8)
    scores[1, 20000:50000] = scores[1].topk(300).values[-1]
    visible = torch.tensor([66000, 65001]).int()
    assert kernel.levels_of(66000, 512) == 2
    assert_bitwise(run(scores, visible, 512, accelerator), wanted(scores, visible, 512))


def test_refuses(accelerator):
    scores, visible = (
        torch.zeros(2, 5, device=accelerator),
        torch.zeros(2, dtype=torch.int32, device=accelerator),
    )
    for k in (0, kernel.MAX_K + 1):
        with pytest.raises(ValueError, match=f"k = {k}"):
            kernel.index_topk(scores, visible, k)
    with pytest.raises(TypeError, match=r"visible is torch\.int64"):
        kernel.index_topk(scores, visible.long(), 2)
    with pytest.raises(ValueError, match=r"scores is .* strides"):
        kernel.index_topk(torch.zeros(5, 2, device=accelerator).T, visible, 2)


def test_faults_would_show(accelerator):
    scores, visible = tied(9, 200, 7)
    got = run(scores, visible, 8, accelerator)
    assert_bitwise(got, wanted(scores, visible, 8))
    backwards = (
        199 - ref.index_topk(scores.flip(1), torch.full((9,), 200), 8).sort(-1, descending=True).values
    )
    faults = {
        "ties to the larger index": backwards.int(),
        "limit one too far": wanted(scores, visible + 1, 8),
        "NaN last": wanted(scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), visible, 8),
        "one fewer": torch.cat((wanted(scores, visible, 7), torch.full((9, 1), -1).int()), 1),
    }
    for fault in faults.values():
        assert_differs(got, fault)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.build_spec import FLASH
from kernels.index_topk.kernel import builds

for build in builds(FLASH):
    names = build.kernel.arg_names
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    source = ASTSource(build.kernel, signature, constants, {})
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(build.options)).asm["ptx"])
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """What every build compiles to, in a process where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORBIDDEN = {
    "global or generic atomic": r"\b(?:atom|red)\.(?!shared)",
    "wait on another program's write": r"\bld\.(?:volatile|acquire|relaxed)",
    "polling": r"\b(?:nanosleep|membar\.(?:gl|sys)|fence\.(?:acq_rel|sc)\.(?:gpu|sys))",
}


@pytest.mark.xdist_group("index_topk")  # one worker: compiled once
@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_global_atomic_and_no_spin(ptx, what):
    assert ptx.count(".entry") == 6
    assert not re.findall(FORBIDDEN[what], ptx)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("global or generic atomic", "atom.global.acq_rel.gpu.add.u32 %r1, [%rd1], 1;"),
        ("global or generic atomic", "red.add.u32 [%rd1], 1;"),
        ("wait on another program's write", "ld.volatile.global.u32 %r1, [%rd1];"),
        ("wait on another program's write", "ld.acquire.gpu.global.u32 %r1, [%rd1];"),
        ("polling", "nanosleep.u32 64;"),
    ],
)
def test_the_search_finds_what_it_forbids(what, line):
    assert re.findall(FORBIDDEN[what], line)
