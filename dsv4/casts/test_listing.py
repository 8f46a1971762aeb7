"""Markers, the command, and the list of this project: empty or exempt after B4."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from dsv4 import config as configuration
from dsv4.casts.hits import Direction, Status
from dsv4.casts.listing import _seen, listed
from dsv4.casts.markers import applied, checked, markers
from dsv4.casts.sweep import SweepError, files_of, sweep
from dsv4.casts.trace import Casts

pytestmark = pytest.mark.xdist_group("casts")

ROOT = Path(__file__).parents[2]
CONFIG = configuration.load(ROOT / "config.yaml")
RUNGS = [rung.id for rung in CONFIG.ladder.spine()]
WASTE = "import torch\ndef f(a):\n    x = a.bfloat16()\n    return x.float(){}\n"


def judged(tmp_path, source):
    (tmp_path / "one.py").write_text(source)
    found = sweep(tmp_path)
    said, wrong = markers("one.py", source)
    casts, problems = applied(found.casts, said, RUNGS)
    return [cast for cast in casts if cast.status is not Status.FREE], [*wrong, *problems]


def test_a_reason_exempts_and_a_rung_fixes(tmp_path):
    ((cast,), problems) = judged(tmp_path, WASTE.format("  # cast: exempt(the store (of 584 B) is narrow)"))
    assert (cast.status, cast.reason) == (Status.EXEMPT, "the store (of 584 B) is narrow")
    assert problems == []
    ((cast,), problems) = judged(tmp_path, WASTE.format("  # cast: fixed(B4_router)"))
    assert (cast.status, cast.reason) == (Status.FIXED, "B4_router")
    assert problems == []


def test_a_marker_alone_is_about_the_next_line(tmp_path):
    source = WASTE.replace("    return", "    # cast: exempt(meant)\n    return").format("")
    ((cast,), problems) = judged(tmp_path, source)
    assert cast.status is Status.EXEMPT
    assert problems == []


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("# cast: exempt()", "without a reason"),
        ("# cast: exempt(  )", "without a reason"),
        ("# cast: exempt", "says nothing"),
        ("# cast: ignore(me)", "says nothing"),
        ("# cast: fixed(B9)", "no rung 'B9' on the ladder's spine"),
        ("# cast: fixed(B1_aligned)", "no rung 'B1_aligned' on the ladder's spine"),
    ],
)
def test_a_marker_that_cannot_stand_exempts_nothing(tmp_path, marker, said):
    (cast,), (problem,) = judged(tmp_path, WASTE.format(f"  {marker}"))
    assert cast.status is Status.OPEN
    assert said in problem.said
    assert problem.line == 4


def test_a_marker_without_a_cast_is_stale(tmp_path):
    (cast,), (problem,) = judged(tmp_path, "x = 1  # cast: exempt(once was one)\n" + WASTE.format(""))
    assert (problem.line, problem.said) == (1, "stale: no cast on line 1")
    assert cast.status is Status.OPEN


def test_a_rung_that_still_casts_has_not_fixed_it(tmp_path):
    (cast,), _ = judged(tmp_path, WASTE.format("  # cast: fixed(B4_router)"))
    spine = ["B3", "B4_router", "B4_head"]
    assert checked([cast], spine, {cast.key: {"B3": 96}}) == [cast]
    (left,) = checked([cast], spine, {cast.key: {"B3": 96, "B4_head": 96}})
    assert left.status is Status.OPEN
    assert left.reason == "said to be fixed by B4_router, and moves 96 bytes a step in B4_head"


def test_a_trace_counts_bytes_read_and_written_by_line_and_column(tmp_path):
    """Two casts of one line are told apart, and found at the places that the sweep gives."""
    source = "import torch\ndef f(x):\n    return x.float() + x.double().half() + x.to(x.dtype)\n"
    (tmp_path / "one.py").write_text(source)
    names = {}
    exec(compile(source, str(tmp_path / "one.py"), "exec"), names)
    with Casts(tmp_path) as seen:
        names["f"](torch.ones(3, 5, dtype=torch.bfloat16, device="meta"))
    sizes = {(spot.line, spot.column): size for (spot, _), size in seen.bytes.items()}
    up, double, half = (
        source.split("\n")[2].index(end) + len(end) for end in ("float()", "double()", "half()")
    )
    assert sizes == {(3, up): 15 * (2 + 4), (3, double): 15 * (2 + 8), (3, half): 15 * (8 + 2)}
    assert set(seen.calls.values()) == {1}
    assert {(cast.line, cast.column) for cast in sweep(tmp_path).casts} >= sizes.keys()


def test_files_that_do_not_parse_are_warned_of_and_the_rest_is_swept(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "two.py").write_text("print 'two'\n")
    (tmp_path / "good.py").write_text(WASTE.format(""))
    found = sweep(tmp_path)
    assert [cast.file for cast in found.casts if cast.status is Status.OPEN] == ["good.py"]
    assert [line.partition(":")[0] for line in found.warnings] == ["broken.py", "latin.py", "two.py"]


def test_what_cannot_be_swept_is_refused(tmp_path):
    with pytest.raises(SweepError, match="no such file"):
        files_of(tmp_path, [Path("nowhere.py")])
    with pytest.raises(SweepError, match="not below --root"):
        files_of(tmp_path, [ROOT / "dsv4"])
    with pytest.raises(SweepError, match="no such folder"):
        files_of(tmp_path / "nowhere", [])


@pytest.mark.parametrize(("marker", "status"), [("", 1), ("  # cast: exempt(meant)", 0)])
def test_the_command_exits_1_while_something_is_open(tmp_path, marker, status):
    (tmp_path / "one.py").write_text(WASTE.format(marker))
    out = tmp_path / "casts.json"
    command = [sys.executable, "-m", "dsv4", "casts", "--root", str(tmp_path), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "one.py:4" in done.stdout
    (cast,) = [each for each in json.loads(out.read_text())["casts"] if each["status"] != "free"]
    assert (cast["line"], cast["producer"]["line"], cast["grep"]) == (4, 3, True)
    assert (cast["bytes_now"], cast["bytes_fixed"]) == (12, 8)


TREE = {
    "single_shot_inference.py": """
        import torch
        from dsv4.layers.indexer import Indexer
        from dsv4.ops import norm as norms

        def step(tokens, indexer: Indexer, w):
            x = norms.rmsnorm(tokens, w)
            wide = x.float()
            scores = indexer(wide)
            return torch.softmax(scores.float(), -1)
        """,
    "dsv4/layers/__init__.py": "",
    "dsv4/layers/indexer.py": """
        import torch
        from ..ops.norm import rmsnorm

        class Indexer:
            def __init__(self, n):
                self.keys = torch.zeros(n, dtype=torch.float8_e4m3fn)

            def __call__(self, x):
                q_idx = self.project(x)
                return torch.einsum("tnd,cd->tnc", q_idx.float(), self.keys.float())

            def project(self, x):
                return rmsnorm(x, x, dtype=torch.bfloat16)
        """,
    "dsv4/ops/__init__.py": "",
    "dsv4/ops/norm.py": """
        import torch

        def rmsnorm(x, w, dtype=torch.bfloat16):
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
            return (y * w).to(dtype)
        """,
}


def test_a_tree_of_several_files_is_followed_across_them(tmp_path):
    """The plan's own example: the indexer's FP32 einsum over BF16 queries and FP8 keys."""
    for name, source in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(source))
    paths = [Path("single_shot_inference.py"), Path("dsv4/layers"), Path("dsv4/ops")]
    listing = listed(tmp_path, paths, CONFIG)
    found = {(cast.file, cast.line, cast.text): cast for cast in listing.open}
    assert [(file, line, text) for file, line, text in sorted(found)] == [
        ("dsv4/layers/indexer.py", 11, "q_idx.float()"),
        ("dsv4/layers/indexer.py", 11, "self.keys.float()"),
        ("single_shot_inference.py", 8, "x.float()"),
    ]
    query, keys, wide = (found[key] for key in sorted(found))
    assert {cast.direction for cast in found.values()} == {Direction.WIDENED}
    assert (query.producer.line, query.source) == (10, "bfloat16")
    assert query.producer.text == "self.project(x) in dsv4/layers/indexer.py:14"
    assert (keys.producer.line, keys.source) == (7, "float8_e4m3fn")
    assert query.consumer.text == keys.consumer.text == "torch.einsum(…)"
    assert (wide.producer.line, wide.producer.text) == (7, "norms.rmsnorm(tokens, w) in dsv4/ops/norm.py:6")
    assert (wide.consumer.line, wide.consumer.text) == (9, "indexer(…)")
    assert len(listing.greps) == 3  # lines; the indexer's holds two casts
    assert all(cast for _, _, cast in listing.greps)


def test_what_ran_counts_over_what_the_source_says(tmp_path):
    """A widening that the sweep took for none is open, as is one that it did not see; producers of others go."""
    (tmp_path / "one.py").write_text("import torch\ndef f(n):\n    x = torch.ones(n)\n    return x.float()\n")
    (free,) = sweep(tmp_path).casts
    assert (free.status, free.producer.line, free.bytes_now) == (Status.FREE, 3, None)
    kinds = {free.key: (4, "bfloat16", "float32"), ("two.py", 9, 20): (8, "float32", "bfloat16")}
    one, two = _seen([free], kinds)
    assert (one.status, one.direction, one.source, one.producer) == (
        Status.OPEN,
        Direction.WIDENED,
        "bfloat16",
        None,
    )
    assert (two.status, two.direction, two.line) == (Status.OPEN, Direction.NARROWED, 8)
    assert two.reason == "seen in a step only"
    assert _seen([free], {}) == [free]


def test_a_plan_without_kernels_is_not_traced_and_said(monkeypatch):
    rung = CONFIG.ladder["B4_head"]
    nvfp4 = dataclasses.replace(rung, plan=dataclasses.replace(rung.plan, kv_format="nvfp4"))
    monkeypatch.setattr(type(CONFIG.ladder), "spine", lambda _: [CONFIG.ladder["B3"], nvfp4])
    listing = listed(ROOT, [], CONFIG)
    assert listing.rungs == ("B3",)
    (said,) = listing.warnings
    assert said.startswith("B4_head: no step was traced: ")


@pytest.fixture(scope="module")
def ours():
    return listed(ROOT, [], CONFIG)


def test_nothing_of_this_project_is_open_after_b4_and_every_marker_stands(ours):
    assert [f"{cast.file}:{cast.line} {cast.text}" for cast in ours.open] == []
    assert ours.problems == ()
    assert ours.warnings == ()
    assert all(cast.reason for cast in ours.hits)


def test_each_site_of_the_plan_is_a_cast_that_its_rung_does_without(ours):
    """Of the two that torch casts the trace shows it; the other two round in a kernel's store."""
    rungs = [rung for rung in RUNGS if rung.startswith("B4_")]
    found = {cast.reason: cast for cast in ours.hits if cast.status is Status.FIXED}
    assert set(rungs) <= set(found)
    for rung in ("B4_router", "B4_head"):
        cast = found[rung]
        before = ours.rungs[ours.rungs.index(rung) - 1]
        assert ours.bytes_in(cast, before) > 0
        assert ours.bytes_in(cast, rung) == 0


def test_the_cast_that_costs_most_is_b2s(ours):
    """The FP32 einsum of 300 // 4 = 75 keys a layer, widened from FP8: 128 values of 1 B read and 4 B written."""
    first = ours.casts[0]
    assert (first.file, first.reason, first.direction) == ("kernels/formats/e4m3.py", "B2", Direction.WIDENED)
    layers = sum(
        ratio == 4 for ratio in json.loads((ROOT / "data/nano/config.json").read_text())["compress_ratios"]
    )
    assert ours.bytes_in(first, "B0") % (layers * 128 * 5) == 0
    assert ours.bytes_in(first, "B2") == 0


def test_every_line_of_the_plans_grep_is_listed(ours):
    listed_lines = {(cast["file"], cast["line"]) for cast in ours.as_json()["casts"]}
    greps = [(file, line) for file, line, cast in ours.greps if cast]
    assert len(greps) == len(ours.greps) > 0
    assert set(greps) <= listed_lines
