# One target a rung, and a clear word about targets that are not there.

# A rung's target is the same end; what is judged follows from it (wanted in common.smk).
for variant_id in VARIANTS:

    rule:
        name:
            variant_id
        input:
            "<results>/enforced.ok",


rule unknown:
    input:
        no_such_target,
    output:
        "{name}",
    wildcard_constraints:
        name=r"(?!Snakefile$)\w+",  # which is an input of the closure
