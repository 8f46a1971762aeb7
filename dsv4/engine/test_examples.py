"""The worked examples are audited as any rung: right ones pass within the floor, planted faults are located."""

import ast
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modeling

from dsv4.engine import variant
from dsv4.engine.conftest import CPP_MISSING, EXAMPLES, HF, HF_MISSING, ROOT, verdict, with_rungs
from dsv4.engine.examples import transformers_engine
from dsv4.engine.process import run
from dsv4.engine.variant import write_engine_variant
from dsv4.ladder import State
from dsv4.run.aba import confirm

pytestmark = pytest.mark.xdist_group("engine")

FAULTS = {
    "sink": ("attend", "attn_out"),
    "scaling": ("route_weights", "expert_weights"),
    "rope": ("q_b", "q"),
}


def audited(setup, name, **options):
    write_engine_variant(setup, setup.config.ladder[name], **options)
    return verdict(setup, name)


def test_transformers_as_a_process_passes_and_says_what_it_could_not_give(tiny):
    setup = with_rungs(tiny, {"hf": {"command": HF, "missing": HF_MISSING}}, {"Hf": {"engine": "hf"}})
    found = audited(setup, "Hf")
    assert found["status"] == State.PASS, found["reasons"]
    assert found["fidelity"] == "within"
    given, of = found["taps"]
    assert given > 100
    assert (
        found["reasons"][-1]
        == f"taps {given} of {of}: engine hf on cpu, FP32, eager declares the others missing"
    )
    assert found["change"] == {"engine": ["own model", "hf"]}
    assert found["blast_radius"]["ok"]
    batched = found["guard"]["batched_prefill"]
    assert batched["entry_point"] == "DeepseekV4ForCausalLM.forward"
    assert batched["rel_l2"] < 1e-4
    assert not (setup.results / "engines" / "Hf").exists()


def in_this_process(monkeypatch, fault):
    """How transformers is started where it is imported already; what a fault replaces there is put back each time."""

    def start(engine, job):
        with monkeypatch.context() as patch:
            for name in ("eager_attention_forward", "apply_rotary_pos_emb"):
                patch.setattr(modeling, name, getattr(modeling, name))
            transformers_engine.main([*(["--fault", fault] if fault else []), str(job)])

    return start


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_transformers_is_located_and_confirmed(tiny, monkeypatch, fault):
    setup = with_rungs(tiny, {"hf": {"command": HF, "missing": HF_MISSING}}, {"Hf": {"engine": "hf"}})
    start = in_this_process(monkeypatch, fault)
    found = audited(setup, "Hf", start=start)
    culprit = found["culprit"]
    assert found["status"] == State.FAIL
    assert (culprit["layer"], culprit["stage"], culprit["tap"]) == (0, *FAULTS[fault])
    monkeypatch.setattr(variant, "ask_engine", partial(variant.ask_engine, start=start))
    again = confirm(setup, "Hf", culprit["prompt"], culprit["layer"], culprit["tap"])
    assert again["confirmed"], again


@pytest.mark.parametrize("name", ["hf", "cpp"])
def test_on_one_engine_a_rung_may_move_only_what_its_field_claims(tiny, window_layer, monkeypatch, name):
    """A fault that comes with the plan of a rung, outside of what that claims, is named by the blast radius."""
    engines = {"hf": {"command": HF, "missing": HF_MISSING}}
    engines["cpp"] = {"command": [str(window_layer)], "missing": CPP_MISSING}
    rungs = {"Below": {"engine": name}, "Above": {"parent": "Below", "set": {"kv_read": "in_place"}}}
    setup = with_rungs(tiny, engines, rungs)
    found = {}
    for rung, fault in (("Below", ""), ("Above", "scaling")):
        here = in_this_process(monkeypatch, fault)
        there = partial(faulty, fault)
        found[rung] = audited(setup, rung, start=here if name == "hf" else there)
    assert found["Below"]["status"] == State.PASS, found["Below"]["reasons"]
    assert not found["Above"]["blast_radius"]["ok"]
    assert {place.split()[-1] for place in found["Above"]["blast_radius"]["changed"]} == {"expert_weights"}
    assert any(
        reason.startswith("blast radius: layer 0, expert_weights (route_weights) differs")
        for reason in found["Above"]["reasons"]
    )


def faulty(fault, engine, job):
    """Start a command with a fault, or without."""
    run(replace(engine, command=(*engine.command, *(["--fault", fault] if fault else []))), job)


@pytest.fixture(scope="module")
def compiled(tiny, window_layer):
    """Audit of the compiled layer, as it is and with each fault."""
    engines = {"cpp": {"command": [str(window_layer)], "missing": CPP_MISSING}}
    engines |= {
        f"cpp_{name}": {"command": [str(window_layer), "--fault", name], "missing": CPP_MISSING}
        for name in FAULTS
    }
    return with_rungs(tiny, engines, {name.capitalize(): {"engine": name} for name in engines})


def test_a_compiled_layer_passes(compiled):
    found = audited(compiled, "Cpp")
    assert found["status"] == State.PASS, found["reasons"]
    assert found["taps_by_mode"]["isolated"][0] == 44
    assert found["taps_by_mode"]["compounded"][0] == 0
    assert found["fidelity_counts"]["outside"] == 0
    assert found["label"] == "engine cpp on cpu, double, compiled loops"
    assert found["guard"]["batched_prefill"] is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_compiled_layer_is_located_and_confirmed(compiled, fault):
    name = f"Cpp_{fault}"
    found = audited(compiled, name)
    culprit = found["culprit"]
    assert found["status"] == State.FAIL
    assert (culprit["layer"], culprit["stage"], culprit["tap"]) == (0, *FAULTS[fault])
    again = confirm(compiled, name, culprit["prompt"], culprit["layer"], culprit["tap"])
    assert again["confirmed"], again


def lines(path: Path) -> int:
    """Lines of code: no blank ones, comments or docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.parse(text)
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        said = [
            node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)
        ]
        hidden = {number for node in said for number in range(node.lineno, node.end_lineno + 1)}
        planted = (
            next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "plant")
            if ("def plant" in text)
            else None
        )
        hidden |= set(range(planted.lineno, planted.end_lineno + 1)) if planted else set()
        kept = [line for number, line in enumerate(text.splitlines(), 1) if number not in hidden]
        return sum(bool(line.strip()) and not line.strip().startswith("#") for line in kept)
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())


def test_the_page_says_how_many_lines_an_engineer_writes():
    page = (ROOT / "docs/engines.md").read_text()
    for path in (
        EXAMPLES / "transformers_engine.py",
        EXAMPLES / "window_layer.cpp",
        EXAMPLES.parent / "tap_writer.py",
        EXAMPLES.parent / "tap_writer.hpp",
    ):
        (stated,) = re.findall(rf"`{path.relative_to(ROOT)}`[^|\n]*\| (\d+) ", page)
        assert int(stated) == lines(path), path.name
