# One target a rung, and a clear word about targets that are not there.

# A rung's target is the same end, and B5's; what is judged follows from it (wanted in functions.smk).
for target_id in TARGETS:

    rule:
        name:
            target_id
        input:
            "<results>/enforced.ok",


rule unknown:
    input:
        no_such_target,
    output:
        "{name}",
    wildcard_constraints:
        name=r"(?!Snakefile$)\w+",  # which is an input of the closure
