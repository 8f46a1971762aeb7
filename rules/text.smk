# checkpoint -> the reference's own texts -> a rung's text, forced along them, and a spine rung's own.
# Text is looked at after the gate: `collect` asks for that of rungs which passed (texted in text_functions.smk). The verdict
# is taken at any age, for no limit moves a text. A rung on an engine or on a commit has none yet: both are given jobs
# of taps alone.


rule text_reference:
    input:
        manifest="<results>/checkpoint.json",
        code=variant_code("dsv4.run.text_reference", {}),
    output:
        texts="<results>/text/trained.h5",
        sidecar="<results>/text/trained.h5.sha256",
    log:
        "<logs>/text_reference.log",
    benchmark:
        "<benchmarks>/text_reference.tsv"
    params:
        prompts=text_prompts,
        text_tokens=CONFIG.text_tokens,
        page_size=CONFIG.page_size,
    shell:
        'python -m dsv4.run.text_reference --config "$config" --results "$results" 2>&1 | tee {log}'


rule text:
    input:
        manifest="<results>/checkpoint.json",
        reference="<results>/text/trained.h5",
        verdict=ancient("<results>/gates/{variant}.json"),
        parent=same_bits,
        code=code("dsv4.run.text", BACKEND),
    output:
        table="<results>/text/{variant}.parquet",
        account="<results>/text/{variant}.json",
    log:
        "<logs>/text/{variant}.log",
    benchmark:
        "<benchmarks>/text/{variant}.tsv"
    priority: after_spine
    params:
        plan=plan,
        page_size=CONFIG.page_size,
        only=forced_only,
    shell:
        'python -m dsv4.run.text --config "$config" --results "$results" --variant {wildcards.variant}'
        " {params.only} 2>&1 | tee {log}"
