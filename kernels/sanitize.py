"""compute-sanitizer over every op's tests: ``python -m kernels.sanitize --out results/sanitizer.json``, on a GPU.

memcheck looks for accesses outside allocations, racecheck for unordered accesses to shared memory. Each op's tests of
its kernels run under both, several files at a time; what a time limit cuts off is said, not taken for clean.

racecheck reports correct hand-overs by one thread's arrival at an mbarrier too; what is reported between two accesses
of a Gluon kernel, the ones that hand over so, is counted apart and judged in kernels/sparse_attn/test_races.py. See
docs/races.md.
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

from kernels.toolchain import sanitizer

ROOT = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard\w* displayed \((\d+) error"),
}
RAN = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)  # pytest's last line
COUNT = re.compile(r"(\d+) (passed|failed|errors?)")
# a hazard's first line, and those below it that name its accesses
HAZARD = re.compile(
    r"^========= Error: .*?(?:hazard|Race reported).*\n(?:=========\s.*? at \w+\+0x.*\n)*", re.MULTILINE
)
IN_KERNEL = re.compile(r" at (\w+)\+0x")
# what a test that launches a kernel asks for: a fixture of kernels/conftest.py, or a mark
LAUNCHES = re.compile(r"\b(accelerator|on_gpu|on_hopper)\b")
LEFT_OUT = re.compile(r"test_(\w+_)?(faults|races)\.py")
SHOWN = 100  # findings that a tool prints


@dataclass(frozen=True)
class Found:
    """What one tool said of one test file.

    Attributes
    ----------
    findings : errors (memcheck) or hazards that are errors (racecheck); None without a summary.
    hand_overs : the hazards among them that were shown and lie inside a Gluon kernel.
    others : shown findings that do not.
    tests : passed tests; None if they did not end in time.
    first : the first of the others, else the first finding.
    """

    op: str
    file: str
    tool: str
    findings: int | None
    hand_overs: int
    others: int
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


def gluon_kernels() -> frozenset[str]:
    """Names of the kernels that are written in Gluon."""
    files = (path.read_text() for path in ROOT.glob("*/*kernel.py"))
    return frozenset(
        name for text in files if "experimental.gluon" in text or "experimental import gluon" in text
        for name in re.findall(r"@gluon\.jit[^\n]*\ndef (\w+)", text)
    )  # fmt: skip


def command(file: Path, tool: str) -> list[str]:
    """Sanitizer, Python, pytest, the file."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    return [str(sanitizer()), "--tool", tool, "--print-limit", str(SHOWN), sys.executable, *tests]


def read(op: str, file: str, tool: str, output: str, seconds: float) -> Found:
    """The sanitizer's summary and pytest's, from what both printed."""
    summary, ran = SUMMARY[tool].search(output), RAN.search(output)
    counts = {what: int(number) for number, what in COUNT.findall(ran[1] if ran else "")}
    gluon = gluon_kernels()
    hazards = HAZARD.findall(output) if tool == "racecheck" else []
    inside = [one for one in hazards if {*IN_KERNEL.findall(one)} and {*IN_KERNEL.findall(one)} <= gluon]
    wrong = [one for one in output.splitlines() if one.startswith("========= Invalid")] + [
        one for one in hazards if one not in inside
    ]
    return Found(
        op=op,
        file=file,
        tool=tool,
        findings=int(summary.groups()[-1]) if summary else None,
        hand_overs=len(inside),
        others=len(wrong),
        tests=counts.get("passed") if ran else None,
        failed=sum(counts.get(name, 0) for name in ("failed", "error", "errors")),
        seconds=round(seconds, 1),
        first=" ".join(next(iter([*wrong, *inside]), "").replace("=========", "").split())[:200],
    )


def run(op: str, file: Path, tool: str, limit: float) -> Found:
    """One tool over one file's tests, for ``limit`` seconds at most."""
    start = time.monotonic()
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # else a block holds what lies beyond a tensor
    child = subprocess.Popen(
        command(file, tool),
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
    return read(op, file.name, tool, output, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every op is clean under every tool, 1 if not, 2 without a GPU or the sanitizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("results/sanitizer.json"))
    parser.add_argument("--op", action="append", choices=ops(), help="default: every op")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="at a time on the one GPU"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a file and tool")
    options = parser.parse_args(arguments)
    if sanitizer() is None:
        print(
            "sanitize: no compute-sanitizer; it comes with the wheel nvidia-cuda-sanitizer-api or the CUDA toolkit",
            file=sys.stderr,
        )
        return 2
    work = [
        (op, file, tool)
        for tool in options.tool or TOOLS
        for op in options.op or ops()
        for file in files_of(op)
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
    said = [f"{one.findings} findings" if one.findings is not None else "no summary: cut off"]
    if one.clean:
        said = ["clean"]
    if one.hand_overs:
        said.append(f"{one.hand_overs} shown at mbarrier hand-overs, {one.others} elsewhere")
    if one.failed:
        said.append(f"{one.failed} failed")
    said.append(f"{one.tests or 0} tests, {one.seconds:.0f} s")
    where = "" if one.clean or not one.first else f"; {one.first}"
    return f"{one.tool} {one.op}/{one.file}: {', '.join(said)}{where}"


if __name__ == "__main__":
    sys.exit(main())
