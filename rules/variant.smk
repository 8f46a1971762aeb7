# checkpoint, reference dumps -> a variant's dumps, all prompts, isolated and compounded.
# The parent's dumps are read: data that did not change is a link to them.


rule variant:
    input:
        manifest="<results>/checkpoint.json",
        reference=expand("<results>/reference/{prompt}.h5", prompt=PROMPTS),
        parent=of_parent(f"{RESULTS}/variants/{{variant}}/{{prompt}}.h5"),
        code=code("dsv4.run.variant", BACKEND),
    output:
        dumps=expand("<results>/variants/{variant}/{prompt}.h5", prompt=PROMPTS, allow_missing=True),
        sidecars=expand("<results>/variants/{variant}/{prompt}.h5.sha256", prompt=PROMPTS, allow_missing=True),
    log:
        "<logs>/variant/{variant}.log",
    benchmark:
        "<benchmarks>/variant/{variant}.tsv"
    priority: spine_first
    params:
        plan=plan,
        engine=engine,
        decode_steps=CONFIG.decode_steps,
        prefill_rows=CONFIG.prefill_rows,
        page_size=CONFIG.page_size,
    shell:
        'python -m dsv4.run.variant --config "$config" --results "$results" --variant {wildcards.variant}'
        " 2>&1 | tee {log}"
