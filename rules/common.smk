# Checked configuration, what every stage is given, and what happens before and after a run; no rules.
import hashlib
import json
import os
import secrets
import shlex
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import IncompleteCheckpointException, WorkflowError
from snakemake.io import checkpoint_target

from dsv4 import config as configuration
from dsv4 import preflight
from dsv4.closure.tree import Tree
from dsv4.code_inputs import closure, variant_code
from dsv4.commits import history
from dsv4.commits.branch import default_rung, pinned, repository
from dsv4.engine.spec import identity
from dsv4.judge.limits import LimitError, tightened
from dsv4.ladder import B5
from dsv4.plan import flatten
from dsv4.prompts import load_prompts, with_taps, with_text

try:
    FILE = configuration.load(([*workflow.configfiles] or ["config.yaml"])[-1])  # what the stages read
    CONFIG = pinned(
        configuration.with_options(FILE, workflow.config_settings.config)
    )  # and which commits: --config
    VARIANTS = [variant.id for variant in CONFIG.ladder]
    RESIDUALS = [variant.id for variant in CONFIG.ladder.residuals()]  # the A/B of `snakemake B5`
    AB = [B5] if RESIDUALS and B5 not in VARIANTS else []
    WHOLE, TARGETS = ["all", *AB], [*VARIANTS, *AB]  # about several rungs; not about all
    preflight.check(CONFIG)
    # The prompts with taps name the run, so that no rule of theirs has the file among its inputs; texts are made anew
    # within a run (text_prompts).
    PROMPTS, TEXTS = with_taps(CONFIG.prompts), with_text(CONFIG.prompts)
    tightened(CONFIG.tighten)
    RUN = configuration.run_id(CONFIG)
    BACKEND = configuration.backend_of(CONFIG).kind
    RESULTS = f"results/{RUN}"
    MODEL_FILES = [str(path) for path in configuration.checkpoint_files(CONFIG.checkpoint)]
except (configuration.ConfigError, LimitError) as error:
    raise WorkflowError(str(error))

# Stages run under Snakemake's own interpreter, also when its environment is not activated. What all of them take
# comes as shell variables: a param would rerun everything when a file is only called by another name.
# `python -m …` is a fork of a process that has loaded torch, pandas and the like (onstart, below), or where there is
# none Python itself. Of a fork Snakemake's benchmark sees the wall time; its memory and CPU time are the client's.
shell.prefix(
    "set -euo pipefail;"  # Snakemake's own prefix, which this one replaces
    f" PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH;"
    # glibc gives large blocks back at once and takes them again: a fifth of a stage's time in page faults.
    " export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000;"
    f" config={shlex.quote(str(CONFIG.path))}; results={RESULTS};"
    f" commits=({shlex.join(CONFIG.commits.words)});"
    ' python() ( exec python -IS rules/fork_client.py "$@" ); '
)


wildcard_constraints:
    variant="|".join(VARIANTS),


FORKED_FROM = 5  # jobs: loading the libraries takes 3 to 4 s once, and saves a stage 1 to 3


# Snakemake's limit on jobs a second wakes its scheduler again and again for every job that ever ended, each time to look
# at every input of every waiting job: a quarter of a core over an audit. Without it, it wakes when a job ends.
onstart:
    if hasattr(workflow.scheduler, "job_rate_limiter"):
        workflow.scheduler.job_rate_limiter = None
    preflight.check_disk(Path(RESULTS))
    preflight.point_latest(Path(RESULTS))
    if sys.platform == "linux" and len(list(workflow.dag.needrun_jobs())) >= FORKED_FROM:
        os.environ.update(DSV4_FORK_SERVER=f"dsv4-{os.getpid()}-{secrets.token_hex(4)}")
        shell('command python -P rules/fork_server.py "$DSV4_FORK_SERVER" $PPID || true')


onerror:
    option = target_option(None)
    if about_ladder():
        shell('python -m dsv4 salvage --config "$config" --results "$results" {option}')
