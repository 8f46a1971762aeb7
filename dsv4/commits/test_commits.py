"""Six commits, six verdicts; see conftest.py for what each does."""

from dsv4.commits.audit import verdict


def test_a_commit_that_crashes_says_where(small):
    found = verdict(small.results, small.config, small.shas["crashes"])
    assert (found["status"], found["kind"]) == ("cannot_measure", "does_not_run")
    assert "cannot import name 'Fp5Key'" in found["reasons"][0]
    assert found["reasons"][0].endswith("dsv4/model/memory.py:17")
