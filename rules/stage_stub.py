"""Stands in for any stage in the tests of the rules: writes that stage's outputs, new ones every time.

``script.txt`` beside the Snakefile tells it what to do, as a Python literal: ``status`` of variants, those that are
bit-``equal`` to their parents, ``crash`` of [stage, variant] pairs, ``sleep`` seconds of stages, ``repeats``: variants
whose text repeats early; and the ids of the ``prompts``, of the ``spine`` and of each target's ``lineage``.

The tests start hundreds of these, and loading argparse, json and pathlib takes longer than starting Python: so none.
"""

import os
import sys
import time

FOLDER, FILE = os.path.split(__file__)
PACKAGE = os.path.basename(FOLDER)
STAGE = PACKAGE if FILE == "__main__.py" else FILE.removesuffix(".py")
OPTIONS = ["results", "config", "variant", "target", "commit", "base", "head", "repo", "rung"]
OPTIONS += ["tap", "limit", "metric"]  # of bisect


class Options:
    """Arguments of any stage, "" for one that is not given; an unknown one ends the stage."""

    def __init__(self, words: list[str]) -> None:
        self.given = dict.fromkeys(OPTIONS, "")
        self.forced_only, self.variants, left = False, list[str](), list(words)
        while left:
            name = left.pop(0)
            if name == "--forced-only":
                self.forced_only = True
            elif name == "--variants":
                while left and not left[0].startswith("--"):
                    self.variants.append(left.pop(0))
            elif name[:2] == "--" and name[2:] in OPTIONS and left:
                self.given[name[2:]] = left.pop(0)
            else:
                sys.exit(f"{STAGE}: {name!r} of {words}: no such argument, or it has no value")


def write(path: str, text: str = "") -> None:
    """Write ``text``, or something new; by rename, as the stages do."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    part = f"{folder}/.{name}.{time.time_ns()}"
    with open(part, "w") as file:
        file.write(text or f"{STAGE} {time.time_ns()}")
    os.replace(part, path)


def read(path: str) -> str:
    """Return a file's text."""
    with open(path) as file:
        return file.read()


def ids(folder: str, suffix: str) -> list[str]:
    """Names of a folder's files with this suffix, without it, sorted."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix) and name[0] != ".")


def main() -> None:
    """Do what the stage of this file's name would leave behind."""
    options = Options(sys.argv[1:])
    given = options.given
    results, target, variant = given["results"], given["target"], given["variant"] or given["commit"]
    script = eval(read("script.txt"))
    with open("ran.txt", "a") as log:
        log.write(f"{STAGE} {variant}{' forced only' if options.forced_only else ''}\n")
    if [STAGE, variant] in script["crash"]:
        sys.exit(f"{STAGE} {variant}: told to crash")
    print(STAGE, variant, given["tap"], given["limit"], flush=True)
    time.sleep(script["sleep"].get(STAGE, 0))
    if STAGE in ("reference", "variant", "floor"):
        kinds = {"reference": ["reference", "plain"], "variant": ["variants"], "floor": ["floor"]}[STAGE]
        for kind in kinds:
            for prompt in script["prompts"]:
                write(os.path.join(results, kind, variant, f"{prompt}.h5"))
                write(os.path.join(results, kind, variant, f"{prompt}.h5.sha256"))
    elif STAGE == "text_reference":
        write(f"{results}/text/trained.h5")
        write(f"{results}/text/trained.h5.sha256")
    elif STAGE == "text":
        write(f"{results}/text/{variant}.parquet")
        write(f"{results}/text/{variant}.json")
    elif STAGE == "attribute":
        write(f"{results}/text/attribution/{variant}.json")
    elif STAGE == "checkpoint":
        write(f"{results}/checkpoint.json")
    elif STAGE == "reached":
        write(f"{results}/closure.json")
    elif STAGE == "cross_check":
        write(f"{results}/reference_check.json")
    elif STAGE == "measure":
        write(f"{results}/metrics/{variant}.parquet")
    elif STAGE == "noise":
        write(f"{results}/noise/{variant}.parquet")
    elif STAGE == "casts":
        write(f"{results}/casts.json")
    elif STAGE == "report":
        write("reports/index.html", read(f"{results}/gates.json"))
    elif STAGE == "audit":
        write(f"{results}/commits/{variant}/verdict.json" if variant else f"{results}/commits.json")
    elif STAGE == "commits":
        write("reports/commits.html")
    elif STAGE == "enforce" and PACKAGE == "commits":
        if script["status"]:
            sys.exit("commits did not pass")
        write(f"{results}/commits.ok")
    elif STAGE in ("repetition", "residual", "times", "gate", "collect", "enforce"):
        judge(script, results, target, variant, options.variants)


def judge(script: dict, results: str, target: str, variant: str, variants: list[str]) -> None:
    """Do what a stage would that reads or writes JSON which the rules or the tests read."""
    import json

    if STAGE == "repetition":
        asking = [{"variant": name} for name in ids(f"{results}/text", ".json") if name in script["repeats"]]
        write(f"{results}/repetition.json", json.dumps({"asked_by": asking, "at": time.time_ns()}))
    elif STAGE == "residual":
        content = {"texts": ids(f"{results}/text", ".json"), "at": time.time_ns()}
        write(f"{results}/residual.json", json.dumps(content))
    elif STAGE == "times":
        write(f"{results}/times.json", json.dumps(variants))
    elif STAGE == "gate":
        verdict = {"id": variant, "status": script["status"].get(variant, "pass"), "at": time.time_ns()}
        verdict["vs_parent"] = {"bit_equal": variant in script["equal"]}
        write(f"{results}/gates/{variant}.json", json.dumps(verdict))
    elif STAGE == "collect":
        shown = [
            name
            for name in ids(f"{results}/gates", ".json")
            if not target or name in script["lineage"][target]
        ]
        status = {name: json.loads(read(f"{results}/gates/{name}.json"))["status"] for name in shown}
        write(f"{results}/gates.json", json.dumps({"target": target, "status": status}))
        write(f"{results}/metrics.parquet")
        write(f"{results}/claims.json")
    else:
        status = json.loads(read(f"{results}/gates.json"))["status"]
        failed = [name for name in script["spine"] if status.get(name) == "fail"]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
        write(f"{results}/enforced.ok")


if __name__ == "__main__":
    main()
