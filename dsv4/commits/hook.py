"""A git hook that writes a rung's evidence into the commit message.

``python -m dsv4 install-hook`` puts a ``prepare-commit-msg`` hook into a repository. For a commit of
the rung that ``AUDIT_VARIANT`` or ``git config audit.variant`` names it adds the trailers that
``commit-evidence`` prints; without a name it does nothing, nor for a merge or a squash, in the middle of
a rebase, cherry-pick or revert, or where the message has a trailer ``Audit-Variant``. Nor does it where the
staged files are not those that were judged: the files that the rung runs, as they are in this project's folder.
It never stops a commit: what goes wrong is one line on stderr. A hook that is there already is never touched.

A commit may be named too, if what is committed are its files: ``AUDIT_VARIANT=HEAD git commit --amend``
puts the evidence of a commit that was judged into its message.

Git takes a message of trailers alone for a message. So a second hook, ``commit-msg``, ends a commit
whose message is nothing else, as git does with an empty one; it is left out where there is another.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dsv4.code_inputs import ROOT, variant_code
from dsv4.commits import history
from dsv4.commits.evidence import EvidenceError, evidence, lines
from dsv4.commits.history import environment, git
from dsv4.config import Config, ConfigError, backend_of, load, run_id
from dsv4.files import write_whole
from dsv4.plan import flatten

MARK = "# Made by: python -m dsv4 install-hook (--uninstall removes it)"
PREPARE, CHECK = "prepare-commit-msg", "commit-msg"
SHOWN = 3  # files that a refusal names
TRAILERS = "^Audit-[a-z-]* *:"  # in any case, as git reads them
# Git runs these at the top of the work tree, $1 is the message's file and $2 where the message comes from.
SCRIPTS = {
    PREPARE: f"""#!/bin/sh
{MARK}
# Adds the evidence of the rung in AUDIT_VARIANT or `git config audit.variant`; never stops a commit.
variant=${{AUDIT_VARIANT:-$(git config audit.variant)}}
[ -n "$variant" ] || exit 0
case "$2" in merge | squash) exit 0 ;; esac
for state in MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD rebase-merge rebase-apply; do
  [ ! -e "$(git rev-parse --git-path "$state")" ] || exit 0
done
grep -qi '^Audit-Variant *:' "$1" && exit 0
repo=$PWD tree=$(git write-tree)
cd {{root}} && {{python}} -m dsv4.commits.hook {{options}} \\
  --variant "$variant" --repo "$repo" --tree "$tree" "$1" ||
  echo "audit: no evidence of $variant was added, the commit goes on; the hook is $0" >&2
exit 0
""",
    CHECK: f"""#!/bin/sh
{MARK}
# Evidence alone is no message: git shall say so as if it were empty.
text() {{ sed '/^. -* >8 -*$/,$d' "$1" | git stripspace --strip-comments; }}
text "$1" | grep -vi '{TRAILERS}' | grep -q '[^[:space:]]' && exit 0
grep -qi '{TRAILERS}' "$1" || exit 0
echo "audit: the message holds evidence and nothing else; the commit is aborted" >&2
exit 1
""",
}
LINE = (
    'repo=$PWD tree=$(git write-tree) variant=$(git config audit.variant); [ -z "$variant" ] || (cd {root} &&'
    ' {python} -m dsv4.commits.hook {options} --variant "$variant" --repo "$repo" --tree "$tree" "$1") || true'
)


class HookError(ConfigError):
    """A hook that cannot be put in or taken out; names the file and what to do."""


def install(repo: Path, config: Config, results: Path | None = None) -> list[str]:
    """Put the hooks into a repository; return what was done, a line each.

    Raises
    ------
    HookError
        Another ``prepare-commit-msg`` is there.
    ConfigError
        No git repository.
    """
    said = []
    for name, script in SCRIPTS.items():
        path = hook_path(repo, name)
        if not _ours(path) and path.exists():
            if name == PREPARE:
                line = _filled(LINE, config, results)
                raise HookError(
                    f"{path}: another hook is there, and it stays; to add evidence, put this line into it: {line}"
                )
            said.append(
                f"{path}: another hook is there, and it stays; a message of evidence alone is not refused"
            )
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _filled(script, config, results).encode())
        path.chmod(0o755)
        said.append(f"{path}: installed")
    return [
        *said,
        "name the rung with `git config audit.variant B1`, or for one commit with AUDIT_VARIANT=B1",
    ]


def uninstall(repo: Path) -> list[str]:
    """Take the hooks out of a repository; return what was done, a line each."""
    said = []
    for path in (hook_path(repo, name) for name in SCRIPTS):
        if _ours(path):
            path.unlink()
            said.append(f"{path}: removed")
        else:
            said.append(f"{path}: {'another hook, it stays' if path.exists() else 'not there'}")
    return said


def hook_path(repo: Path, name: str) -> Path:
    """Where git looks for a hook, wherever ``core.hooksPath`` leads it.

    Raises
    ------
    ConfigError
        No git repository.
    """
    command = ["git", "-C", str(repo), "rev-parse", "--git-path", f"hooks/{name}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise HookError(f"{repo}: {done.stderr.strip() or 'no git repository'}")
    return (repo / done.stdout.strip()).resolve()


def _ours(path: Path) -> bool:
    return path.is_file() and MARK in path.read_text(errors="replace")


def _filled(script: str, config: Config, results: Path | None) -> str:
    options = ["--config", str(config.path.resolve())]
    options += ["--results", str(results.resolve())] if results else []
    values = {
        "root": shlex.quote(str(ROOT)),
        "python": shlex.quote(sys.executable),
        "options": shlex.join(options),
    }
    for name, value in values.items():
        script = script.replace("{" + name + "}", value)
    return script


def add(message: Path, trailers: Iterable[str]) -> None:
    """Add trailers to a message file, before its comments and its diff.

    Raises
    ------
    ConfigError
        Git refused.
    """
    options = [word for line in trailers for word in ("--trailer", line)]
    git(
        message.parent,
        "interpret-trailers",
        "--in-place",
        "--if-exists",
        "addIfDifferent",
        *options,
        str(message),
    )


def main(arguments: list[str] | None = None) -> int:
    """What the hook runs: add one rung's evidence to a message file; 1 and a line if there is none."""
    parser = argparse.ArgumentParser(description=(main.__doc__ or "").split(";")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--variant", required=True, help="a rung, or a commit whose files are committed again"
    )
    parser.add_argument("--repo", type=Path, required=True, help="where it is committed")
    parser.add_argument("--tree", required=True, help="hash of the files that are committed")
    parser.add_argument("message", type=Path, help="its file, as git names it in that folder")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config)
        results = options.results or Path("results") / run_id(config)
        if options.variant in config.ladder:
            _need_judged_files(config, options)
        else:
            config = _same_files(config, options)
        add(options.repo / options.message, lines(evidence(results, config, options.variant)))
    except Exception as error:  # whatever it is: the commit goes on
        print(f"audit: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


def _need_judged_files(config: Config, options: argparse.Namespace) -> None:
    """Refuse a rung if the files that it runs are staged otherwise than they lie here, or not at all."""
    rung, other = config.ladder[options.variant], "these staged files are not those that were judged"
    if rung.engine or rung.commit:
        raise EvidenceError(f"{other}: {rung.id} runs {rung.engine or rung.commit}, not this project's files")
    files = variant_code("dsv4.run.variant", flatten(rung.plan), backend_of(config).kind)
    judged = dict(zip(files, git(ROOT, "hash-object", "--", *files).split(), strict=True))
    entries = git(options.repo, "ls-tree", "-r", "-z", options.tree).split("\0")
    staged = {
        path: about.split()[-1] for about, _, path in (entry.partition("\t") for entry in entries if entry)
    }
    differ = [file for file in files if staged.get(file) != judged[file]]
    if differ:
        more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise EvidenceError(f"{other}: {', '.join(differ[:SHOWN])}{more}")


def _same_files(config: Config, options: argparse.Namespace) -> Config:
    """The configuration for a commit of the hook's repository, if its files are those that are committed."""
    tree = history.git(
        options.repo, "rev-parse", f"{history.resolve(options.repo, options.variant)}^{{tree}}"
    )
    if tree.strip() != options.tree:
        raise EvidenceError(
            f"{options.variant} holds other files than this commit: commit, audit, then amend the message"
        )
    return replace(config, commits=replace(config.commits, repo=options.repo))


def command(config: Config, options: argparse.Namespace) -> int:
    """Install or remove; says what was done."""
    done = uninstall(options.repo) if options.uninstall else install(options.repo, config)
    print("\n".join(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
