# base, head -> every commit's verdict, as many at once as there are cores -> commits.json -> its page.
# A commit's job runs the commit's own code and keeps its dumps, so an edited judge judges again and runs nothing.


rule commit:
    input:
        manifest="<results>/checkpoint.json",
        references=REFERENCE,
        floor=floor_of_commit,
        code=closure("dsv4.commits.audit"),
    output:
        verdict="<results>/commits/{sha}/verdict.json",
    log:
        "<logs>/commits/{sha}.log",
    benchmark:
        "<benchmarks>/commits/{sha}.tsv"
    wildcard_constraints:
        sha="[0-9a-f]{40}",
    priority: oldest_first
    params:
        plan=plan_of_commit,
        tighten=json.dumps(CONFIG.tighten, sort_keys=True),
    shell:
        'python -m dsv4.commits.audit --config "$config" --results "$results" --commit {wildcards.sha}'
        ' "${{commits[@]}}" 2>&1 | tee {log}'


rule collect_commits:
    input:
        verdicts=verdicts_of_commits,
        reference="<results>/reference_check.json" if CONFIG.reference else [],
        code=closure("dsv4.commits.audit"),
    output:
        commits="<results>/commits.json",
    log:
        "<logs>/commits.log",
    params:
        commits=shas,
    shell:
        'python -m dsv4.commits.audit --config "$config" --results "$results" "${{commits[@]}}" 2>&1 | tee {log}'


rule commits_page:
    input:
        commits="<results>/commits.json",
        code=closure("dsv4.report.commits"),
    output:
        page="reports/commits.html",
    log:
        "<logs>/commits_page.log",
    params:
        run=RUN,
    shell:
        'python -m dsv4.report.commits --results "$results" 2>&1 | tee {log}'


rule enforce_commits:
    input:
        commits="<results>/commits.json",
        page="reports/commits.html",
        code=closure("dsv4.commits.enforce"),
    output:
        passed="<results>/commits.ok",
    log:
        "<logs>/enforce_commits.log",
    shell:
        'python -m dsv4.commits.enforce --results "$results" 2>&1 | tee {log}'


rule commits:
    input:
        end_of_commits,
