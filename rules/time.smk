# judged variants -> time of a decode step of each, beside its parent's. Only where variants run on kernels.
# It waits for all verdicts and takes every core: a time needs the GPU and its launches for itself.


rule time:
    input:
        **{variant: before(variant) for variant in VARIANTS},
        asked="<results>/asked.txt",
        code=of_kernels("dsv4.run.times"),
    output:
        times="<results>/times.json",
    log:
        "<logs>/time.log",
    benchmark:
        "<benchmarks>/time.tsv"
    threads: workflow.cores
    params:
        variants=timed,
        plans=plans,
    shell:
        'python -m dsv4.run.times --config "$config" --results "$results" --variants {params.variants}'
        " 2>&1 | tee {log}"
