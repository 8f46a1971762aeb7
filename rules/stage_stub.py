"""Stands in for any stage in the tests of the rules: writes that stage's outputs, new ones every time.

``script.json`` beside the Snakefile tells it what to do: ``status`` of variants, those that are bit-``equal`` to their
parents, ``crash`` of [stage, variant] pairs, ``sleep`` seconds of stages, ``repeats``: variants whose text repeats
early; and the ids of the ``prompts``, of the ``spine`` and of each target's ``lineage``.
"""

import argparse
import json
import sys
import time
from pathlib import Path

FILE = Path(__file__)
STAGE = FILE.parent.name if FILE.stem == "__main__" else FILE.stem


def write(path: Path, text: str = "") -> None:
    """Write ``text``, or something new; by rename, as the stages do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{time.time_ns()}")
    part.write_text(text or f"{STAGE} {time.time_ns()}")
    part.replace(path)


def main() -> None:
    """Do what the stage of this file's name would leave behind."""
    parser = argparse.ArgumentParser()
    for name in ("results", "config", "variant", "target", "commit", "base", "head", "repo", "rung"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--forced-only", action="store_true")
    for name in ("tap", "limit", "metric"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--variants", nargs="*", default=[])
    options = parser.parse_args()
    results, variant = Path(options.results), options.variant or options.commit
    script = json.loads(Path("script.json").read_text())
    with Path("ran.txt").open("a") as log:
        log.write(f"{STAGE} {variant}{' forced only' if options.forced_only else ''}\n")
    if [STAGE, variant] in script["crash"]:
        sys.exit(f"{STAGE} {variant}: told to crash")
    print(STAGE, variant, options.tap, options.limit, flush=True)
    time.sleep(script["sleep"].get(STAGE, 0))
    if STAGE in ("reference", "variant", "floor"):
        kinds = {"reference": ["reference", "plain"], "variant": ["variants"], "floor": ["floor"]}[STAGE]
        for kind in kinds:
            for prompt in script["prompts"]:
                write(results / kind / variant / f"{prompt}.h5")
                write(results / kind / variant / f"{prompt}.h5.sha256")
    elif STAGE == "text_reference":
        write(results / "text/trained.h5")
        write(results / "text/trained.h5.sha256")
    elif STAGE == "text":
        write(results / f"text/{variant}.parquet")
        write(results / f"text/{variant}.json")
    elif STAGE == "attribute":
        write(results / f"text/attribution/{variant}.json")
    elif STAGE == "checkpoint":
        write(results / "checkpoint.json")
    elif STAGE == "reached":
        write(results / "closure.json")
    elif STAGE == "cross_check":
        write(results / "reference_check.json")
    elif STAGE == "measure":
        write(results / "metrics" / f"{variant}.parquet")
    elif STAGE == "repetition":
        texts = [path.stem for path in sorted((results / "text").glob("*.json"))]
        asking = [{"variant": name} for name in texts if name in script["repeats"]]
        write(results / "repetition.json", json.dumps({"asked_by": asking, "at": time.time_ns()}))
    elif STAGE == "residual":
        texts = sorted(path.stem for path in (results / "text").glob("*.json"))
        write(results / "residual.json", json.dumps({"texts": texts, "at": time.time_ns()}))
    elif STAGE == "noise":
        write(results / "noise" / f"{variant}.parquet")
    elif STAGE == "times":
        write(results / "times.json", json.dumps(options.variants))
    elif STAGE == "gate":
        verdict = {"id": variant, "status": script["status"].get(variant, "pass"), "at": time.time_ns()}
        verdict["vs_parent"] = {"bit_equal": variant in script["equal"]}
        write(results / "gates" / f"{variant}.json", json.dumps(verdict))
    elif STAGE == "collect":
        verdicts = [json.loads(path.read_text()) for path in sorted((results / "gates").glob("*.json"))]
        if options.target:
            verdicts = [verdict for verdict in verdicts if verdict["id"] in script["lineage"][options.target]]
        content = {"target": options.target, "status": {v["id"]: v["status"] for v in verdicts}}
        write(results / "gates.json", json.dumps(content))
        write(results / "metrics.parquet")
        write(results / "claims.json")
    elif STAGE == "casts":
        write(results / "casts.json")
    elif STAGE == "report":
        write(Path("reports/index.html"), (results / "gates.json").read_text())
    elif STAGE == "audit":
        write(results / ("commits.json" if not options.commit else f"commits/{options.commit}/verdict.json"))
    elif STAGE == "commits":
        write(Path("reports/commits.html"))
    elif STAGE == "enforce" and FILE.parent.name == "commits":
        if script["status"]:
            sys.exit("commits did not pass")
        write(results / "commits.ok")
    elif STAGE == "enforce":
        status = json.loads((results / "gates.json").read_text())["status"]
        failed = [name for name in script["spine"] if status.get(name) == "fail"]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
        write(results / "enforced.ok")


if __name__ == "__main__":
    main()
