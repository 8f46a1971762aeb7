"""The stages of a branch take the same options, and each says which it misses."""

import pytest

from dsv4.code_inputs import ROOT
from dsv4.commits import audit, bisect, verify
from dsv4.commits.options import configured, ends, parser
from dsv4.config import ConfigError

FILE = ["--config", str(ROOT / "config.yaml"), "--results", "results/run"]


def test_what_a_command_line_names_is_put_over_the_file():
    config = configured(parser("").parse_args([*FILE, "--base", "main", "--head", "mine", "--rung", "B0"]))
    assert ends(config, "commits") == ("main", "mine")
    assert config.commits.rung == "B0"
    with pytest.raises(ConfigError, match="rung=B77: no such rung"):
        configured(parser("").parse_args([*FILE, "--rung", "B77"]))


@pytest.mark.parametrize(
    ("stage", "target"), [(audit, "commits"), (bisect, "bisect"), (verify, "verify_commits")]
)
@pytest.mark.parametrize(
    "given", [[], ["--base", "main"], ["--head", "mine"]], ids=["neither", "base", "head"]
)
def test_a_stage_without_both_ends_is_refused_by_its_name(stage, target, given):
    with pytest.raises(ConfigError, match=f"^{target}: give base and head"):
        stage.main([*FILE, *given])
