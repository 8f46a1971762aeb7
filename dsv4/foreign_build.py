"""Build the audited tree (``build.command``): its stale locks are cleared first, its log is kept for the report."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from dsv4.config import Config, ConfigError, load
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.stale_locks import clear

RECORD, LOG_TAIL = "foreign_build.json", 200  # lines


def build(config: Config, results: Path) -> dict[str, object]:
    """Run the command in its folder and write ``foreign_build.json``, whatever its exit status.

    Returns
    -------
    dict
        ``command, folder, exit_status, seconds, locks`` (a line each) and ``log``, its last lines.
    """
    assert config.build is not None
    locks = clear(config.build.folder, config.build.locks)
    for line in locks:
        print(line, flush=True)
    started, log = time.monotonic(), list[str]()
    with subprocess.Popen(
        ["bash", "-c", config.build.command],
        cwd=config.build.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log = [*log[1 - LOG_TAIL :], line.rstrip("\n")]
    record = {
        "schema": 1,
        "command": config.build.command,
        "folder": str(config.build.folder),
        "exit_status": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "locks": locks,
        "log": log,
    }
    write_json(results / RECORD, record)
    return record


def main(argv: list[str] | None = None) -> int:
    """Build and record, exit status 0; with ``--enforce`` judge the record that is there."""
    parser = argparse.ArgumentParser(prog="python -m dsv4.foreign_build", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--enforce", action="store_true", help="exit 1 if the recorded build failed")
    args = parser.parse_args(argv)
    try:
        config = load(args.config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if config.build is None:
        return 0
    if not args.enforce:
        record = build(config, args.results)
        print(
            f"build.command: exit status {record['exit_status']} after {record['seconds']} s", file=sys.stderr
        )
        return 0
    status = json.loads((args.results / RECORD).read_text())["exit_status"]
    if status:
        print(
            f"failed: build.command ended with exit status {status}: {config.build.command}", file=sys.stderr
        )
    return 1 if status else 0


if __name__ == "__main__":
    main_guard(main)
