"""What is read from the sanitizer's words, and that every op with a kernel has tests to run under it."""

from subprocess import CompletedProcess

import pytest

from kernels import sanitize, toolchain
from kernels.sparse_attn import each_arrival, hopper_kernel, hopper_softmax_kernel

CLEAN = {
    "memcheck": "3 passed in 2.1s\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "3 passed in 2.1s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
WRONG = {
    "memcheck": (
        "========= Invalid __global__ write of size 4 bytes\n=========     at kernel+0x10\n"
        "3 passed in 2.1s\n========= ERROR SUMMARY: 2 errors\n"
    ),
    "racecheck": (
        "========= Error: Race reported between Write access at a+0x10 in a.py:3 and Read access at a+0x20 in a.py:4\n"
        "3 passed in 2.1s\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    ),
}


def test_every_op_with_a_kernel_has_files_to_run():
    assert {"sparse_attn", "index_topk", "formats"} <= set(sanitize.ops())
    for op in sanitize.ops():
        assert sanitize.files_of(op), op


def test_a_file_is_run_for_what_it_launches_not_for_its_name():
    assert {path.name for path in sanitize.files_of("gather_dequantise")} == {
        "test_gather_dequantise.py",
        "test_gather_nvfp4_kernel.py",
    }
    attention = {path.name for path in sanitize.files_of("sparse_attn")}
    assert {"test_hopper_kernel.py", "test_ranges.py"} <= attention
    assert not attention & {"test_sparse_attn.py", "test_races.py", "test_faults.py", "test_hopper_faults.py"}


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_clean_is_clean_and_a_finding_is_not(tool):
    assert sanitize.read("op", "test_op_kernel.py", "1/1", tool, CLEAN[tool], 3.0).clean
    found = sanitize.read("op", "test_op_kernel.py", "1/1", tool, WRONG[tool], 3.0)
    assert not found.clean
    assert found.findings in (1, 2)
    assert found.first
    assert found.first in sanitize.line(found)


@pytest.mark.parametrize("tool", sanitize.TOOLS)
@pytest.mark.parametrize(
    "output",
    ["", "...", "1 failed, 2 passed in 3s\n", "no tests ran in 0.1s\n"],
    ids=["nothing", "cut off", "failed", "no tests"],
)
def test_what_did_not_run_is_not_clean(tool, output):
    assert not sanitize.read("op", "test_op_kernel.py", "1/1", tool, output, 600.0).clean
    assert not sanitize.read(
        "op", "test_op_kernel.py", "1/1", tool, output + CLEAN[tool].split("\n")[1] + "\n", 600.0
    ).clean


def test_of_tests_that_did_not_end_the_last_words_are_told():
    said = "..F\nFatal Python error: Aborted\n" + CLEAN["racecheck"].split("\n")[1] + "\n"
    found = sanitize.read("op", "f.py", "1/1", "racecheck", said, 3.0)
    assert not found.clean
    assert "tests did not end: ..F Fatal Python error: Aborted" in sanitize.line(found)


def test_the_first_finding_is_told_with_its_accesses():
    hazard = (
        "========= Error: Potential RAW hazard detected at __shared__ 0x1 in block (0,0,0) :\n"
        "=========     Write Thread (1,0,0) at first_kernel+0x10 in a.py:1\n"
        "=========     Read Thread (2,0,0) at first_kernel+0x20 in b.py:2\n========= \n"
    )
    tail = "3 passed in 2.1s\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    said = hazard + hazard.replace("first", "second") + tail
    found = sanitize.read("op", "f.py", "1/1", "racecheck", said, 3.0)
    assert found.findings == 2
    assert "a.py:1" in found.first
    assert "b.py:2" in found.first
    assert "second" not in found.first


def test_each_test_is_in_one_part_and_neighbours_are_not_together():
    names = [f"f.py::test[{number}]" for number in range(61)]
    parts = sanitize.dealt(names, 30)
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert max(map(len, parts)) <= 30
    assert all(names[1] not in part for part in parts if names[0] in part)
    assert sanitize.dealt([], 30) == []


def test_the_parts_are_pytests_own_tests():
    file = sanitize.ROOT / "gather_dequantise" / "test_gather_dequantise.py"
    parts = sanitize.parts([file], most=4)[file]
    assert len(parts) > 1
    assert all(
        name.startswith("kernels/gather_dequantise/test_gather_dequantise.py::test_")
        for part in parts
        for name in part
    )


def test_a_file_that_cannot_be_collected_ends_the_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_none.py").write_text("import there_is_no_such_module\n")
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "sanitizer_year", lambda: sanitize.JUDGES)
    monkeypatch.setattr(sanitize, "files_of", lambda op: [tmp_path / "test_none.py"])
    assert sanitize.main(["--op", "sparse_attn"]) == 2
    assert "there_is_no_such_module" in capsys.readouterr().err


def test_a_file_without_a_test_is_an_error_and_not_clean(monkeypatch):
    said = CompletedProcess([], 0, "kernels/some/test_some.py::test_one\n\n1 test collected in 0.1s\n", "")
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: said)
    some, none = sanitize.ROOT / "some" / "test_some.py", sanitize.ROOT / "none" / "test_none.py"
    assert sanitize.parts([some]) == {some: [["kernels/some/test_some.py::test_one"]]}
    with pytest.raises(RuntimeError, match=r"no tests in .*test_none"):
        sanitize.parts([some, none])


def test_racecheck_runs_with_each_threads_arrival_and_memcheck_on_the_kernel_as_it_is(monkeypatch):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    plugin = "kernels.sparse_attn.each_arrival"
    assert plugin in sanitize.command(["t.py::test"], "racecheck")
    assert plugin not in sanitize.command(["t.py::test"], "memcheck")


def test_by_the_plugin_each_thread_arrives(monkeypatch):
    for module in (hopper_kernel, hopper_softmax_kernel):
        monkeypatch.setattr(module, "ARRIVALS", module.ARRIVALS)
        assert module.ARRIVALS.value == 1
    each_arrival.pytest_configure()
    assert hopper_kernel.ARRIVALS.value == hopper_softmax_kernel.ARRIVALS.value == 128


def test_the_plugin_knows_every_module_that_counts_arrivals():
    """Of one that it missed, kernels would wait for one arrival where 128 come, or the other way about."""
    named = {path.name for path in sanitize.ROOT.glob("*/*kernel.py") if "ARRIVALS" in path.read_text()}
    assert named == {"hopper_kernel.py", "hopper_softmax_kernel.py"}


def test_racecheck_of_a_tool_that_reports_correct_hand_overs_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "sanitizer_year", lambda: 2025)
    assert sanitize.main([]) == 2
    assert "older than 2026" in capsys.readouterr().err


def test_counts_are_pytests_and_not_the_sanitizers():
    text = "59 passed, 2 skipped in 31.0s\n"
    text += "========= RACECHECK SUMMARY: 83 hazards displayed (83 errors, 0 warnings)\n"
    found = sanitize.read("op", "f.py", "1/1", "racecheck", text, 3.0)
    assert (found.tests, found.failed, found.findings) == (59, 0, 83)


def test_without_the_tool_it_says_where_it_comes_from(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main([]) == 2
    assert "CUDA toolkit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "year"), [("Copyright (c) 2020-2026\nVersion 2025.3.1.0 (build 1)", 2025), ("", 0)]
)
def test_the_year_of_the_tool_is_its_versions(tmp_path, monkeypatch, said, year):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(toolchain, "sanitizer", lambda: tool)
    assert toolchain.sanitizer_year() == year


def test_without_the_tool_there_is_no_year(monkeypatch):
    monkeypatch.setattr(toolchain, "sanitizer", lambda: None)
    assert toolchain.sanitizer_year() == 0
