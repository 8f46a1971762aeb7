"""Judge low-precision changes to a DeepSeek-V4 decode path, one change at a time.

The audit itself is `snakemake all` (or one rung: `snakemake B1`); it runs the stages below.

stages, each `python -m NAME --results results/RUN --config config.yaml`:
  dsv4.run.checkpoint    check the checkpoint and list its tensors
  dsv4.run.reference     the two references, `trained` and `plain`
  dsv4.run.variant       run one rung (--variant ID)
  dsv4.run.floor         its noise floor, computed apart (--variant ID)
  dsv4.run.noise         its free run under FP32 noise, for the page (--variant ID)
  dsv4.run.text_reference the reference's own texts, which a rung is forced along
  dsv4.run.text          a rung's forced text, and its own (--variant ID)
  dsv4.attribute         which op of which layer moved it (--variant ID)
  dsv4.judge.measure     its metrics table (--variant ID)
  dsv4.judge.gate        its verdict (--variant ID)
  dsv4.casts             what the decode path casts, and what became of each
  dsv4.run.times         on a GPU, the time of a decode step (--variants ID ...)
  dsv4.judge.reached     which code a variant and the workflow reach, and which is dead
  dsv4.judge.repetition  which rungs' texts repeat earlier than the reference's own
  dsv4.judge.residual    what the A/B with an FP32 residual says
  dsv4.judge.collect     all verdicts and metrics in one file each
  dsv4.report            the page, reports/index.html
  dsv4.judge.enforce     exit 1 if a spine rung did not pass
  dsv4.commits.audit     verdicts of commits, each on its own code (--base REV --head REV, or --commit SHA)
  dsv4.report.commits    their page, reports/commits.html
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dsv4 import preflight, salvage
from dsv4.closure import command as closure
from dsv4.config import Config, ConfigError, load, run_id
from dsv4.generate.options import OPTIONS as GENERATE_OPTIONS
from dsv4.prompts import load_prompts, with_taps


def _check(config: Config, _: argparse.Namespace) -> int:
    tokens = preflight.check(config)
    print(f"run {run_id(config)}: {sum(tokens.values())} tokens in {len(tokens)} prompts")
    for prompt in load_prompts(config.prompts):
        more = [f"{config.decode_steps} decode steps"] if prompt.has_taps else []
        more += [f"up to {config.text_tokens} of text"] if prompt.has_text else []
        print(f"  {prompt.id:<12} {tokens[prompt.id]:>5} tokens + {', '.join(more)}")
    return 0


def _ladder(config: Config, _: argparse.Namespace) -> int:
    for variant in config.ladder:
        change = ", ".join(f"{field}: {old} -> {new}" for field, (old, new) in variant.change.items())
        kind = "on request" if variant.on_request else "spine" if variant.spine else "leaf"
        print(
            f"{variant.id:<14} {kind:<10} on {variant.parent or '-':<12} {change or 'bottom of the ladder'}"
        )
    return 0


def _unlock(_: Config, __: argparse.Namespace) -> int:
    if done := preflight.unlock(Path.cwd()):
        print(done, file=sys.stderr)
    return 0


def _salvage(config: Config, arguments: argparse.Namespace) -> int:
    if done := salvage.salvage(arguments.results, config, with_taps(config.prompts), arguments.target):
        print(done, file=sys.stderr)
    return 0


def _casts(config: Config, arguments: argparse.Namespace) -> int:
    from dsv4.casts import command  # no other command needs it, nor what it needs

    return command.run(config, arguments)


def _closure(config: Config | None, arguments: argparse.Namespace) -> int:
    globs = [*arguments.archived, *(config.archived if config else ())]
    return closure.run(arguments.entries, arguments.root, globs, arguments.json)


def _commit_evidence(config: Config, arguments: argparse.Namespace) -> int:
    from dsv4.commits import evidence  # here and below: what no other command needs

    return evidence.command(config, arguments)


def _install_hook(config: Config, arguments: argparse.Namespace) -> int:
    from dsv4.commits import hook

    return hook.command(config, arguments)


def _bisect_step(config: Config, arguments: argparse.Namespace) -> int:
    from dsv4.commits import bisect

    return bisect.step(config, arguments)


def _generate(config: Config, arguments: argparse.Namespace) -> int:
    from dsv4.generate import command  # torch, and the model

    return command.run(config, arguments)


Option = tuple[str, dict[str, Any]]
REPO: Option = (
    "--repo",
    {"type": Path, "default": Path(), "help": "the audited repository (default: this folder)"},
)
RESULTS: Option = ("--results", {"type": Path, "help": "folder of the run (default: results/<run>)"})


class Command(NamedTuple):
    """What a command does, in a line; and what it takes beside ``--config``."""

    run: Callable[[Any, argparse.Namespace], int]
    text: str
    options: tuple[Option, ...] = ()
    of_any_tree: bool = False  # which may have no configuration: none is read unless it is named
    failed: int = 1  # exit status where it cannot start


COMMANDS = {
    "check": Command(_check, "check configuration, prompts and checkpoint files; run nothing"),
    "ladder": Command(_ladder, "list the rungs and what each changes"),
    "unlock": Command(_unlock, "remove the locks of a Snakemake that was killed, if none lives"),
    "salvage": Command(
        _salvage,
        "render the report from the verdicts that are there, after a crash",
        (("--results", {"type": Path, "required": True}), ("--target", {})),
    ),
    "casts": Command(
        _casts,
        "list the casts of a tree that cost memory traffic, and what became of each",
        (
            ("paths", {"nargs": "*", "type": Path, "help": "default: what a plan runs, or the whole tree"}),
            ("--root", {"type": Path, "default": Path(), "help": "the tree (default: this folder)"}),
            ("--json", {"type": Path, "help": "also write the list here"}),
        ),
    ),
    "closure": Command(
        _closure,
        "list which files of a tree its entry points reach, and which are dead",
        closure.OPTIONS,
        of_any_tree=True,
    ),
    "commit-evidence": Command(
        _commit_evidence,
        "print the git trailers of a rung, or of a commit, that was judged",
        (("name", {"help": "a rung of the ladder, or a commit"}), RESULTS),
    ),
    "install-hook": Command(
        _install_hook,
        "let git add the trailers of the rung in `git config audit.variant`",
        (REPO, ("--uninstall", {"action": "store_true", "help": "remove it again"})),
    ),
    "bisect-step": Command(
        _bisect_step,
        "for `git bisect run`: exit 0 if HEAD is good, 1 if bad, 125 if that is open",
        (
            REPO,
            RESULTS,
            ("--tap", {"help": "a tap or a stage (default: the gate as a whole)"}),
            ("--limit", {"type": float, "help": "bound of a number of this tap, in every layer"}),
            ("--metric", {"help": "which number (default: by the kind of tap)"}),
        ),
        failed=125,  # which git bisect takes for neither
    ),
    "generate": Command(
        _generate,
        "continue a text or a chat with the reference or a rung; all prompts as one batch by default",
        GENERATE_OPTIONS,
    ),
}


def main() -> int:
    """Run one command; a mistake in the configuration is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(
        prog="python -m dsv4", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.text, description=command.text)
        own.add_argument("--config", type=Path, default=None if command.of_any_tree else Path("config.yaml"))
        for option, how in command.options:
            own.add_argument(option, **how)
    try:
        arguments = parser.parse_args()
    except SystemExit as stop:
        named = COMMANDS.get((sys.argv[1:2] or [""])[0])
        sys.exit(named.failed if stop.code and named and named.failed != 1 else stop.code)
    try:
        config = load(arguments.config) if arguments.config else None
        return COMMANDS[arguments.command].run(config, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return COMMANDS[arguments.command].failed


if __name__ == "__main__":
    sys.exit(main())
