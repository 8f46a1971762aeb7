# reference dumps -> a plan's noise floor, computed without the ops under test.
# It reads the floor of the variant below for the stages that the change leaves alone.


rule floor:
    input:
        manifest="<results>/checkpoint.json",
        reference=expand("<results>/reference/{prompt}.h5", prompt=PROMPTS),
        parent=of_parent(f"{RESULTS}/floor/{{variant}}/{{prompt}}.h5"),
        code=code("dsv4.run.floor"),
    output:
        dumps=expand("<results>/floor/{variant}/{prompt}.h5", prompt=PROMPTS, allow_missing=True),
        sidecars=expand("<results>/floor/{variant}/{prompt}.h5.sha256", prompt=PROMPTS, allow_missing=True),
    log:
        "<logs>/floor/{variant}.log",
    benchmark:
        "<benchmarks>/floor/{variant}.tsv"
    priority: spine_first
    params:
        plan=plan,
        seed=CONFIG.seed,
        draws=CONFIG.floor_draws,
    shell:
        'python -m dsv4.run.floor --config "$config" --results "$results" --variant {wildcards.variant}'
        " 2>&1 | tee {log}"
