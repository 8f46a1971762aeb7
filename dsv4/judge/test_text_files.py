"""Text files of another run, plan, checkpoint or text are refused, and both sides are named."""

import json

import pytest

from dsv4.dump import DumpError
from dsv4.judge.gate import write_json
from dsv4.judge.text_files import read_reference, read_text


def read(texts):
    return read_text(texts.results, texts.config.ladder["P4"], read_reference(texts.results))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"schema": 2}, "schema is 2, expected 1"),
        ({"variant": "P5"}, "variant is 'P5', expected 'P4'"),
        ({"parent": None}, "parent is None, expected 'B0_unfused'"),
        ({"prompts": {}}, "prompts: {} should be non-empty"),
        ({"backend": 3}, "backend: 3 is not of type 'string', 'null'"),
    ],
)
def test_an_account_of_another_run_or_shape(texts, head, said):
    with pytest.raises(DumpError, match=r"P4\.json: ") as error:
        read(texts.rung("P4", **head))
    assert said in str(error.value)


def test_another_plan_names_the_fields_that_differ(texts):
    plan = json.loads((texts.rung("B0_unfused").folder / "B0_unfused.json").read_text())["plan"]
    with pytest.raises(DumpError) as error:
        read(texts.rung("P4", plan=plan))
    assert "plan is {'norm_quant': 'unfused'}, expected {'norm_quant': 'fused'}" in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop(columns="margin"), "column margin is of kind None, expected f"),
        (lambda t: t.assign(step=t["step"] * 1.0), "column step is of kind f, expected i"),
        (lambda t: t[t["prompt"] != "chat"], "along 0 tokens of chat, "),
        (
            lambda t: t.replace({"prompt": {"chat": "tea"}}),
            "prompts ['capital', 'chat', 'code', 'opposites', 'tea'],",
        ),
        (lambda t: t[t.index != 50], "along 575 tokens of code, "),
        (lambda t: t.assign(token=t["token"].where(t.index != 50, 9)), "they differ from step 16 on"),
        (lambda t: t.assign(step=t["step"].where(t.index != 50, 9)), "its steps are not 0, 1, 2, ..."),
    ],
)
def test_a_table_that_is_not_along_the_references_text(texts, change, said):
    with pytest.raises(DumpError, match=r"P4\.parquet: ") as error:
        read(texts.rung("P4", change(texts.table())))
    assert said in str(error.value)


def test_an_account_along_another_text(texts):
    texts.rung("P4")
    path = texts.folder / "P4.json"
    account = json.loads(path.read_text())
    account["prompts"]["code"]["reference"]["tokens"][3] = 9
    write_json(path, account)
    with pytest.raises(DumpError, match=r"P4\.json: along 576 tokens of code, .* they differ from step 3 on"):
        read(texts)


@pytest.mark.parametrize("name", ["P4.json", "P4.parquet"])
def test_files_that_are_no_files_of_theirs(texts, name):
    (texts.rung("P4").folder / name).write_bytes(b"no")
    with pytest.raises(DumpError, match=f"{name}: not (a )?readable"):
        read(texts)


def test_a_reference_of_another_checkpoint_or_later_than_the_text(texts):
    texts.rung("P4").reference(checkpoint="d" * 8)
    with pytest.raises(DumpError, match=r"trained\.h5: checkpoint is 'dddddddd', expected 'cccccccc'"):
        read(texts)
    texts.reference()
    with pytest.raises(DumpError, match=r"P4\.json: older than .*trained.h5, along which it was forced"):
        read(texts)
    (texts.results / "checkpoint.json").unlink()
    with pytest.raises(DumpError, match=r"checkpoint\.json: names no checkpoint"):
        read(texts)
