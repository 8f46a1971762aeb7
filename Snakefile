# The audit: checkpoint -> references -> variants and their floors -> metrics -> verdicts -> report.
# `snakemake all` runs the ladder of config.yaml, `snakemake B1` one rung and what it stands on.
from snakemake.utils import min_version

min_version("9.22")  # priorities that depend on the wildcards


include: "rules/common.smk"
include: "rules/functions.smk"
include: "rules/text_functions.smk"


pathvars:
    results=RESULTS,
    logs=f"{RESULTS}/logs",
    benchmarks=f"{RESULTS}/benchmarks",


include: "rules/checkpoint.smk"
include: "rules/reference.smk"
include: "rules/variant.smk"
include: "rules/floor.smk"
include: "rules/noise.smk"
include: "rules/metrics.smk"
include: "rules/gate.smk"
include: "rules/text.smk"
include: "rules/attribution.smk"
include: "rules/residual.smk"
include: "rules/time.smk"
include: "rules/casts.smk"
include: "rules/closure.smk"
include: "rules/report.smk"
include: "rules/build.smk"
include: "rules/bench.smk"
include: "rules/commits.smk"
include: "rules/branch.smk"
include: "rules/targets.smk"


rule all:
    default_target: True
    input:
        "<results>/enforced.ok",
