import json
import shutil

import pandas as pd
import pytest

from dsv4.report.__main__ import main
from dsv4.report.load import ReportError, load
from dsv4.report.samples import CONFIG

pytestmark = pytest.mark.xdist_group("report")


@pytest.fixture
def copy(failing, tmp_path):
    """A results folder that a test may spoil."""
    return shutil.copytree(failing, tmp_path / failing.name)


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_whole_audit_has_no_gaps(failing):
    audit = load(failing, CONFIG)
    assert audit.gaps == []
    assert len(audit.ladder) == len(audit.verdicts) > 20


def test_target_is_its_lineage(failing):
    audit = load(failing, CONFIG, "B1")
    assert [rung.id for rung in audit.ladder] == ["B0_unfused", "P4", "P5", "B0", "B1a", "B1"]
    assert set(audit.metrics["variant"]) == {rung.id for rung in audit.ladder}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda v: v[3].update(taps="36"), "gates.json: variants.3.taps: '36' is not of type 'array'"),
        (lambda v: v[2].update(status="passed"), "variants.2.status: 'passed' is not one of"),
        (lambda v: v[2]["e2e"].update(kl_nats="0.1"), "variants.2.e2e.kl_nats: '0.1' is not of type"),
        (lambda v: v[0].pop("id"), "variants.0: 'id' is a required property"),
    ],
)
def test_wrong_type_is_an_error_that_names_it(copy, spoil, said):
    edit(copy / "gates.json", lambda data: spoil(data["variants"]))
    with pytest.raises(ReportError) as error:
        load(copy, CONFIG)
    assert said in str(error.value)
    assert str(copy / "gates.json") in str(error.value)


def test_text_in_a_number_column_is_an_error(copy):
    frame = pd.read_parquet(copy / "metrics.parquet").head(5)
    frame.assign(cos="high").to_parquet(copy / "metrics.parquet")
    with pytest.raises(ReportError, match=r"column cos has type .*, expected a number"):
        load(copy, CONFIG)


def test_unknown_claim_state_is_an_error(copy):
    edit(copy / "claims.json", lambda data: data[1].update(state="maybe"))
    with pytest.raises(ReportError, match="claim 1: state = 'maybe'; allowed: holds"):
        load(copy, CONFIG)


def test_crash_before_collect_shows_single_verdicts(copy):
    gates = json.loads((copy / "gates.json").read_text())["variants"][:4]
    (copy / "gates").mkdir()
    for verdict in gates:
        (copy / "gates" / f"{verdict['id']}.json").write_text(json.dumps(verdict))
    (copy / "metrics").mkdir()
    frame = pd.read_parquet(copy / "metrics.parquet")
    frame[frame["variant"] == "B0"].to_parquet(copy / "metrics" / "B0.parquet")
    (copy / "metrics" / "B1.parquet").write_bytes(b"PAR1")
    for name in ("gates.json", "metrics.parquet", "claims.json"):
        (copy / name).unlink()
    audit = load(copy, CONFIG)
    assert set(audit.verdicts) == {verdict["id"] for verdict in gates}
    assert set(audit.metrics["variant"]) == {"B0"}
    missing = {gap.what: gap.why for gap in audit.gaps}
    assert {"gates.json", "metrics.parquet", "claims.json", "metrics/B1.parquet"} <= set(missing)
    assert any(what.startswith("verdicts of") for what in missing)


def test_single_verdicts_above_a_rung_that_did_not_pass_are_not_shown(copy):
    ladder = load(copy, CONFIG).ladder
    (copy / "gates").mkdir()
    (copy / "gates.json").unlink()
    for rung in ladder:
        state = "fail" if rung.id == "P4" else "pass"
        (copy / "gates" / f"{rung.id}.json").write_text(json.dumps({"id": rung.id, "status": state}))
    assert set(load(copy, CONFIG).verdicts) == {"B0_unfused", "P4", "P4_scalar_gsa", "P4_launch_gsa"}


@pytest.mark.parametrize("keep", [(), ("gates.json",), ("metrics.parquet",), ("claims.json",)])
def test_page_is_made_from_whatever_there_is(copy, tmp_path, keep):
    for file in [path for path in copy.rglob("*") if path.is_file()]:
        if file.name not in keep:
            file.unlink()
    options = ["--results", str(copy), "--config", str(CONFIG), "--reports", str(tmp_path / "reports")]
    assert main(options) == 0
    page = (tmp_path / "reports" / "index.html").read_text()
    assert "Not whole." in page
    for name in {"gates.json", "metrics.parquet", "claims.json"} - set(keep):
        assert f"<b>{name}</b>" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--results", "nowhere"], "report: --results nowhere: no such folder"),
        (["--target", "B9"], "unknown variant 'B9'"),
        (["--config", "nowhere.yaml"], "report: --config nowhere.yaml: no ladder can be read from it"),
    ],
)
def test_bad_options_end_in_one_line(failing, tmp_path, capsys, options, said):
    base = ["--results", str(failing), "--config", str(CONFIG), "--reports", str(tmp_path / "reports")]
    assert main([*base, *options]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


def test_collected_from_nothing_is_a_gap(copy):
    pd.DataFrame().to_parquet(copy / "metrics.parquet")
    audit = load(copy, CONFIG)
    assert audit.metrics.empty
    assert "measurements" in {gap.what for gap in audit.gaps}


def test_verdict_that_says_not_run_is_a_gap_too(copy):
    def stop(data):
        for verdict in data["variants"]:
            if verdict["id"] in ("B1", "B2"):
                verdict.update(status="not_run", reasons=["the run stopped before this gate"])

    edit(copy / "gates.json", stop)
    assert [gap.why for gap in load(copy, CONFIG).gaps] == ["the run stopped before this gate"]


def test_rungs_above_a_failure_are_no_gap(copy):
    def wait(data):
        data["variants"][-4].update(status="not_run", reasons=["waits for B4_attn_out, which was not run"])

    edit(copy / "gates.json", wait)
    assert load(copy, CONFIG).gaps == []
