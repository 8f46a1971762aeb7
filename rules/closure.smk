# sources -> which of them a variant and the workflow reach, which are dead; archived ones must be.


rule closure:
    input:
        code=sources,
    output:
        found="<results>/closure.json",
    log:
        "<logs>/closure.log",
    benchmark:
        "<benchmarks>/closure.tsv"
    priority: -2  # the page alone waits for it: whenever a core has nothing else
    params:
        archived=list(CONFIG.archived),
        plans=json.dumps({rung.id: flatten(rung.plan) for rung in CONFIG.ladder}),
    shell:
        'python -m dsv4.judge.reached --config "$config" --results "$results" 2>&1 | tee {log}'
