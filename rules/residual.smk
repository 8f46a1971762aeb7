# texts of the spine -> does one repeat earlier than the reference's own? -> the A/B with an FP32 residual.
# A text that does asks for the A/B, so `all` runs it then (asked_for in functions.smk); `snakemake B5` always does.


checkpoint repetition:
    input:
        texts=texts_of_spine,
        code=closure("dsv4.judge.repetition"),
    output:
        asked="<results>/repetition.json",
    log:
        "<logs>/repetition.log",
    params:
        target=target_option,
    shell:
        'python -m dsv4.judge.repetition --config "$config" --results "$results" {params.target} 2>&1 | tee {log}'


rule residual:
    input:
        **{variant: judged(variant) for variant in VARIANTS},
        asked="<results>/repetition.json",
        texts=texts_of_residuals,
        references=REFERENCE,
        config=str(CONFIG.path),
        code=closure("dsv4.judge.residual"),
    output:
        residual="<results>/residual.json",
    log:
        "<logs>/residual.log",
    params:
        target=target_option,
    shell:
        'python -m dsv4.judge.residual --config "$config" --results "$results" {params.target} 2>&1 | tee {log}'
