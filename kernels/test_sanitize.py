"""What is read from the sanitizer's words, and that every op with a kernel has tests to run under it."""

import pytest

from kernels import sanitize

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
        "========= Error: Race reported between Write access at a and Read access at b [64 hazards]\n"
        "3 passed in 2.1s\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    ),
}


def test_every_op_with_a_kernel_has_files_to_run():
    assert {"sparse_attn", "index_topk", "formats"} <= set(sanitize.ops())
    for op in sanitize.ops():
        assert sanitize.files_of(op), op


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_clean_is_clean_and_a_finding_is_not(tool):
    assert sanitize.read("op", tool, CLEAN[tool], 3.0).clean
    found = sanitize.read("op", tool, WRONG[tool], 3.0)
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
    assert not sanitize.read("op", tool, output, 600.0).clean
    assert not sanitize.read("op", tool, output + CLEAN[tool].split("\n")[1] + "\n", 600.0).clean


def test_without_the_tool_it_says_where_it_comes_from(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert sanitize.main([]) == 2
    assert "CUDA toolkit" in capsys.readouterr().err
