"""The rules, on stubs: what runs, what runs again after which edit, and what a failure leaves behind."""

import json
import os
import signal
import subprocess
import time

import pytest

from dsv4.code_inputs import closure
from dsv4.config import load
from dsv4.judge.limits import limits
from rules.stubs import Workflow, interpreter

BOUND = next(limit for limit in limits() if limit.direction == "max")
LIMIT = ("return not (value <= self.value", "return not (value <= 0.5 * self.value")
ALL = {"residual": 1, "collect": 1, "report": 1, "enforce": 1, "all": 1}
ON_SPINE = {"repetition": 1}  # texts of the spine are looked at when its gates were
CODE = {"closure": 1}  # any edit of a source may change what is reached


@pytest.fixture
def workflow(tmp_path):
    """Return a copy in which nothing ran yet."""
    return Workflow(tmp_path)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return a copy in which the whole ladder ran; tests undo their edits."""
    workflow = Workflow(tmp_path_factory.mktemp("done"))
    result = workflow.run("all")
    assert result.returncode == 0, result.text
    workflow.first = workflow.ran()
    return workflow


@pytest.fixture
def edit(done):
    """Edit files of ``done`` and put them back."""
    old = {}

    def change(name, before, after):
        old.setdefault(name, (done.folder / name).read_text())
        done.edit(name, before, after)

    yield change
    for name, text in old.items():
        (done.folder / name).write_text(text)


@pytest.mark.xdist_group("done")
class TestAfterAWholeRun:
    def test_every_rung_and_leaf_ran_once_and_none_on_request(self, done):
        wanted = {rung.id for rung in done.ladder.default()}
        assert "B5_all" in {rung.id for rung in done.ladder} - wanted
        for stage in ("variant", "floor", "measure", "gate"):
            assert done.first[stage] == wanted
        assert done.first["noise"] == {"B0"}
        assert done.first["text_reference"] == {""}
        own = {rung.id for rung in done.ladder.spine()}
        assert done.first["attribute"] == wanted
        assert done.first["text"] == own | {f"{leaf} forced only" for leaf in wanted - own}
        assert done.page()["status"] == dict.fromkeys(wanted, "pass")
        assert (done.folder / "results/latest").readlink().name == done.results.name

    def test_nothing_is_done_twice(self, done):
        result = done.run()
        assert result.returncode == 0
        assert "Nothing to be done" in result.text
        assert done.ran() == {}

    def test_a_touched_file_reruns_nothing(self, done):
        (done.folder / "kernels/op/ref.py").touch()
        assert done.planned("all") == {}

    # A dry run stops at the first gate: what stands above it is planned when it is judged.
    def test_an_edited_limit_reruns_gates_and_report(self, done, edit):
        edit("dsv4/judge/limits.py", *LIMIT)
        assert done.planned("all") == ALL | ON_SPINE | CODE | {"gate": 1}

    def test_a_tightened_limit_reruns_gates_and_report(self, done, edit):
        edit("config.yaml", "tighten: {}", f"tighten: {{{BOUND.name}: {BOUND.value / 2}}}")
        assert done.planned("all") == ALL | ON_SPINE | {"gate": 1}

    def test_an_edited_op_reruns_references_and_all_variants(self, done, edit):
        edit("kernels/op/ref.py", "1", "2")
        everything = ("checkpoint", "make_reference", "text_reference", "variant", "floor", "measure", "gate")
        assert done.planned("all") == ALL | ON_SPINE | CODE | dict.fromkeys(everything, 1)

    def test_an_op_of_one_plan_reruns_the_variants_that_use_it(self, done, edit):
        edit("kernels/formats/aligned_record.py", "1", "2")
        once = dict.fromkeys(("variant", "floor", "measure", "gate"), 1)
        assert done.planned("all") == ALL | CODE | once
        edit("config.yaml", "set: {kv_record: aligned}", "set: {rope_format: fp8}")
        few = {"ask": 1, "collect": 1, "report": 1, "enforce": 1, "B1_q2": 1}
        assert done.planned("B1_q2") == CODE | few

    def test_a_changed_plan_reruns_that_variant(self, done, edit):
        edit("config.yaml", "{q_format: fp8x2}", "{pv_format: fp8}")
        once = dict.fromkeys(("variant", "floor", "measure", "gate"), 1)
        assert done.planned("all") == ALL | CODE | once

    def test_a_new_leaf_is_run_and_collected(self, done, edit):
        edit("config.yaml", "  B2:", "  New:\n    parent: B1\n    set: {kv_norm: fused}\n    why: new\n  B2:")
        once = dict.fromkeys(("ask", "variant", "floor", "measure", "gate"), 1)
        assert done.planned("all") == ALL | CODE | once

    def test_more_draws_rerun_floors_only(self, done, edit):
        edit("config.yaml", "floor_draws: 8 ", "floor_draws: 9 ")
        assert done.planned("all") == ALL | ON_SPINE | {"floor": 1, "measure": 1, "gate": 1}

    def test_an_edited_text_reruns_texts_only(self, done, edit):
        edit("data/prompts.yaml", "List the opposites that you know.", "List some opposites.")
        texts = dict.fromkeys(("text", "attribution"), len(done.first["text"]))
        assert done.planned("all") == ALL | ON_SPINE | {"text_reference": 1, **texts}

    def test_an_edited_claim_reruns_no_text(self, done, edit):
        edit("data/claims.yaml", "1", "2")
        assert done.planned("all") == {name: 1 for name in ALL if name != "residual"}

    def test_lint_finds_nothing_but_the_missing_container(self, done):
        text = done.run("--lint", "text").text
        findings = [line.strip() for line in text.splitlines() if line.startswith("    * ")]
        assert set(findings) == {"* Specify a conda environment or container for each rule.:"}


def test_nothing_is_measured_with_limits():
    assert not [file for file in closure("dsv4.judge.measure") if "limits" in file]


def test_one_rung_runs_what_it_stands_on(workflow):
    workflow.script(equal=["P5"])
    assert workflow.run("P5").returncode == 0
    ran = workflow.ran()
    for stage in ("variant", "floor", "measure", "gate"):
        assert ran[stage] == {"B0_unfused", "P4", "P5"}
    assert "noise" not in ran
    assert workflow.page() == {"target": "P5", "status": dict.fromkeys(("B0_unfused", "P4", "P5"), "pass")}
    assert workflow.planned("P5") == {}
    (workflow.results / "text/P4.json").write_text("another text")
    copied = {"text": 1, "attribution": 2, "collect": 1, "report": 1, "enforce": 1, "P5": 1}
    assert workflow.planned("P5") == copied  # P5 has P4's bits, and so its text; both may have moved

    assert workflow.run("P4_scalar_gsa").returncode == 0
    ran = workflow.ran()
    assert (ran["variant"], ran["gate"]) == ({"P4_scalar_gsa"}, {"P4_scalar_gsa"})
    assert workflow.page() == {
        "target": "P4_scalar_gsa",
        "status": {"B0_unfused": "pass", "P4_scalar_gsa": "pass"},
    }


def test_an_edited_engine_reruns_the_rungs_that_run_on_it(workflow):
    engine = workflow.folder / "engine.py"
    engine.write_text("1")
    rung = "  Mine:\n    parent: B0_unfused\n    engine: mine\n    why: an engine\n  P4:"
    workflow.edit("config.yaml", "ladder:", "engines: {mine: {command: [python, engine.py]}}\nladder:")
    workflow.edit("config.yaml", "  P4:", rung)
    workflow.ladder = load(workflow.folder / "config.yaml").ladder
    workflow.script()
    assert workflow.run("Mine").returncode == 0
    ran = workflow.ran()
    assert ran["variant"] == {"B0_unfused", "Mine"}
    assert ran["text"] == {"B0_unfused"}  # engines have none yet
    assert workflow.planned("Mine") == {}
    engine.write_text("2")
    assert workflow.run("Mine").returncode == 0
    ran = workflow.ran()
    assert (ran["variant"], ran["gate"]) == ({"Mine"}, {"Mine"})
    assert "floor" not in ran


def test_a_foreign_reference_is_compared_before_verdicts_are_collected(workflow):
    workflow.edit("config.yaml", "ladder:", "reference: {command: [their_engine], of: plain}\nladder:")
    assert workflow.run("B0_unfused").returncode == 0
    assert "cross_check" in workflow.ran()
    assert workflow.planned("B0_unfused") == {}
    workflow.edit("config.yaml", "of: plain", "of: trained")
    planned = workflow.planned("B0_unfused")
    assert {"cross_check", "collect"} <= set(planned)
    assert "make_reference" not in planned


def test_on_kernels_steps_are_timed_once_all_verdicts_are_there(workflow, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels without a GPU
    workflow.edit("config.yaml", "backend: auto", "backend: kernel")
    done = workflow.run("P4")
    assert done.returncode == 0, done.text
    assert "times" in workflow.ran()
    assert json.loads((workflow.results / "times.json").read_text()) == ["B0_unfused", "P4"]
    workflow.edit("config.yaml", "tighten: {}", f"tighten: {{{BOUND.name}: {BOUND.value / 2}}}")
    assert workflow.run("P4").returncode == 0
    ran = workflow.ran()
    assert ran["gate"] == {"B0_unfused", "P4"}
    assert not {"times", "text", "text_reference"} & set(ran)  # a verdict is no part of a time, nor of a text
    assert workflow.run("P5").returncode == 0
    assert json.loads((workflow.results / "times.json").read_text()) == ["B0_unfused", "P4", "P5"]


def test_a_failed_rung_blocks_what_stands_on_it_and_keeps_its_report(workflow):
    workflow.script(status={"P4": "fail", "P4_scalar_gsa": "fail"})
    assert workflow.run("all").returncode == 1
    ran = workflow.ran()
    assert ran["variant"] == {"B0_unfused", "P4", "P4_scalar_gsa"}
    assert ran["text"] == {"B0_unfused"}
    shown = {"B0_unfused": "pass", "P4": "fail", "P4_scalar_gsa": "fail"}
    assert workflow.page()["status"] == shown

    again = workflow.run("all")
    assert again.returncode == 1
    assert "failed: P4" in again.text
    assert "returned non-zero exit status 1" in again.text  # by its status, not by the file that is missing
    assert workflow.ran() == {"enforce": {""}}
    assert workflow.page()["status"] == shown

    leaf = workflow.run("P4_scalar_gsa")  # a leaf is reported, not enforced
    assert leaf.returncode == 0
    workflow.script()
    workflow.edit("dsv4/judge/limits.py", *LIMIT)
    assert workflow.run("P5").returncode == 0
    ran = workflow.ran()
    assert (ran["gate"], ran["variant"]) == ({"B0_unfused", "P4", "P5"}, {"P5"})


def test_a_crash_leaves_a_page_without_stale_verdicts(workflow):
    assert workflow.run("P5").returncode == 0
    workflow.script(crash=[["variant", "P4"]])
    workflow.edit("kernels/op/ref.py", "1", "2")
    crashed = workflow.run("P5")
    assert crashed.returncode == 1
    assert "variant P4: told to crash" in crashed.text
    assert "the run stopped early" in crashed.text
    assert workflow.page()["status"] == {"B0_unfused": "pass"}

    workflow.script()
    workflow.ran()
    assert workflow.run("P5").returncode == 0
    ran = workflow.ran()
    assert ran["variant"] == {"P4", "P5"}
    assert "reference" not in ran
    assert workflow.page()["status"] == dict.fromkeys(("B0_unfused", "P4", "P5"), "pass")


def can_be_interrupted():
    """Undo what a test run in a shell's background inherits: there SIGINT is ignored, by all children too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_and_stop(workflow, stage, how):
    """Start Snakemake, wait for a stage, send a signal; return when Snakemake is gone."""
    workflow.script(sleep={stage: 3})
    with (workflow.folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [interpreter(), "-m", "snakemake", "P4"],
            cwd=workflow.folder,
            env=workflow.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=can_be_interrupted,
        )
        log = workflow.folder / "ran.txt"
        until = time.monotonic() + 60
        while not (log.exists() and stage in log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        if how is signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, how)  # as a terminal does
        process.wait()
    workflow.script()
    workflow.ran()


def test_kill_leaves_a_lock_that_unlock_removes_once_nothing_lives(workflow):
    start_and_stop(workflow, "variant", signal.SIGKILL)
    locked = workflow.run("P4")
    assert locked.returncode == 1
    assert "cannot be locked" in locked.text
    unlocked = workflow.python("-m", "dsv4", "unlock")
    assert unlocked.returncode == 0
    assert "lives no more" in unlocked.stderr
    assert workflow.run("P4").returncode == 0
    ran = workflow.ran()
    assert ran["variant"] == {"B0_unfused", "P4"}
    assert "reference" not in ran


def test_interrupt_keeps_finished_stages(workflow):
    start_and_stop(workflow, "measure", signal.SIGINT)
    finished = {dump.parent.name for dump in workflow.folder.glob("results/nano-*/variants/*/*.h5")}
    assert "B0_unfused" in finished  # P4's may be too: it needs no measurement, and runs beside one
    assert workflow.run("P4").returncode == 0
    ran = workflow.ran()
    assert ran.get("variant", set()) == {"B0_unfused", "P4"} - finished
    assert ran.get("measure") == {"B0_unfused", "P4"}, (workflow.folder / "output.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["B9"], "no variant or target 'B9'; variants: B0_unfused, P4"),
        (["B1_q2", "B2_fp4"], "one variant a call"),
        (["--config", "seed=1", "--", "all"], "--config seed: is not read"),
    ],
)
def test_bad_arguments_are_refused(workflow, arguments, message):
    result = workflow.run(*arguments)
    assert result.returncode == 1
    assert message in result.text
    assert workflow.ran() == {}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("set: {q_format: fp8}", "set: {q_format: fp8, rope_format: fp8}", "config.yaml: ladder.B1 changes"),
        ("tighten: {}", "tighten: {cosine: 1}", "config.yaml: tighten: no limit 'cosine'; limits: "),
        ("tighten: {}", f"tighten: {{{BOUND.name}: {BOUND.value * 2}}}", "is looser than at most"),
        (
            "dsv4/kernels/indexer/*.cu",
            "kernels/op/*.py",
            "archived: kernels/op/*.py: every variant reaches kernels/op/ref.py: dsv4/run/variant.py",
        ),
    ],
)
def test_a_bad_configuration_is_refused_before_any_job(workflow, before, after, message):
    workflow.edit("config.yaml", before, after)
    result = workflow.run("all")
    assert result.returncode == 1
    assert message in result.text
    assert workflow.ran() == {}


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_results_folder_that_cannot_take_the_audit_is_refused_before_any_job(workflow, fault):
    if fault == "full":
        workflow.edit("dsv4/preflight.py", "NEEDED = 400 * 10**6", "NEEDED = 400 * 10**16")
    else:
        (workflow.folder / "results").symlink_to("/proc/1")  # nobody can make a folder there, root neither
    result = workflow.run("all")
    assert result.returncode == 1
    assert ("MB left on its disk" if fault == "full" else "cannot be written") in result.text
    assert workflow.ran() == {}
