# checkpoint, prompts -> the two references: `trained` (reference/) and `plain` (plain/).
# One process does all prompts, so that the weights are read and widened once.

REFERENCE = expand("<results>/{kind}/{prompt}.h5", kind=["reference", "plain"], prompt=PROMPTS)


rule make_reference:
    input:
        manifest="<results>/checkpoint.json",
        code=variant_code("dsv4.run.reference", {}),
    output:
        dumps=REFERENCE,
        sidecars=[f"{dump}.sha256" for dump in REFERENCE],
    log:
        "<logs>/reference.log",
    benchmark:
        "<benchmarks>/reference.tsv"
    priority: 10  # every rung waits for it
    params:
        decode_steps=CONFIG.decode_steps,
        prefill_rows=CONFIG.prefill_rows,
        page_size=CONFIG.page_size,
    shell:
        'python -m dsv4.run.reference --config "$config" --results "$results" 2>&1 | tee {log}'


# A foreign reference is compared with both; `collect` and `collect_commits` ask for it if the configuration names one.
rule cross_check:
    input:
        manifest="<results>/checkpoint.json",
        dumps=REFERENCE,
        code=closure("dsv4.engine.cross_check"),
    output:
        table="<results>/reference_check.json",
    log:
        "<logs>/reference_check.log",
    benchmark:
        "<benchmarks>/reference_check.tsv"
    params:
        engine=foreign_reference,
    shell:
        'python -m dsv4.engine.cross_check --config "$config" --results "$results" 2>&1 | tee {log}'


rule reference:
    input:
        rules.make_reference.output.dumps,
