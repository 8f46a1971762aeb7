"""compute-sanitizer over every op's tests: ``python -m kernels.sanitize --out results/sanitizer.json``, on a GPU.

memcheck looks for accesses outside allocations, racecheck for unordered accesses to shared memory. Each op's tests of
its kernels run under both, a part of a file's tests a process, several at a time; what a time limit cuts off is said,
not taken for clean.

racecheck reports a correct hand-over by one thread's arrival at an mbarrier too. So it runs on kernels in which every
thread arrives by itself (kernels/sparse_attn/each_arrival.py); see docs/races.md.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.toolchain import sanitizer, sanitizer_year

ROOT = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"),
}
RAN = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)  # pytest's last line
COUNT = re.compile(r"(\d+) (passed|failed|errors?)")
# what a test that launches a kernel asks for: a fixture of kernels/conftest.py, or a mark
LAUNCHES = re.compile(r"\b(accelerator|on_gpu|on_hopper)\b")
LEFT_OUT = re.compile(r"test_(\w+_)?(faults|races)\.py")
FINDING = re.compile(
    r"^========= (?:Invalid|Error: .*(?:hazard|Race reported)).*\n(?:=========\s+.*?\bat .*\n)*", re.MULTILINE
)
OPTIONS = {
    "memcheck": [],
    # barriers of a block, as Triton's code does not say how many. With 64 the tool itself ended in illegal accesses on
    # attention's Hopper kernels of 16, for grids of several blocks; with 256 all of their tests run to their end
    "racecheck": ["--num-cuda-barriers", "256"],
}
PLUGINS = {"memcheck": [], "racecheck": ["-p", "kernels.sparse_attn.each_arrival"]}
JUDGES = 2026  # the tool's year from which on racecheck finds nothing in a correct hand-over
SHOWN = 20  # findings that a tool prints
MOST = 20  # tests a process


@dataclass(frozen=True)
class Found:
    """What one tool said of a part of a test file.

    Attributes
    ----------
    part : which of how many, "2/3".
    findings : errors (memcheck), or hazards, warnings too (racecheck); None without a summary.
    tests : passed tests; None if they did not end in time.
    first : the first finding; where tests did not end, the last lines that were printed.
    """

    op: str
    file: str
    part: str
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
    """An op's test files that launch a kernel: they ask for the device that kernels run on.

    Not those of planted faults, which run interpreted only, nor races' own, which call the sanitizer.
    """
    return [
        path
        for path in sorted((ROOT / op).glob("test_*.py"))
        if LAUNCHES.search(path.read_text()) and not LEFT_OUT.match(path.name)
    ]


def ops() -> list[str]:
    """Folders that hold a kernel."""
    return sorted({path.parent.name for path in ROOT.glob("*/*kernel.py")})


def parts(files: Sequence[Path], most: int = MOST) -> dict[Path, list[list[str]]]:
    """Each file's tests, by pytest's own names for them, dealt into parts of ``most`` or fewer.

    Raises
    ------
    RuntimeError
        If the files' tests cannot be collected, or a file has none.
    """
    ask = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *map(str, files)]
    said = subprocess.run(ask, capture_output=True, text=True, cwd=ROOT.parent, check=False)
    if said.returncode:
        raise RuntimeError(
            f"sanitize: pytest cannot collect the tests: {(said.stdout + said.stderr)[-2000:]}"
        )
    tests: dict[Path, list[str]] = {file: [] for file in files}
    for name in said.stdout.splitlines():
        file, found, _ = name.partition("::")
        if found:
            tests[ROOT.parent / file].append(name)
    without = [str(file) for file, names in tests.items() if not names]
    if without:
        raise RuntimeError(f"sanitize: no tests in {', '.join(without)}")
    return {file: dealt(names, most) for file, names in tests.items()}


def dealt(names: Sequence[str], most: int) -> list[list[str]]:
    """Hand out in turn, so that neighbours, which take alike long, go to different parts."""
    number = -(-len(names) // most)
    return [list(names[first::number]) for first in range(number)]


def command(tests: Sequence[str], tool: str) -> list[str]:
    """Sanitizer, Python, pytest, the tests."""
    watch = [str(sanitizer()), "--tool", tool, "--print-limit", str(SHOWN), *OPTIONS[tool]]
    return [*watch, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGINS[tool], *tests]


def read(op: str, file: str, part: str, tool: str, output: str, seconds: float) -> Found:
    """The sanitizer's summary and pytest's, from what both printed."""
    summary, ran = SUMMARY[tool].search(output), RAN.search(output)
    counts = {what: int(number) for number, what in COUNT.findall(ran[1] if ran else "")}
    finding = FINDING.search(output)
    if finding:
        first = " ".join(finding[0].replace("=========", "").split())[:200]
    else:
        first = "" if ran else "tests did not end: " + " ".join(output.split())[-300:]
    return Found(
        op=op,
        file=file,
        part=part,
        tool=tool,
        findings=sum(map(int, summary.groups())) if summary else None,
        tests=counts.get("passed") if ran else None,
        failed=sum(counts.get(name, 0) for name in ("failed", "error", "errors")),
        seconds=round(seconds, 1),
        first=first,
    )


def run(op: str, file: str, part: str, tests: Sequence[str], tool: str, limit: float) -> Found:
    """One tool over some tests, for ``limit`` seconds at most."""
    start = time.monotonic()
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # else a block holds what lies beyond a tensor
    child = subprocess.Popen(
        command(tests, tool),
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
    return read(op, file, part, tool, output, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every op is clean under every tool, 1 if not, 2 if nothing ran: no sanitizer, an old one, no tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("results/sanitizer.json"))
    parser.add_argument("--op", action="append", choices=ops(), help="default: every op")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="at a time on the one GPU"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a part of a file and tool")
    options = parser.parse_args(arguments)
    if sanitizer() is None:
        print(
            "sanitize: no compute-sanitizer; it comes with the wheel nvidia-cuda-sanitizer-api or the CUDA toolkit",
            file=sys.stderr,
        )
        return 2
    if sanitizer_year() < JUDGES and "racecheck" in (options.tool or TOOLS):
        print(
            f"sanitize: {sanitizer()} is older than {JUDGES}: its racecheck reports correct hand-overs too; install "
            "nvidia-cuda-sanitizer-api 13.5 or ask for --tool memcheck",
            file=sys.stderr,
        )
        return 2
    try:
        tests = parts([file for op in options.op or ops() for file in files_of(op)])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    work = [
        (file.parent.name, file.name, f"{number}/{len(dealt_out)}", names, tool)
        for tool in options.tool or TOOLS
        for file, dealt_out in tests.items()
        for number, names in enumerate(dealt_out, 1)
    ]
    found: list[Found] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for one in pool.map(lambda item: run(*item, limit=options.limit), work):
            found.append(one)
            print(line(one), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0 if all(one.clean for one in found) else 1


def line(one: Found) -> str:
    """One result in a line."""
    said = f"{one.findings} findings" if one.findings is not None else "no summary: cut off"
    failed = f", {one.failed} failed" if one.failed else ""
    where = f"; {one.first}" if one.first else ""
    return (
        f"{one.tool} {one.op}/{one.file} {one.part}: {'clean' if one.clean else said}{failed}, {one.tests or 0} tests, "
        f"{one.seconds:.0f} s{where}"
    )


if __name__ == "__main__":
    sys.exit(main())
