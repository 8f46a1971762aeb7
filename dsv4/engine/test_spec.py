"""How config.yaml names engines: what is refused, what a change of the engine is, what a pattern declares."""

import subprocess

import pytest
import yaml

from dsv4.config import ConfigError, load
from dsv4.dump import DumpReader
from dsv4.engine.conftest import ROOT, with_rungs
from dsv4.engine.spec import declares, identity, parse_engine
from dsv4.plan import Plan, change
from dsv4.run.floor import write_floors

pytestmark = pytest.mark.xdist_group("engine")


def configured(folder, engines, rung, **more):
    content = yaml.safe_load((ROOT / "config.yaml").read_text()) | more
    content["engines"] = engines
    content["ladder"]["Mine"] = {"parent": "B0_unfused", "why": "mine"} | rung
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return load(path)


def test_a_rung_on_another_engine_changes_the_engine_and_claims_a_plan(tmp_path):
    fields = {"norm_quant": "fused", "mhc_quant": "fused"}
    config = configured(tmp_path, {"mine": {"command": ["./run"]}}, {"engine": "mine", "set": fields})
    rung = config.ladder["Mine"]
    assert rung.change == {"engine": ("own model", "mine")}
    assert rung.plan == change(Plan(), fields)
    assert config.engines["mine"].command == ("./run",)


def test_a_rung_above_stays_on_its_parents_engine_and_changes_one_field(tmp_path):
    content = yaml.safe_load((ROOT / "config.yaml").read_text())
    content["engines"] = {"mine": {"command": ["./run"]}}
    content["ladder"]["Mine"] = {"parent": "B0_unfused", "why": "mine", "engine": "mine"}
    content["ladder"]["Next"] = {"parent": "Mine", "why": "next", "set": {"kv_read": "in_place"}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    rung = load(path).ladder["Next"]
    assert (rung.engine, rung.change) == ("mine", {"kv_read": ("gather_bf16", "in_place")})
    content["ladder"]["Next"]["set"]["q_format"] = "fp8"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="a rung changes exactly one field"):
        load(path)


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ({}, r"ladder.Mine.engine = 'mine': no such engine; engines: none"),
        ({"mine": {}}, r"engines.mine: give either `command`"),
        ({"mine": {"command": ["x"], "dump": "data"}}, r"give either `command`"),
        ({"mine": {"dump": "data", "repo": "data"}}, r"`repo` goes with `command`"),
        ({"mine": {"command": ["x"], "repo": "/no/such"}}, r"engines.mine.repo = /no/such: no such folder"),
        ({"mine": {"command": ["x"], "missing": ["attn_outt"]}}, r"no tap 'attn_outt'; taps: attn_pre"),
        (
            {"mine": {"command": ["x"], "missing": ["fast/*/q"]}},
            r"'fast/\*/q' is neither a tap nor mode/layer/tap",
        ),
        ({"mine": {"command": ["x"], "ranks": {"n": 2, "merge": {"qq": 1}}}}, r"no tap 'qq'"),
        ({"mine": {"command": ["x"], "ranks": {"merge": {}}}}, r"key 'n' is missing"),
        ({"mine": {"command": ["x"], "speed": 1}}, r"unknown key 'speed'; keys: command, repo, dump"),
        ({"mine": {"command": []}}, r"engines.mine.command: \[\]"),
        ({"Mine": {"command": ["x"]}}, r"name 'Mine' must match"),
    ],
)
def test_a_bad_entry_is_refused_by_name(tmp_path, engines, said):
    with pytest.raises(ConfigError, match=said):
        configured(tmp_path, engines, {"engine": "mine"})


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        ("q", {"isolated/0/q", "isolated/model/q", "compounded/0/q"}),
        ("compounded/*/*", {"compounded/0/q", "compounded/0/kv"}),
        ("*/model/*", {"isolated/model/q"}),
        ("*/0/k*", {"isolated/0/kv", "compounded/0/kv"}),
    ],
)
def test_patterns_declare_what_they_match(pattern, places):
    every = {"isolated/0/q", "isolated/0/kv", "isolated/model/q", "compounded/0/q", "compounded/0/kv"}
    assert {place for place in every if declares([pattern], *place.split("/"))} == places


def test_an_engine_is_another_one_when_its_tree_its_files_or_its_entry_change(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "run.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    content = {"command": ["python", "run.py"], "repo": str(tmp_path)}
    seen = [identity(parse_engine("mine", content))]
    assert identity(parse_engine("mine", content)) == seen[0]
    (tmp_path / "other.py").write_text("2")  # untracked
    seen.append(identity(parse_engine("mine", content)))
    (tmp_path / "run.py").write_text("3")  # not committed
    seen.append(identity(parse_engine("mine", content)))
    git("commit", "-qam", "two")
    seen.append(identity(parse_engine("mine", content)))
    seen.append(identity(parse_engine("mine", content | {"missing": ["q"]})))
    assert len(set(seen)) == 5


@pytest.mark.parametrize(("sums", "unit"), [("", 2.0**-24), ("fp32", 2.0**-24), ("hopper_fp8", 2.0**-13)])
def test_an_engine_says_how_it_sums_and_its_floor_is_drawn_so(tiny, sums, unit):
    content = {"command": ["x"]} | ({"sums": sums} if sums else {})
    setup = with_rungs(tiny, {"mine": content}, {"Mine": {"engine": "mine"}})
    write_floors(setup, setup.config.ladder["Mine"])
    where = ("isolated", "decode", 0, "q")
    with (
        DumpReader(setup.results / "floor/Mine/one.h5") as floor,
        DumpReader(setup.results / "floor/Exact/one.h5") as own,
    ):
        assert floor.attrs["sums"]["fp8"] == unit
        drawn, before = (dump.dataset_attrs(*where)["draw_distance"] for dump in (floor, own))
    assert len(drawn) == len(before) > 0
