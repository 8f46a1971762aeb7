import json
import shutil

import pandas as pd
import pytest

from dsv4.report.load import ReportError, load
from dsv4.report.samples import CONFIG

pytestmark = pytest.mark.xdist_group("report")


@pytest.fixture
def copy(passing, tmp_path):
    """A results folder that a test may spoil, without measurements."""
    copy = shutil.copytree(passing, tmp_path / passing.name)
    pd.read_parquet(copy / "metrics.parquet").head(0).to_parquet(copy / "metrics.parquet")
    return copy


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_texts_of_the_wanted_rungs_are_read(copy):
    texts = load(copy, CONFIG, "B1").texts
    assert list(texts.documents) == ["B0_unfused", "P4", "P5", "B0", "B1a", "B1"]
    assert set(texts.forced["variant"]) == set(texts.documents)
    assert texts.residual["verdict"] == "not_exercised"


def test_a_text_of_a_rung_that_passes_no_more_is_not_shown(copy):
    edit(copy / "gates.json", lambda data: data["variants"][0].update(status="fail"))
    audit = load(copy, CONFIG)
    assert audit.verdicts["B0_unfused"]["status"] == "fail"
    assert "B0_unfused" not in audit.texts.documents


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("text/B1.json", lambda d: d.update(schema=2), "text/B1.json: schema: 1 was expected"),
        (
            "text/B1.json",
            lambda d: d["prompts"]["code"]["reference"].update(reason="bored"),
            "prompts.code.reference.reason: 'bored' is not one of",
        ),
        (
            "residual.json",
            lambda d: d.update(verdict="maybe"),
            "residual.json: verdict: 'maybe' is not one of",
        ),
    ],
)
def test_wrong_type_is_an_error_that_names_it(copy, file, spoil, message):
    edit(copy / file, spoil)
    with pytest.raises(ReportError) as error:
        load(copy, CONFIG)
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_a_gap(copy):
    (copy / "text/B1.json").write_text("{")
    (copy / "text/B2.parquet").write_bytes(b"PAR1")
    (copy / "text/B3.parquet").unlink()
    gaps = {gap.what: gap.why for gap in load(copy, CONFIG).gaps}
    assert gaps["B1.json"].startswith("cannot be read")
    assert gaps["B2.parquet"].startswith("cannot be read")
    assert gaps["B3.parquet"] == "is missing beside its .json: run snakemake again"


def test_a_table_without_its_columns_is_an_error(copy):
    pd.read_parquet(copy / "text/B1.parquet").drop(columns="kl_nats").to_parquet(copy / "text/B1.parquet")
    with pytest.raises(ReportError, match=r"B1\.parquet: columns kl_nats are missing"):
        load(copy, CONFIG)
