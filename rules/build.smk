# kernels -> cubins, PTX and what the compilers say of them, for every architecture, without a GPU.
# Compiling exits 0 whatever it finds, so that what there is stays; `build` fails if a kernel is not what it declares.
import time

ARCHITECTURES = ["sm_90a", "sm_100a", "sm_103a", "sm_120a"]


# One job for all of them: they share what their compilations have in common, and no core waits for the longest.
rule compile:
    input:
        code=of_kernels("kernels.build", "kernel"),
    output:
        summaries=expand("results/build/{arch}/build.json", arch=ARCHITECTURES),
    log:
        "<logs>/build/compile.log",
    threads: workflow.cores
    params:
        arches=" ".join(f"--arch {arch}" for arch in ARCHITECTURES),
    shell:
        "python -m kernels.build {params.arches} --out results/build --judge-later --jobs {threads} 2>&1 | tee {log}"


# What the audited tree's build depends on is not known here: it is asked every time, and has its own cache.
rule foreign_build:
    output:
        record="<results>/foreign_build.json",
    log:
        "<logs>/build/foreign.log",
    params:
        asked=time.time(),
    shell:
        'python -m dsv4.foreign_build --config "$config" --results "$results" 2>&1 | tee {log}'


rule build:
    input:
        built=expand("results/build/{arch}/build.json", arch=ARCHITECTURES),
        foreign="<results>/foreign_build.json" if CONFIG.build else [],
        code=of_kernels("kernels.build.check"),
    output:
        passed="results/build/passed.txt",
    log:
        "<logs>/build/check.log",
    shell:
        "(python -m kernels.build.check results/build --passed {output.passed}"
        ' && python -m dsv4.foreign_build --config "$config" --results "$results" --enforce) 2>&1 | tee {log}'
