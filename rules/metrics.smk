# dumps of a variant, its parent, B0, both references and its floor, formats of the weights -> one table of
# measurements.


rule measure:
    input:
        dumps=compared,
        references=REFERENCE,
        manifest="<results>/checkpoint.json",
        floor=expand("<results>/floor/{variant}/{prompt}.h5", prompt=PROMPTS, allow_missing=True),
        code=closure("dsv4.judge.measure"),
    output:
        table="<results>/metrics/{variant}.parquet",
    log:
        "<logs>/measure/{variant}.log",
    benchmark:
        "<benchmarks>/measure/{variant}.tsv"
    priority: spine_first
    shell:
        'python -m dsv4.judge.measure --config "$config" --results "$results" --variant {wildcards.variant}'
        " 2>&1 | tee {log}"
