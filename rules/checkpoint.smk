# model folder -> checkpoint.json: sizes, every tensor's format, every file's hash; written once all checks passed.


rule checkpoint:
    input:
        model=MODEL_FILES,
        code=variant_code("dsv4.run.checkpoint", {}),
    output:
        manifest="<results>/checkpoint.json",
    log:
        "<logs>/checkpoint.log",
    benchmark:
        "<benchmarks>/checkpoint.tsv"
    shell:
        'python -m dsv4.run.checkpoint --config "$config" --results "$results" 2>&1 | tee {log}'
