"""Builds of a small op of this file's own: cache, lock, kill, broken kernels, native or not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("filelock", reason="no filelock: a build takes a lock")
pytest.importorskip("rich", reason="no rich: a build prints a table")

from kernels.build import architecture, check, collect, compile, evidence
from kernels.build.architecture import ARCHITECTURES
from kernels.build.judge import faults, native, remarks
from kernels.build_spec import Build
from kernels.toolchain import select, tool

ROOT = Path(__file__).resolve().parents[2]
KERNELS = """
import triton
import triton.language as tl
from kernels.build_spec import Build

@triton.jit
def shared(x):
    return x + {added}

@triton.jit
def add(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, shared(tl.load(x_ptr + i)))

@triton.jit
def round_trip(x_ptr, high_ptr, low_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.minimum(tl.maximum(tl.load(x_ptr + i), -448.0), 448.0)
    high = x.to(tl.float8e4nv)
    low = (x - high.to(tl.float32)).to(tl.float8e4nv)
    tl.store(high_ptr + i, high)
    tl.store(low_ptr + i, low)

@triton.jit
def dot(a_ptr, b_ptr, c_ptr, WIDEN: tl.constexpr):
    m, k = tl.arange(0, 64)[:, None], tl.arange(0, 64)
    a, b = tl.load(a_ptr + m * 64 + k[None, :]), tl.load(b_ptr + k[None, :] * 64 + k[:, None])
    if WIDEN:
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    tl.store(c_ptr + m * 64 + k[None, :], tl.dot(a, b))

ADD = dict(kernel=add, signature=dict(x_ptr="*fp32", y_ptr="*fp32"), aligned=("x_ptr", "y_ptr"))
TRIP = dict(kernel=round_trip, signature=dict(x_ptr="*fp32", high_ptr="*fp8e4nv", low_ptr="*fp8e4nv"),
    aligned=("x_ptr", "high_ptr", "low_ptr"))
DOT = dict(kernel=dot, signature=dict(a_ptr="*fp8e4nv", b_ptr="*fp8e4nv", c_ptr="*fp32"), native=("fp8",))

def builds(sizes):
    return [{builds}]
"""
ADDS = (
    'Build(name=f"tiny/add/{sizes.name}", constants=dict(BLOCK=1024 if sizes.name == "pro" else 512), **ADD)'
)


@pytest.fixture
def op(tmp_path, monkeypatch):
    """Writes ``tiny_op/kernel.py`` and builds it in a process without the interpreter."""
    (tmp_path / "tiny_op").mkdir()

    def write(*builds: str, added: str = "1.0") -> None:
        text = KERNELS.replace("{added}", added).replace("{builds}", ", ".join(builds))
        (tmp_path / "tiny_op" / "kernel.py").write_text(text)

    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env |= {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(arch: str = "sm_90a", module: str = "tiny_op.kernel", **more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "kernels.build", "--arch", arch, "--module", module]
        command += ["--out", str(tmp_path / "out")]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(*args: str, **more: str) -> tuple[int, dict, str]:
        process = start(*args, **more)
        out, err = process.communicate(timeout=120)
        summary = tmp_path / "out" / (args[0] if args else "sm_90a") / "build.json"
        return process.returncode, json.loads(summary.read_text()) if summary.is_file() else {}, out + err

    write(ADDS)
    run.write, run.start, run.out = write, start, tmp_path / "out"
    return run


def test_a_second_run_compiles_nothing_and_an_edit_of_a_called_function_compiles_again(op):
    code, first, _ = op()
    assert (code, first["compiled"]) == (0, 2)
    row = first["rows"][0]
    assert row["name"] == "tiny/add/flash"
    assert row["state"] == "built"
    assert row["registers"] > 0
    assert (row["spill_store_bytes"], row["stack_bytes"]) == (0, 0)
    for suffix in (".cubin", ".ptx", ".json"):
        assert (op.out / "sm_90a" / f"tiny/add/flash{suffix}").is_file()
    code, second, _ = op()
    assert (code, second["compiled"]) == (0, 0)
    assert second["rows"] == first["rows"]
    op.write(ADDS, added="2.0")
    assert op()[1]["compiled"] == 2


def test_a_repaired_detector_looks_again(tmp_path, monkeypatch):
    build = Build(name="tiny/add/flash", kernel=None, signature={})

    def key():
        return collect.key(build, ARCHITECTURES["sm_90a"], select(), "3.6.0")

    kept = key()
    for reader in collect.READERS:
        copy = tmp_path / reader.name
        copy.write_bytes(reader.read_bytes())
        monkeypatch.setattr(collect, "READERS", [copy if it == reader else it for it in collect.READERS])
        assert key() == kept
        copy.write_bytes(copy.read_bytes() + b"# repaired")
        assert key() != kept
        monkeypatch.undo()
    # a row's facts are made there and in what they import from here, but for the numbers of an architecture
    imported = {module.__name__ for reader in (compile, evidence) for module in of_this_package(reader)}
    assert imported <= {f"kernels.build.{reader.stem}" for reader in collect.READERS}


def of_this_package(module):
    """Modules of kernels.build, other than architecture, whose functions a module uses."""
    names = {getattr(value, "__module__", "") for value in vars(module).values()}
    found = [sys.modules[name] for name in names if (name or "").startswith("kernels.build.")]
    return [it for it in found if it is not architecture]


def test_a_damaged_file_is_made_again_and_a_dropped_build_leaves_no_file(op):
    op()
    cubin = op.out / "sm_90a/tiny/add/flash.cubin"
    whole = cubin.read_bytes()
    cubin.write_bytes(whole[:100])
    assert op()[1]["compiled"] == 1
    assert cubin.read_bytes() == whole
    op.write(ADDS.replace("tiny/add", "tiny/other"))
    op()
    assert not cubin.exists()
    assert (op.out / "sm_90a/tiny/other/flash.cubin").is_file()


def test_builds_that_differ_in_name_alone_are_compiled_once(op):
    same = 'Build(name=f"tiny/same/{sizes.name}", constants=dict(BLOCK=256), **ADD)'
    op.write(same)
    _, summary, said = op()
    assert [row["name"] for row in summary["rows"]] == ["tiny/same/flash", "tiny/same/pro"]
    assert "1/1" in said
    assert {row["compiled_as"] for row in summary["rows"]} == {"tiny/same/flash"}
    assert all(row["state"] == "built" for row in summary["rows"])


def test_two_runs_at_once_both_end_well(op):
    runs = [op.start(), op.start()]
    said = [process.communicate(timeout=120)[1] for process in runs]
    assert [process.returncode for process in runs] == [0, 0]
    assert sorted(" 2 compiled" in text for text in said) == [False, True], said


def test_a_killed_run_leaves_nothing_in_the_way(op):
    op.write(*(ADDS.replace("tiny/add", f"tiny/add{n}").replace("512", str(2 ** (5 + n))) for n in range(6)))
    process = op.start()
    done = op.out / "sm_90a/tiny"
    until = time.monotonic() + 60
    while not list(done.rglob("*.json")):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (op.out / "sm_90a/build.json").exists()
    kept = len(list(done.rglob("*.json")))
    started = time.monotonic()
    code, summary, _ = op()
    assert code == 0
    assert len(summary["rows"]) == 12
    assert all(row["state"] == "built" for row in summary["rows"])
    assert (
        summary["compiled"] <= 12 - kept + 1
    )  # what was whole is kept; its twin in name may have been cut off
    assert time.monotonic() - started < 60
    assert not (op.out / "sm_90a/.work").exists()


def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_built(op):
    op.write(ADDS, 'Build(name=f"tiny/bad/{sizes.name}", constants=dict(BLOCK=100), **ADD)')
    code, summary, said = op()
    assert code == 1
    states = {row["name"]: row["state"] for row in summary["rows"]}
    assert states == {
        f"tiny/{n}/{m}": s for n, s in (("add", "built"), ("bad", "failed")) for m in ("flash", "pro")
    }
    assert "power of 2" in said


def test_a_build_that_does_not_fit_its_kernel_says_which_argument(op):
    op.write('Build(name=f"tiny/add/{sizes.name}", constants=dict(BLOK=64), **ADD)')
    _, summary, _ = op()
    assert summary["rows"][0]["error"] == "tiny/add/flash: left out: BLOCK"


def test_a_broken_module_is_one_failed_row(op):
    (op.out.parent / "tiny_op/kernel.py").write_text("def builds(sizes):\n    return 1 / 0\n")
    code, summary, _ = op()
    assert code == 1
    assert summary["rows"][0]["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_fp8_is_native_on_every_architecture_unless_the_kernel_widens_it(op, arch):
    op.write(
        *(f'Build(name=f"tiny/dot{w}/{{sizes.name}}", constants=dict(WIDEN={w}), **DOT)' for w in (0, 1))
    )
    code, summary, said = op(arch)
    rows = {row["name"]: row for row in summary["rows"]}
    assert native(rows["tiny/dot0/flash"]) == {"fp8": "native"}, rows["tiny/dot0/flash"]["tensor_ptx"]
    assert faults(rows["tiny/dot0/flash"]) == []
    assert faults(rows["tiny/dot1/flash"]) == ["fp8 is not native"]
    assert code == 1
    assert "fp8 is not native" in said
    assert check.main([str(op.out)]) == 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])  # what the disassembler knows
def test_conversions_are_found_as_the_disassembler_shows_them(op, arch):
    """An architecture with another encoding would be seen here: the check must not pass over its conversions."""
    op.write('Build(name=f"tiny/trip/{sizes.name}", constants=dict(BLOCK=1024), **TRIP)')
    op(arch)
    cubin = op.out / arch / "tiny/trip/flash.cubin"
    try:
        sass, why = evidence.disassemble(cubin)
    except FileNotFoundError as error:
        pytest.skip(f"no disassembler: {error}")
    assert sass is not None, why
    shown = [line for line in sass.splitlines() if " F2FP." in line]
    assert any("UNPACK_B" in line for line in shown)
    found = list(evidence.conversions(cubin.read_bytes()))
    assert len(found) == len(shown)
    reading = [
        line for line in shown if {"R1", "R1.H1", "R1.reuse"} & set(line.replace(",", " ").split()[3:])
    ]
    assert sum(map(evidence.may_read_stack_pointer, found)) == len(reading)


def test_a_miscompiled_cast_of_the_bundled_ptxas_is_found(op):
    op.write('Build(name=f"tiny/trip/{sizes.name}", constants=dict(BLOCK=1024), **TRIP)')
    try:
        bundled = tool("ptxas")
    except FileNotFoundError as error:
        pytest.skip(f"no ptxas inside Triton: {error}")
    code, summary, _ = op(TRITON_PTXAS_PATH=str(bundled))
    row = summary["rows"][0]
    assert row["ptxas"]["trusted"] is False
    assert "UNPACK_B" in row["miscompiled_casts"][0]
    assert code == 1
    if not select().trusted:
        pytest.skip("no ptxas 13: nvidia-cuda-nvcc is not installed")
    code, summary, _ = op()  # another ptxas is another key
    assert (code, summary["compiled"]) == (0, 2)
    assert summary["rows"][0]["miscompiled_casts"] == []


ROW = {
    "name": "op/variant/flash",
    "arch": "sm_100a",
    "declares": ["nvfp4"],
    "state": "built",
    "shared_bytes": 1024,
    "tensor_memory_columns": 128,
    "spill_store_bytes": 0,
    "spill_load_bytes": 0,
    "registers": 32,
    "miscompiled_casts": None,
    "warnings": [],
    "ptxas": {"version": "13.0.88", "source": "wheel", "trusted": True},
    "tensor_ptx": {"tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X": 1},
}


MXFP4_120 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale"


def test_nvfp4_must_be_native_on_blackwell_and_is_widened_on_hopper():
    assert faults(ROW) == []
    assert faults(ROW | {"tensor_ptx": {"tcgen05.mma.cta_group::1.kind::f16": 4}}) == ["nvfp4 is not native"]
    hopper = ROW | {"arch": "sm_90a", "tensor_ptx": {}}
    assert faults(hopper) == []
    assert remarks(hopper) == ["nvfp4 widened"]


@pytest.mark.parametrize(
    ("arch", "instruction", "native"),
    [
        ("sm_100a", "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X", True),
        ("sm_103a", "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X", True),
        ("sm_120a", f"{MXFP4_120}.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", True),
        ("sm_120a", f"{MXFP4_120}.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", False),  # NVFP4's
        ("sm_100a", "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X", False),
        ("sm_100a", "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X", False),  # widened
        ("sm_103a", "tcgen05.mma.cta_group::1.kind::f16", False),
        ("sm_120a", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", False),
    ],
)
def test_mxfp4_must_be_native_on_blackwell(arch, instruction, native):
    row = ROW | {"arch": arch, "declares": ["mxfp4"], "tensor_ptx": {instruction: 4}}
    assert faults(row) == ([] if native else ["mxfp4 is not native"])


def test_what_does_not_fit_and_what_spills_is_said():
    assert "of 101376" in faults(ROW | {"arch": "sm_120a", "declares": [], "shared_bytes": 120_000})[0]
    assert faults(ROW | {"tensor_memory_columns": 528}) == ["needs 528 columns of tensor memory of 512"]
    assert remarks(ROW | {"spill_store_bytes": 8, "spill_load_bytes": 4}) == ["spills 12 bytes"]
    bundled = {"version": "12.8.93", "source": "bundled", "trusted": False}
    assert remarks(ROW | {"ptxas": bundled}) == ["ptxas 12.8.93, bundled"]


def test_the_check_of_an_empty_folder_fails(tmp_path, capsys):
    assert check.main([str(tmp_path)]) == 1
    assert "nothing is built" in capsys.readouterr().err
