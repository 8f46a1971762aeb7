# kernels on this machine's GPU -> times beside their floors, what they replace and their peers.
# Only on request: times need a quiet GPU, and change with it. bench.json is merged into, so it is no output here.
# Exit status 3 of the benchmark: some rows are errors, and say so.


rule bench:
    input:
        code=of_kernels("kernels.bench", "bench"),
        page=of_kernels("kernels.bench.page"),
    output:
        page="results/bench.md",
    log:
        "<logs>/bench.log",
    resources:
        gpu=1,
    shell:
        "((python -m kernels.bench --out results/bench.json || test $? -eq 3)"
        " && python -m kernels.bench.page results/bench.json {output.page}) 2>&1 | tee {log}"
