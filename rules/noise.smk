# a plan's own dumps -> how far its free runs drift by rounding noise alone.
# It judges nothing: the page draws it beside the free runs of all rungs, so one plan's is enough.


rule noise:
    input:
        manifest="<results>/checkpoint.json",
        reference=expand("<results>/reference/{prompt}.h5", prompt=PROMPTS),
        own=expand("<results>/variants/{variant}/{prompt}.h5", prompt=PROMPTS, allow_missing=True),
        code=code("dsv4.run.noise"),
    output:
        table="<results>/noise/{variant}.parquet",
    log:
        "<logs>/noise/{variant}.log",
    benchmark:
        "<benchmarks>/noise/{variant}.tsv"
    priority: 5  # after the spine, which others wait for; before the leaves, which are shorter
    params:
        plan=plan,
        seed=CONFIG.seed,
    shell:
        'python -m dsv4.run.noise --config "$config" --results "$results" --variant {wildcards.variant}'
        " 2>&1 | tee {log}"
