# The rules' functions: targets, inputs, params; no rules.


def target():
    """The variant or A/B that this call is about, None for the whole ladder; targets are known after parsing."""
    named = [name for name in workflow.dag_settings.targets or [] if name in TARGETS]
    if len(set(named)) > 1:
        raise WorkflowError(
            f"{', '.join(named)}: one variant a call, since each ends in a page of its own; or {', '.join(WHOLE)}"
        )
    return named[0] if named else None


def about_ladder():
    """Whether this call judges rungs; one that judges commits leaves the page of the last audit alone."""
    return not {"commits", "bisect", "verify_commits"} & set(workflow.dag_settings.targets or [])


def target_option(wildcards):
    """``--target B1``, or nothing for the whole ladder."""
    return f"--target {target()}" if target() else ""


def wanted(wildcards=None):
    """Ids that this call judges: the ladder without what is on request, or a target and its ancestors."""
    return [rung.id for rung in (CONFIG.ladder.about(target()) if target() else CONFIG.ladder.default())]


def asked_for(variant):
    """Whether this call judges a variant: it is wanted, or the whole ladder is and a text asks for the A/B.

    Raises towards Snakemake while texts that may ask are not there.
    """
    if variant in wanted():
        return True
    if target() or variant not in RESIDUALS or any(status(below) != "pass" for below in lineage(variant)):
        return False
    return bool(asking()["asked_by"])


def asking():
    """Texts that ask for the residual's A/B; raises towards Snakemake while they are not known.

    That they are to be looked at again shows only when their rungs are judged, after Snakemake took the file of the
    last run for made. Until it is made again what asked then asks: at worst the A/B runs once more than it need.
    """
    found = checkpoints.repetition.get().output[0]
    try:
        with open(found, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise IncompleteCheckpointException(checkpoints.repetition.rule, checkpoint_target(found))


def lineage(variant):
    """Ids of the variants that this one stands on, bottom first."""
    return [rung.id for rung in CONFIG.ladder.lineage(variant)[:-1]]


def plan(wildcards):
    """The variant's numerics as one value, so that a changed plan reruns just that variant."""
    return json.dumps(flatten(CONFIG.ladder[wildcards.variant].plan))


def engine(wildcards):
    """What runs the variant, so that an edit reruns just the rungs on it: an engine, a commit; "" for the own model."""
    rung = CONFIG.ladder[wildcards.variant]
    if rung.commit:
        return history.resolve(repository(CONFIG), rung.commit)
    return identity(CONFIG.engines[rung.engine]) if rung.engine else ""


def foreign_reference(wildcards):
    """What the foreign reference is and is held to."""
    found = CONFIG.reference
    return f"{identity(found.engine)} {found.of} {found.bound}" if found else ""


def code(module, backend="ref"):
    """Input function: files that a stage runs, without those that only other plans or backends use."""

    def files(wildcards):
        rung = CONFIG.ladder[wildcards.variant]
        return variant_code(module, flatten(rung.plan), backend, commit=bool(rung.commit))

    return files


def sources(wildcards=None):
    """Every source of the tree but tests: a closure may end at any of them."""
    tree = Tree(Path.cwd())
    return sorted(file for file in tree.files if not tree.is_test(file))


def of_kernels(module, part=None):
    """Input function: files that a command runs, over every ``kernels/<op>/<part>.py`` if it is about these."""

    def files(wildcards):
        parts = sorted(Path("kernels").glob(f"*/{part}.py")) if part else []
        modules = [module, *(f"kernels.{path.parent.name}.{part}" for path in parts)]
        return sorted({file for each in modules for file in closure(each)})

    return files


def beside(wildcards):
    """What the page shows of kernels, by content: built and timed on request, so it is no input of a page."""
    paths = [
        *Path("results/build").glob("*/build.json"),
        Path("results/bench.json"),
        Path(RESULTS, "foreign_build.json"),
    ]
    return hashes(paths)


def hashes(paths):
    """Those files that are there, each with its content's hash."""
    found = [path for path in sorted(paths) if path.is_file()]
    return [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in found]


def timed_ops(wildcards):
    """What claims about time rest on, by content: this machine's benchmark and the published one."""
    return hashes([Path("results/bench.json"), Path("docs/bench.json")])


def of_parent(pattern):
    """Input function: the parent's files; nothing at the bottom of the ladder."""

    def files(wildcards):
        parent = CONFIG.ladder[wildcards.variant].parent
        return expand(pattern, variant=parent, prompt=PROMPTS) if parent else []

    return files


def spine_first(wildcards):
    """Priority: the next rung waits for the spine, nothing waits for a leaf."""
    return 10 if CONFIG.ladder[wildcards.variant].spine else 0


def compared(wildcards):
    """Dumps of the variants that this one is compared with by name: itself, its parent, B0."""
    rung = CONFIG.ladder[wildcards.variant]
    named = {rung.id, rung.parent} | ({"B0"} & set(lineage(rung.id)))
    return expand(
        "<results>/variants/{variant}/{prompt}.h5",
        variant=[v for v in VARIANTS if v in named],
        prompt=PROMPTS,
    )


def status(variant):
    """State in the verdict on a variant; raises towards Snakemake while it is not judged."""
    return verdict(variant)["status"]


def verdict(variant):
    """The verdict on a variant; raises towards Snakemake while it is not judged.

    Snakemake asks thousands of times, for every input of every job that waits, each time that a rung is judged.
    """
    found = os.stat(gate_file(variant))
    return read_once(gate_file(variant), found.st_ino, found.st_mtime_ns)


@cache
def gate_file(variant):
    """Where the verdict is; raises towards Snakemake, and is asked again, until that is there for good."""
    return checkpoints.gate.get(variant=variant).output[0]


@cache
def read_once(path, inode, time):
    """A JSON file that is only ever replaced."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def judged(variant):
    """Input function: the variant's verdict and metrics, if it is wanted and all that it stands on passed.

    Above a variant that did not pass it yields nothing, so what stands there is never scheduled.
    """

    def files(wildcards):
        if not asked_for(variant) or any(status(below) != "pass" for below in lineage(variant)):
            return []
        status(variant)
        return [f"{RESULTS}/gates/{variant}.json", f"{RESULTS}/metrics/{variant}.parquet"]

    return files


def before(variant):
    """As :func:`judged`, whatever its age: what is timed is the code and the plan, not the verdict."""
    return lambda wildcards: [ancient(path) for path in judged(variant)(wildcards)]


def timed(wildcards, input):
    """Ids of the variants that were judged, without those on engines or commits: their steps are not timed as ours."""
    rungs = [CONFIG.ladder[path.stem] for path in map(Path, input) if path.parent.name == "gates"]
    return [rung.id for rung in rungs if rung.engine is None and rung.commit is None]


def plans(wildcards, input):
    """Numerics of these variants and of their parents, as one value."""
    lines = [CONFIG.ladder.lineage(variant)[-2:] for variant in timed(wildcards, input)]
    return json.dumps({rung.id: flatten(rung.plan) for line in lines for rung in line}, sort_keys=True)


def spine_plans(wildcards):
    """Numerics of the spine's rungs, as one value."""
    return json.dumps({rung.id: flatten(rung.plan) for rung in CONFIG.ladder.spine()})


def times_on_kernels(wildcards):
    """Times of steps, for verdicts and page; nothing where variants run on refs."""
    return expand("<results>/times.json") if BACKEND == "kernel" else []


def noise_of_baseline(wildcards):
    """Noise of B0's free runs, for the page; nothing where B0 is not judged in this call."""
    return expand("<results>/noise/B0.parquet") if judged("B0")(wildcards) else []


def no_such_target(wildcards):
    """Say what there is; Snakemake alone would only say that no rule makes it."""
    raise WorkflowError(
        f"no variant or target {wildcards.name!r}; variants: {', '.join(VARIANTS)}; targets: {', '.join(WHOLE)},"
        " reference, report, build, bench, commits, bisect, verify_commits"
    )


@cache
def branch():
    """Commits to judge, the branch's fork from the base first, as dsv4.commits.history has them.

    Raises towards Snakemake where base or head are missing, or no such commits.
    """
    asked = CONFIG.commits
    if not (asked.base and asked.head):
        raise WorkflowError("which commits? snakemake commits --config base=main head=my-branch")
    try:
        repo = repository(CONFIG)
        base = history.fork_point(repo, asked.base, asked.head)
        return [history.read(repo, base), *history.commits(repo, asked.base, asked.head)]
    except configuration.ConfigError as error:
        raise WorkflowError(str(error))


def rung_of_commit(sha):
    """Rung whose plan a commit implements; one that its trailer misspells has the default's floor, and says so."""
    named = history.rung_of(repository(CONFIG), sha, default_rung(CONFIG))
    return named if named in CONFIG.ladder else default_rung(CONFIG)


def floor_of_commit(wildcards):
    """Noise floor of a commit's plan; commits of one plan share it."""
    return expand(
        "<results>/floor/{variant}/{prompt}.h5", variant=rung_of_commit(wildcards.sha), prompt=PROMPTS
    )


def plan_of_commit(wildcards):
    """What a commit's verdict rests on beside its code: its plan, and whether it is compared with another commit."""
    plan = flatten(CONFIG.ladder[rung_of_commit(wildcards.sha)].plan)
    return json.dumps([plan, wildcards.sha == branch()[0].sha if CONFIG.commits.base else False])


def shas(wildcards=None):
    """Hashes of the base and of every commit."""
    return [commit.sha for commit in branch()]


def end_of_commits(wildcards):
    """Last file; asks for the commits itself, for Snakemake takes a file that is there when what makes it raises."""
    branch()
    return "<results>/commits.ok"


def verdicts_of_commits(wildcards):
    """Input function: the verdict of the base and of every commit."""
    return expand("<results>/commits/{sha}/verdict.json", sha=shas())


def oldest_first(wildcards):
    """Priority: a commit is compared with the one below it."""
    order = shas()
    return len(order) - order.index(wildcards.sha) if wildcards.sha in order else 0


def floors_of_branch(wildcards):
    """Noise floor of every plan that the branch implements."""
    rungs = dict.fromkeys(rung_of_commit(commit.sha) for commit in branch())
    return expand("<results>/floor/{variant}/{prompt}.h5", variant=rungs, prompt=PROMPTS)


def question(wildcards):
    """What bisect asks of a commit: ``--config tap=topk limit=0.9``."""
    given = workflow.config_settings.config
    asked = {name: given[name] for name in ("tap", "limit", "metric") if given.get(name) is not None}
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in asked.items())
