# the code of the decode path, and one of its steps without a device -> every cast, and what became of it.
# It judges no rung: what is open is on the page, and `python -m dsv4 casts` exits 1 for it.


rule casts:
    input:
        model=f"{CONFIG.checkpoint}/config.json",
        code=of_kernels("dsv4.casts", "kernel"),
    output:
        casts="<results>/casts.json",
    log:
        "<logs>/casts.log",
    benchmark:
        "<benchmarks>/casts.tsv"
    priority: -1  # the page alone waits for it: whenever a core has nothing else
    params:
        spine=spine_plans,
    shell:
        'python -m dsv4.casts --config "$config" --results "$results" 2>&1 | tee {log}'
