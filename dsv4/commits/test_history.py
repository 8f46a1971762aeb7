"""Commits as git has them: order, parents, and whose plan each implements."""

import pytest

from dsv4.commits import history
from dsv4.commits.conftest import Repository
from dsv4.config import ConfigError


@pytest.fixture
def repo(tmp_path) -> Repository:
    """A base, a commit, a side branch with a trailer, a merge of it."""
    made = Repository(tmp_path / "repo")
    made.commit("Base")
    made.git("tag", "base")
    made.commit("First")
    made.git("checkout", "--quiet", "-b", "side")
    made.commit("Side", "Why it is so.", "Audit-Variant: P5")
    made.git("checkout", "--quiet", "main")
    made.commit("Second", "Audit-Variant: B0\nSigned-off-by: Test <test@example.org>")
    made.git("merge", "--quiet", "--no-ff", "-m", "Merge side", "side")
    made.commit("Third")
    return made


def test_commits_come_parents_first(repo):
    found = history.commits(repo.folder, "base", "main")
    assert {commit.subject for commit in found} == {"First", "Side", "Second", "Merge side", "Third"}
    place = {commit.sha: at for at, commit in enumerate(found)}
    below = [(parent, commit.sha) for commit in found for parent in commit.parents if parent in place]
    assert len(below) == 5
    assert all(place[parent] < place[child] for parent, child in below)
    merge = next(commit for commit in found if len(commit.parents) == 2)
    assert [history.read(repo.folder, parent).subject for parent in merge.parents] == ["Second", "Side"]


def test_a_plan_holds_from_its_trailer_on_along_first_parents(repo):
    found = history.commits(repo.folder, "base", "main")
    rungs = {commit.subject: history.rung_of(repo.folder, commit.sha, "P4") for commit in found}
    assert rungs == {"First": "P4", "Side": "P5", "Second": "B0", "Merge side": "B0", "Third": "B0"}


def test_a_word_in_the_text_is_no_trailer(repo):
    sha = repo.commit(
        "Fourth", "Audit-Variant: P5 is what the next one will implement.", "So far nothing changes."
    )
    assert history.read(repo.folder, sha).rung == ""
    assert history.rung_of(repo.folder, sha, "P4") == "B0"


@pytest.mark.parametrize("trailer", ["audit-variant: B4", "AUDIT-VARIANT: B4", "Audit-variant : B4"])
def test_a_key_counts_in_any_case_as_it_does_for_git(repo, trailer):
    sha = repo.commit("Fourth", trailer)
    assert history.trailers(repo.folder, sha) == [("Audit-Variant", "B4")]
    assert history.read(repo.folder, sha).rung == "B4"
    assert history.rung_of(repo.folder, sha, "P4") == "B4"
    assert history.rung_of(repo.folder, repo.commit("Fifth"), "P4") == "B4"


@pytest.mark.parametrize(
    ("base", "head", "says"),
    [
        ("nowhere", "main", "no commit 'nowhere'"),
        ("main", "base", "holds no commit that main does not"),
        ("side", "main~3^0", "holds no commit"),
        ("--all", "main", "no commit '--all'"),
    ],
)
def test_a_range_that_cannot_be_is_refused(repo, base, head, says):
    with pytest.raises(ConfigError, match=says):
        history.commits(repo.folder, base, head)


def test_a_base_that_moved_on_counts_from_the_fork(repo):
    fork = repo.git("rev-parse", "base")
    repo.git("checkout", "--quiet", "-b", "other", "base")
    repo.commit("Elsewhere")
    assert history.fork_point(repo.folder, "other", "main") == fork
    assert history.commits(repo.folder, "other", "main") == history.commits(repo.folder, "base", "main")


def test_branches_that_share_nothing_are_refused(repo):
    repo.git("checkout", "--quiet", "--orphan", "alone")
    repo.commit("Alone")
    with pytest.raises(ConfigError, match="alone and main share no commit"):
        history.commits(repo.folder, "alone", "main")


def test_ancestors(repo):
    shas = {commit.subject: commit.sha for commit in history.commits(repo.folder, "base", "main")}
    assert history.is_ancestor(repo.folder, shas["Side"], shas["Third"])
    assert not history.is_ancestor(repo.folder, shas["Side"], shas["Second"])
    assert history.is_ancestor(repo.folder, shas["Side"], shas["Side"])
