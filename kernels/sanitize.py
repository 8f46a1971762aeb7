"""compute-sanitizer over every op's tests: ``python -m kernels.sanitize --out results/sanitizer.json``, on a GPU.

memcheck looks for accesses outside allocations, racecheck for unordered accesses to shared memory. Each op's tests of
its kernels run under both, several ops at a time; what a time limit cuts off is said, not taken for clean.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard\w* displayed \((\d+) error"),
}
RAN = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True)
class Found:
    """What one tool said of one op.

    Attributes
    ----------
    findings : errors (memcheck) or hazards that are errors (racecheck); None without a summary.
    tests : passed tests; None if they did not end in time.
    first : the first finding's line.
    """

    op: str
    tool: str
    findings: int | None
    tests: int | None
    failed: int
    seconds: float
    first: str

    @property
    def clean(self) -> bool:
        """All tests ran, passed, and nothing was found."""
        return self.findings == 0 and bool(self.tests) and not self.failed


def files_of(op: str) -> list[Path]:
    """Test files of an op's kernels."""
    named = sorted((ROOT / op).glob("test_*kernel*.py"))
    return named or sorted((ROOT / op).glob("test_*.py"))


def ops() -> list[str]:
    """Folders that hold a kernel."""
    return sorted({path.parent.name for path in ROOT.glob("*/*kernel.py")})


def command(op: str, tool: str) -> list[str]:
    """Sanitizer, Python, pytest, the op's files."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files_of(op))]
    return ["compute-sanitizer", "--tool", tool, "--print-limit", "5", sys.executable, *tests]


def read(op: str, tool: str, output: str, seconds: float) -> Found:
    """The sanitizer's summary and pytest's, from what both printed."""
    summary = SUMMARY[tool].search(output)
    counts = {what: int(number) for number, what in RAN.findall(output)}
    first = next((line for line in output.splitlines() if line.startswith("========= Error: ")), "")
    if not first:
        wrong = ("Invalid", "Race", "hazard", "Potential")
        lines = (line for line in output.splitlines() if line.startswith("========= "))
        first = next(
            (line for line in lines if any(word in line for word in wrong) and "SUMMARY" not in line), ""
        )
    return Found(
        op=op,
        tool=tool,
        findings=int(summary.groups()[-1]) if summary else None,
        tests=counts.get("passed"),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        seconds=round(seconds, 1),
        first=first.removeprefix("========= ").strip()[:200],
    )


def run(op: str, tool: str, limit: float) -> Found:
    """One tool over one op's tests, for ``limit`` seconds at most."""
    start = time.monotonic()
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # else a block holds what lies beyond a tensor
    child = subprocess.Popen(
        command(op, tool),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT.parent,
        env=environment,
        start_new_session=True,  # so that the tests below the sanitizer end with it
    )
    try:
        output, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
    return read(op, tool, output, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every op is clean under every tool, 1 if not, 2 without a GPU or the sanitizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("results/sanitizer.json"))
    parser.add_argument("--op", action="append", choices=ops(), help="default: every op")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="at a time on the one GPU"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds an op and tool")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: no compute-sanitizer on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    work = [(op, tool) for tool in options.tool or TOOLS for op in options.op or ops()]
    found: list[Found] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for one in pool.map(lambda item: run(item[0], item[1], options.limit), work):
            found.append(one)
            print(line(one), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0 if all(one.clean for one in found) else 1


def line(one: Found) -> str:
    """One result in a line."""
    findings = "no summary" if one.findings is None else f"{one.findings} findings"
    tests = "cut off" if one.tests is None else f"{one.tests} tests"
    state = "clean" if one.clean else f"{findings}, {one.failed} failed" if one.tests else findings
    return (
        f"{one.tool} {one.op}: {state}; {tests}, {one.seconds:.0f} s{f'; {one.first}' if one.first else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
