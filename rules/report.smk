# verdicts, metrics -> one file each -> the page.
# The report shows the last audit that was asked for: the whole ladder, or one rung and its ancestors.


# While a verdict is missing, Snakemake asks nothing else of the job that waits for it (its checkpoint may change its
# inputs); so `collect` would not notice a variant that was added, or another target. It notices this file.
rule ask:
    output:
        variants="<results>/asked.txt",
    log:
        "<logs>/ask.log",
    params:
        variants=wanted,
    shell:
        "printf '%s\\n' {params.variants} > {output.variants} 2> {log}"


rule collect:
    input:
        **{variant: judged(variant) for variant in VARIANTS},
        **{f"text_{variant}": texted(variant) for variant in VARIANTS},
        **{f"attribution_{variant}": attributed(variant) for variant in VARIANTS},
        texts=reference_texts,
        asked="<results>/asked.txt",
        manifest="<results>/checkpoint.json",
        times=times_on_kernels,
        reference="<results>/reference_check.json" if CONFIG.reference else [],
        residual=about_residual,
        claims="data/claims.yaml",
        config=str(CONFIG.path),
        code=closure("dsv4.judge.collect"),
    output:
        gates="<results>/gates.json",
        table="<results>/metrics.parquet",
        claims="<results>/claims.json",
    log:
        "<logs>/collect.log",
    benchmark:
        "<benchmarks>/collect.tsv"
    params:
        timed=timed_ops,
        target=target_option,
    shell:
        'python -m dsv4.judge.collect --config "$config" --results "$results" {params.target} 2>&1 | tee {log}'


rule report:
    input:
        gates="<results>/gates.json",
        table="<results>/metrics.parquet",
        claims="<results>/claims.json",
        closure="<results>/closure.json",
        noise=noise_of_baseline,
        residual=about_residual,
        casts="<results>/casts.json",
        code=closure("dsv4.report"),
    output:
        page="reports/index.html",
    log:
        "<logs>/report.log",
    benchmark:
        "<benchmarks>/report.tsv"
    params:
        run=RUN,
        kernels=beside,
        target=target_option,
    shell:
        'python -m dsv4.report --config "$config" --results "$results" {params.target} 2>&1 | tee {log}'
