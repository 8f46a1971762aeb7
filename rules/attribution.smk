# a rung's text, its parent's, the reference's -> which op of which layer moved it.
# The stage itself sees whether the text moved: one that did not costs a second. It runs on refs, also beside kernels.


rule attribution:
    input:
        manifest="<results>/checkpoint.json",
        reference="<results>/text/trained.h5",
        text=expand("<results>/text/{variant}.{kind}", kind=["parquet", "json"], allow_missing=True),
        parent=text_of_parent,
        code=code("dsv4.attribute"),
    output:
        ranked="<results>/text/attribution/{variant}.json",
    log:
        "<logs>/attribution/{variant}.log",
    benchmark:
        "<benchmarks>/attribution/{variant}.tsv"
    params:
        plan=plan,
        page_size=CONFIG.page_size,
    shell:
        'python -m dsv4.attribute --config "$config" --results "$results" --variant {wildcards.variant}'
        " 2>&1 | tee {log}"
