"""LLVM IR used twice gives what compilations from the source on give, byte for byte; and where it would not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("filelock", reason="no filelock")
pytest.importorskip("rich", reason="no rich")
pytest.importorskip("triton", reason="no triton")

import triton

from kernels.build.architecture import ARCHITECTURES
from kernels.build.sharing import COMPARED, FIRST, Kept, Lowered, common

ROOT = Path(__file__).resolve().parents[2]
OPS = (
    "fp8_quantise",
    "index_key",
    "index_query",
    "rope",
    "swiglu",
)  # FP8 and FP4 casts, maxima, sums, exponentials
OWN = """
import triton
import triton.language as tl
from kernels.build_spec import Build

@triton.jit
def peak(x_ptr, y_ptr):
    tl.store(y_ptr, tl.max(tl.load(x_ptr + tl.arange(0, 32))))

@triton.jit
def dot(a_ptr, b_ptr, c_ptr):
    m, k = tl.arange(0, 64)[:, None], tl.arange(0, 64)
    a, b = tl.load(a_ptr + m * 64 + k[None, :]), tl.load(b_ptr + k[None, :] * 64 + k[:, None])
    tl.store(c_ptr + m * 64 + k[None, :], tl.dot(a, b))

def builds(sizes):
    if sizes.name == "pro":
        return []
    vectors, matrices = dict(x_ptr="*fp32", y_ptr="*fp32"), dict(a_ptr="*bf16", b_ptr="*bf16", c_ptr="*fp32")
    return [
        Build(name="own/peak", kernel=peak, signature=vectors, aligned=tuple(vectors), options=dict(num_warps=1)),
        Build(name="own/dot", kernel=dot, signature=matrices, aligned=tuple(matrices)),
    ]
"""
compared = pytest.mark.skipif(triton.__version__ not in COMPARED, reason="no Triton whose IR was compared")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Way -> (build, architecture) -> row: with the architecture that leaves the others its IR, and without."""
    folder = tmp_path_factory.mktemp("sharing")
    (folder / "own_op").mkdir()
    (folder / "own_op/kernel.py").write_text(OWN)
    modules = [f"--module=kernels.{op}.kernel" for op in OPS] + ["--module=own_op.kernel"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"PYTHONPATH": f"{ROOT}:{folder}", "PYTHONDONTWRITEBYTECODE": "1"}

    def built(way: str, *arches: str) -> None:
        command = [
            sys.executable,
            "-m",
            "kernels.build",
            *modules,
            "--out",
            str(folder / way),
            "--judge-later",
        ]
        command += [f"--arch={arch}" for arch in arches]
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=240)

    built("shared", *ARCHITECTURES)
    built("alone", *(arch for arch in ARCHITECTURES if arch != FIRST))
    return {
        way: {
            (row["name"], row["arch"]): row
            for summary in (folder / way).glob("*/build.json")
            for row in json.loads(summary.read_text())["rows"]
        }
        for way in ("shared", "alone")
    }


@compared
def test_shared_ir_gives_the_files_and_facts_of_a_compilation_of_its_own(rows):
    used = {at for at, row in rows["shared"].items() if row["llvm_ir_of"] != at[1]}
    assert {arch for _, arch in used} == {"sm_103a", "sm_120a", "sm_90a"}
    assert len(used) >= 3 * len(OPS)
    for at, row in rows["alone"].items():
        assert row["state"] == "built", row["error"]
        assert row["llvm_ir_of"] == at[1]
        assert facts(rows["shared"][at]) == facts(row), at


def facts(row):
    """What is the same, files to the byte; but of a product on sm_10x the PTX alone.

    ptxas 13.0 itself makes two cubins of one such PTX: 13 and 11 of 24 runs on own/dot's for sm_103a.
    """
    files = dict(row["sha256"])
    if row["tensor_ptx"] and row["arch"] in ("sm_100a", "sm_103a"):
        del files[".cubin"]
    apart = ("compile_seconds", "llvm_ir_of")
    return {name: value for name, value in row.items() if name not in apart} | {"sha256": files}


@compared
def test_what_an_architecture_lowers_in_a_way_of_its_own_is_not_shared(rows):
    ways = {at: row["llvm_ir_of"] for at, row in rows["shared"].items()}
    assert {arch: ways["own/peak", arch] for arch in ARCHITECTURES} == {arch: arch for arch in ARCHITECTURES}
    assert ways["own/dot", "sm_103a"] == FIRST
    assert {ways["own/dot", arch] for arch in ("sm_120a", "sm_90a")} == {"sm_120a", "sm_90a"}


def test_what_is_common_is_told_by_the_ir():
    assert common("%1 = tt.load", "@llvm.fma.f32") == ("sm_103a", "sm_120a", "sm_90a")
    assert common("%1 = tt.dot_scaled", "@llvm.fma.f32") == ("sm_103a",)
    assert common("%1 = tt.load", "@llvm.nvvm.redux.sync.fmax.NaN") == ()


class Made:
    """What Triton gives back, as far as it is looked at."""

    def __init__(self) -> None:
        self.asm = {"ttir": "tt.load", "llir": "define void @f()", "ptx": ".target sm_100a\n"}
        self.metadata = object()


@compared
def test_another_release_of_triton_shares_nothing_and_no_other_architecture_is_first():
    for arch, release, kept in (
        ("sm_100a", COMPARED[0], True),
        ("sm_100a", "3.9.0", False),
        ("sm_90a", "3.6.0", False),
    ):
        left = Kept()
        left.add(ARCHITECTURES[arch], Made(), release)
        assert bool(left.lowered) == kept
        assert bool(left.fit(ARCHITECTURES["sm_103a"])) == kept


@compared
def test_ir_for_another_assembler_is_not_used():
    kept = Kept(Lowered("define void @f()", ".target sm_100a\n", {}, ("sm_103a",), "99.9"))
    assert kept.fit(ARCHITECTURES["sm_103a"]) is None
