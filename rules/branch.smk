# base, head -> the first bad commit; whether the evidence in the commits' messages comes out again.
# Both answer on the terminal and by their exit status, so they have no output that could be there already.


rule bisect:
    input:
        manifest="<results>/checkpoint.json",
        references=REFERENCE,
        floors=floors_of_branch,
        code=closure("dsv4.commits.bisect"),
    log:
        "<logs>/bisect.log",
    params:
        question=question,
    shell:
        'python -m dsv4.commits.bisect --config "$config" --results "$results" "${{commits[@]}}"'
        " {params.question} 2>&1 | tee {log}"


rule verify_commits:
    input:
        manifest="<results>/checkpoint.json",
        references=REFERENCE,
        floors=floors_of_branch,
        code=closure("dsv4.commits.verify"),
    log:
        "<logs>/verify_commits.log",
    shell:
        'python -m dsv4.commits.verify --config "$config" --results "$results" "${{commits[@]}}" 2>&1 | tee {log}'
