# metrics, limits -> a verdict; the verdicts -> exit status.
# A gate is a checkpoint that exits 0 whatever it finds: its verdict decides what is scheduled next, and a
# failed rung must not take the report with it. Only `enforce` fails, at the very end.


checkpoint gate:
    input:
        table="<results>/metrics/{variant}.parquet",
        parent=of_parent(f"{RESULTS}/metrics/{{variant}}.parquet"),
        code=code("dsv4.judge.gate", BACKEND),
    output:
        verdict="<results>/gates/{variant}.json",
    log:
        "<logs>/gate/{variant}.log",
    benchmark:
        "<benchmarks>/gate/{variant}.tsv"
    priority: spine_first
    params:
        tighten=json.dumps(CONFIG.tighten, sort_keys=True),
    shell:
        'python -m dsv4.judge.gate --config "$config" --results "$results" --variant {wildcards.variant}'
        " 2>&1 | tee {log}"


rule enforce:
    input:
        gates="<results>/gates.json",
        page="reports/index.html",
        code=closure("dsv4.judge.enforce"),
    output:
        passed="<results>/enforced.ok",
    log:
        "<logs>/enforce.log",
    params:
        target=target_option,
    shell:
        'python -m dsv4.judge.enforce --results "$results" {params.target} 2>&1 | tee {log}'
