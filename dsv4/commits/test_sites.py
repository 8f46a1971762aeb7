"""How many sites a commit moved, and what of the code it touched is one op."""

import pytest

from dsv4.commits.conftest import Repository
from dsv4.commits.sites import sites, touched

STAGES = """
from kernels.norm.ref import norm, other

EPS = 1e-6

class Layer:
    def __init__(self):
        self.table = {"a": self.a, "sum": lambda x: x + 1}

    def a(self, x):
        return norm(x, EPS)

    def b(self, x):
        return norm(x) * other(x)

    def c(self, x):
        return x
"""
NORM = "def norm(x, eps=0):\n    return x\n\n\ndef other(x):\n    return x\n"


def test_stages_that_read_what_another_stored_are_no_sites_of_their_own():
    places = {
        ("isolated", 1, "kv_store"),
        ("isolated", 1, "kv_bytes"),
        ("isolated", 1, "attn_out"),
        ("isolated", 3, "lse"),
    }
    places |= {("compounded", 2, "attn_out"), ("isolated", 0, "expert_ids"), ("isolated", "model", "logits")}
    assert sites(places) == [
        {"stage": "kv_store", "layers": [1], "taps": ["kv_store", "kv_bytes"]},
        {"stage": "route", "layers": [0], "taps": ["expert_ids"]},
        {"stage": "lm_head", "layers": ["model"], "taps": ["logits"]},
    ]
    assert [site["stage"] for site in sites(places, {"route"})] == ["kv_store", "lm_head"]
    assert sites({("compounded", 2, "attn_out")}) == []


@pytest.mark.parametrize(
    ("edits", "groups"),
    [
        ([("norm", "return x\n\n\ndef o", "return -x\n\n\ndef o")], [["kernels/norm"]]),
        ([("norm", "return x", "return -x")], [["kernels/norm"]]),  # both functions of one folder
        ([("stages", "norm(x, EPS)", "norm(x, 2)")], [["s.py: Layer.a"]]),
        ([("stages", "        return x\n", "        return -x\n"), ("stages", "x + 1", "x + 2")], 2),
        ([("stages", "norm(x) * other(x)", "norm(x)"), ("stages", "norm(x, EPS)", "norm(x, 2)")], 2),
        # the op and its caller, which changed for it
        ([("norm", "def norm(x, eps=0)", "def norm(x, eps)"), ("stages", "norm(x, EPS)", "norm(x, eps=EPS)")], 1),
        # the op, and a function that calls it but changed elsewhere
        ([("norm", "other(x):\n    return x", "other(x):\n    return -x"), ("stages", "norm(x) *", "norm(-x) *")], 2),
        ([("stages", "EPS = 1e-6", "EPS = 1e-5")], [["s.py: EPS"]]),
        ([("stages", "norm, other", "norm as norm, other"), ("stages", "x + 1", "x + 2")], [["s.py: Layer.__init__"]]),
        ([("stages", "    def c(self, x):\n        return x\n", "")], [["s.py: Layer.c"]]),
    ],
)  # fmt: skip
def test_an_op_is_a_folder_or_a_function_and_who_changed_to_call_it(tmp_path, edits, groups):
    repo = Repository(tmp_path / "repo")
    files = {"stages": "s.py", "norm": "kernels/norm/ref.py"}
    (repo.folder / "kernels/norm").mkdir(parents=True)
    (repo.folder / "s.py").write_text(STAGES)
    (repo.folder / "kernels/norm/ref.py").write_text(NORM)
    old = repo.commit("Old")
    for file, before, after in edits:
        repo.edit(files[file], before, after)
    new = repo.commit("New")
    changed = repo.git("diff", "--name-only", old, new).split()
    found = touched(repo.folder, old, new, changed)
    assert (found if isinstance(groups, list) else len(found)) == groups, found


LAYER = """
class L:
    def q(self, x):
        return x + 1

    def route(self, x):
        return x + 2

    def forward(self, x):
        y = self.q(x)
        return self.route(y)
"""


@pytest.mark.parametrize(
    ("caller", "together"),
    [
        (("        y = ", "        x = x\n        y = "), False),  # a statement that names neither
        (("        y = ", "        if x:\n            x = x\n        y = "), False),
        (("self.q(x)", "self.q(x, 2)"), False),  # changed for one of them
        (("        return self.route(y)", "        y = self.q(y)\n        return self.route(y, 1)"), True),
    ],
)
def test_a_statement_more_in_the_caller_joins_nothing_that_it_does_not_name(tmp_path, caller, together):
    repo = Repository(tmp_path / "repo")
    (repo.folder / "s.py").write_text(LAYER)
    old = repo.commit("Old")
    repo.edit("s.py", "x + 1", "x - 1")
    repo.edit("s.py", "x + 2", "x - 2")
    repo.edit("s.py", *caller)
    found = touched(repo.folder, old, repo.commit("New"), ["s.py"])
    q, route = ([group for group in found if f"s.py: L.{name}" in group] for name in ("q", "route"))
    assert (q == route) is together, found
