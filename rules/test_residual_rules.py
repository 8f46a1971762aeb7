"""When the A/B with an FP32 residual runs: always as ``B5``, in ``all`` only where a text asks for it. On stubs."""

import json

import pytest
import yaml

from dsv4.config import load
from rules.stubs import Workflow

FOUR = {"B5_all", "B5_first_half", "B5_last_half", "B5_single"}
SPINE = {"B0_unfused", "B4_head"}
LEAF = "P4_scalar_gsa"
STAGES = ("variant", "floor", "measure", "gate")
NEW = dict.fromkeys(STAGES, len(FOUR))  # jobs of the A/B


@pytest.fixture
def workflow(tmp_path):
    """Return a copy with a short ladder in which nothing ran yet: its bottom, the last rung of B4, a leaf, the A/B."""
    workflow = Workflow(tmp_path)
    path = tmp_path / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["ladder"] = {
        name: config["ladder"][name] for name in ("B0_unfused", "B4_head", LEAF, *sorted(FOUR))
    }
    config["ladder"]["B4_head"]["parent"] = "B0_unfused"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    workflow.ladder = load(path).ladder
    workflow.script()
    return workflow


def finish(workflow, target, code=0):
    """Run a target to its end; stages that ran."""
    done = workflow.run(target)
    assert done.returncode == code, done.text
    return workflow.ran()


def own(ran):
    """Rungs that generated a text of their own, without the leaf's, which is forced only."""
    return {name for name in ran["text"] if not name.startswith(LEAF)}


def test_without_a_need_all_runs_none_and_b5_runs_four(workflow):
    ran = finish(workflow, "all")
    assert ran["gate"] == SPINE | {LEAF}
    assert own(ran) == SPINE
    assert ran["repetition"] == ran["residual"] == {""}

    planned = workflow.planned("B5")  # a dry run stops at the gates
    assert {name: planned[name] for name in STAGES} == NEW
    assert planned["B5"] == 1

    ran = finish(workflow, "B5")
    assert ran["variant"] == ran["gate"] == own(ran) == FOUR
    assert workflow.page() == {"target": "B5", "status": dict.fromkeys(sorted(SPINE | FOUR), "pass")}
    assert set(json.loads((workflow.results / "residual.json").read_text())["texts"]) >= SPINE | FOUR


def test_with_a_need_all_runs_the_four_until_it_is_gone(workflow):
    workflow.script(repeats=["B4_head"], status={"B5_all": "fail"})
    ran = finish(workflow, "all")  # a leaf that fails does not fail the audit
    assert ran["variant"] == ran["gate"] == SPINE | {LEAF} | FOUR
    assert own(ran) == SPINE | FOUR - {"B5_all"}
    assert workflow.page()["status"]["B5_all"] == "fail"

    workflow.script()
    workflow.edit("dsv4/judge/repetition.py", "import os", "import os  # an edit")
    ran = finish(workflow, "all")
    assert {"repetition", "residual", "collect", "report"} <= set(ran)
    assert not {"variant", "gate", "text"} & set(ran)


def test_a_failed_rung_below_leaves_the_four_alone(workflow):
    workflow.script(repeats=["B0_unfused"], status={"B4_head": "fail"})
    ran = finish(workflow, "all", code=1)
    assert ran["gate"] == SPINE | {LEAF}
    assert own(ran) == {"B0_unfused"}


def test_a_rung_below_asks_for_no_texts_and_one_of_the_four_does(workflow):
    assert not {"repetition", "residual"} & set(workflow.planned("B0_unfused"))
    assert {"repetition", "residual"} <= set(workflow.planned("B5_single"))
    refused = workflow.run("B5", "B5_single")
    assert refused.returncode == 1
    assert "one variant a call" in refused.text
