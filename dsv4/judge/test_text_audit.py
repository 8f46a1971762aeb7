"""A broken text cannot be missed: it is in the verdict, and a fault of the code ends the audit in 1."""

import json

import jsonschema
import yaml

from dsv4.judge._texts import STOP, continuation, diverged, generation
from dsv4.judge.collect import collect
from dsv4.judge.conftest import ROOT
from dsv4.judge.enforce import main as enforce_main
from dsv4.judge.gate import write_json
from dsv4.judge.test_text import at
from dsv4.judge.text import Texts, with_text

PASS = {"status": "pass", "reasons": ["sound"], "e2e": {"kl_nats": 0.1}}


def verdicts(texts, *names, **more):
    for name in names:
        rung = texts.config.ladder[name]
        head = {"id": name, "parent": rung.parent, "spine": rung.spine, "change": {}}
        write_json(texts.results / "gates" / f"{name}.json", head | PASS | more)
    gates = collect(texts.results, texts.config)
    write_json(texts.results / "gates.json", gates)
    return {verdict["id"]: verdict for verdict in gates["variants"]}


def past(texts, name):
    """Texts of a rung whose loop does not stop."""
    free = continuation("code").copy()
    free[12] = STOP
    table = texts.table()
    table.loc[at(table, "code", 12), "top"] = STOP
    own = {"code": generation(free, "budget", ran_past=12)}
    return texts.rung(name, table, own=own, divergence={"code": diverged(12)})


def test_a_rung_that_passed_has_its_text_beside_its_numbers(texts):
    found = verdicts(texts.rung("B0_unfused"), "B0_unfused")["B0_unfused"]
    assert found["e2e"]["kl_nats"] == 0.1
    assert (found["e2e"]["text"]["positions"], found["e2e"]["text_note"]) == (1212, None)
    assert (found["status"], found["reasons"]) == ("pass", ["sound"])


def test_without_text_files_it_is_null_and_says_why(texts):
    found = verdicts(texts, "B0_unfused")
    assert found["B0_unfused"]["e2e"]["text"] is None
    assert "text/B0_unfused.json: not there" in found["B0_unfused"]["e2e"]["text_note"]
    assert "e2e" not in found["P4"]  # not run


def test_text_is_looked_at_after_the_gate_only(texts):
    found = verdicts(past(texts, "B0_unfused"), "B0_unfused", status="fail")["B0_unfused"]
    assert found["e2e"]["text"] is None
    assert found["e2e"]["text_note"] == "text is looked at only after the gate, which says: fail"
    assert found["reasons"] == ["sound"]
    judge = Texts(texts.results, texts.config)
    assert "e2e" not in with_text({"id": "P4", "status": "not_run", "reasons": []}, judge)


def test_enforce_fails_for_a_spine_rung_that_runs_past_a_stop_id(texts, capsys):
    found = verdicts(past(texts, "B0_unfused").rung("P4"), "B0_unfused", "P4", "P5", "B0")
    said = "plain `code`: a stop id was passed at step 12: the loop that generated it does not stop"
    assert found["B0_unfused"]["reasons"] == [f"its text is broken: {said}", "sound"]
    assert found["P4"]["reasons"] == ["sound"]
    ask = ["--results", str(texts.results), "--target", "P5"]
    assert enforce_main(ask) == 1
    err = capsys.readouterr().err
    assert f"  B0_unfused: {said}\n" in err
    assert "passed their gates, but their text is broken by a fault of the code" in err
    assert "did not pass" not in err
    texts.rung("B0_unfused")
    verdicts(texts)
    assert enforce_main(ask) == 0


def test_a_leaf_that_is_broken_and_a_spine_rung_that_only_lost_its_turn_end_exit_0(texts, capsys):
    table = texts.table()
    table.loc[at(table, "opposites", 540), ["top1", "top"]] = [False, 21]
    texts.rung("B0_unfused", table, free=False)
    past(texts, "P4_scalar_gsa")
    found = verdicts(texts, "B0_unfused", "P4_scalar_gsa")
    for name in ("B0_unfused", "P4_scalar_gsa"):
        assert found[name]["reasons"][0].startswith("its text is broken: ")
    for name in ("B0_unfused", "P4_scalar_gsa"):
        assert enforce_main(["--results", str(texts.results), "--target", name]) == 0
    assert capsys.readouterr().err == ""


def test_both_a_rung_that_failed_and_a_faulty_text_are_named(texts, capsys):
    verdicts(past(texts, "B0_unfused"), "B0_unfused")
    verdicts(texts, "P4", status="fail", reasons=["layer 2, attn_out is wrong"])
    assert enforce_main(["--results", str(texts.results)]) == 1
    err = capsys.readouterr().err
    assert "P4: layer 2, attn_out is wrong" in err
    assert "B0_unfused: plain `code`: a stop id was passed" in err


def test_the_page_takes_what_is_written_and_nothing_of_another_type(texts):
    schema = yaml.safe_load((ROOT / "dsv4" / "report" / "gates.schema.yaml").read_text())
    table = texts.table(kl=2e-3)
    table.loc[at(table, "chat", 3), "kl_nats"] = float("nan")
    texts.rung("B0_unfused").rung("P4", texts.table(kl=2e-3)).rung("P5", table)
    texts.rung("P4_scalar_gsa", free=False)
    write_json(
        texts.folder / "attribution" / "P4.json",
        {
            "schema": 1,
            "variant": "P4",
            "words": "layer 5, index_topk: 83% of the KL",
            "ops": [],
            "layers": [],
        },
    )
    found = verdicts(texts, "B0_unfused", "P4", "P4_scalar_gsa", "P5", "B0")
    assert found["P4"]["e2e"]["text"]["attribution"]["words"].startswith("layer 5")
    assert found["P5"]["e2e"]["text"]["own"] is None
    gates = json.loads((texts.results / "gates.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    assert list(check.iter_errors(gates)) == []
    properties = schema["$defs"]["judged_text"]["properties"]
    assert properties.keys() <= found["P4"]["e2e"]["text"].keys()
    ended = found["P4"]["e2e"]["text"]["prompts"]["code"]
    assert ended.keys() == schema["$defs"]["ended_text"]["properties"].keys()
    for spoil in (
        lambda block: block.update(broken="no"),
        lambda block: block["own"].update(moved=None),
        lambda block: block["prompts"]["code"].update(onset="early"),
        lambda block: block["by_kind"]["plain"].update(kl_nats="0.1"),
    ):
        spoiled = json.loads(json.dumps(gates))
        spoil(next(v for v in spoiled["variants"] if v["id"] == "P4")["e2e"]["text"])
        assert list(check.iter_errors(spoiled))
