"""What an engine gives back is checked before it is judged: every refusal names tap, expected and got."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dsv4.dump import DumpReader
from dsv4.engine.conftest import STORES, verdict, with_rungs
from dsv4.engine.job import Ask, write_job
from dsv4.engine.spec import EngineError
from dsv4.engine.tap_writer import Job, serve
from dsv4.engine.variant import ask_engine, write_engine_variant
from dsv4.ladder import State

pytestmark = pytest.mark.xdist_group("engine")

MISSING = [*STORES, "comp_store", "comp_bytes", "index_k_store", "compounded/*/*"]
KV = "isolated/one/0"


def echo(job_folder, rank=0, change=None, run=None, run_batch=None, **about):
    """An engine that gives back the reference's own values; ``change(layer, taps)`` spoils them."""
    job = Job(job_folder, rank)
    wanted = job.content["taps"]["isolated"]

    def run_layer(layer, inputs, choices):
        known = inputs | choices
        (prompt,) = (p for p in job.content["prompts"] if p["tokens"] == inputs["sequence"].tolist())
        for name in ("comp", "index_k"):
            if name in wanted[str(layer)]:
                ratio = {2: "4", 3: "8"}[layer]
                known[name] = inputs[f"history.{name}"][prompt["entries"][ratio]]
        taps = {name: known[name].copy() for name in wanted[str(layer)] if name in known}
        return change(layer, taps) or taps if change else taps

    serve(job, run_layer, run, run_batch, **{"device": "echo"} | about)


def asked(tiny, change=None, missing=MISSING, ranks=None, after=None, **about):
    """Audit with a rung on an engine that echoes, and how that engine is started."""
    content = {"command": ["echo"], "missing": missing} | ({"ranks": ranks} if ranks else {})
    setup = with_rungs(tiny, {"echo": content}, {"Echo": {"engine": "echo"}})

    def start(engine, job):
        for rank in range(engine.ranks):
            echo(job, rank, partial(change, rank=rank) if ranks else change, **about)
        if after:
            after(Path(job) / "out" / "rank0")

    return setup, start


def answered(tiny, *arguments, **options):
    """Verdict on an engine that echoes, and its audit."""
    setup, start = asked(tiny, *arguments, **options)
    write_engine_variant(setup, setup.config.ladder["Echo"], start)
    return verdict(setup, "Echo"), setup


def refusal(tiny, *arguments, **options):
    """The sentence of an answer that is refused."""
    setup, start = asked(tiny, *arguments, **options)
    ask = Ask(modes=("isolated",), prompts=("one",))
    with pytest.raises(EngineError) as refused:
        ask_engine(setup, setup.config.engines["echo"], setup.config.ladder["Echo"], ask, start)
    return str(refused.value)


def at(layer, tap, value):
    """Spoil one tap of one layer."""

    def change(here, taps):
        if here == layer:
            taps[tap] = value(taps[tap])

    return change


def test_the_reference_itself_is_judged_like_any_answer(tiny):
    found, setup = answered(tiny, version="7")
    assert found["culprit"]["stage"] == "attend"  # trained's attention reads FP8 keys, which Exact does not
    with DumpReader(setup.results / "variants" / "Echo" / "one.h5") as dump:
        assert dump.attrs["label"] == "engine echo on echo"
        assert dump.attrs["backend"] == "engine"
        assert "emulated" not in dump.attrs
        with DumpReader(setup.results / "reference" / "one.h5") as reference:
            for phase in ("prefill", "decode"):
                for layer in reference.layers("isolated", phase):
                    for tap in dump.taps("isolated", phase, layer):
                        ours, theirs = (side.get("isolated", phase, layer, tap) for side in (dump, reference))
                        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at(0, "q", lambda x: x[:, :2]), f"{KV}/q is [9, 2, 128], expected [9, 4, 128]"),
        (at(0, "kv", lambda x: x[1:]), f"{KV}/kv is [8, 128], expected [9, 128] (a line for each judged row"),
        (at(2, "comp", lambda x: x[:-1]), "(a line for each judged entry, then head_dim)"),
        (at(0, "q", lambda x: x.astype(np.float64)), f"{KV}/q is float64, expected float32 or float16"),
        (
            at(0, "expert_ids", lambda x: x.astype(np.float32)),
            "expert_ids is float32, expected int32 or int64",
        ),
        (at(0, "expert_ids", lambda x: x.astype(np.int64) << 40), "expert_ids has ids beyond 32 bits"),
        (
            lambda layer, taps: taps | {"attn_outt": taps["q"]} if layer == 0 else None,
            "Did you mean attn_out?",
        ),
        (
            lambda layer, taps: taps | {"kv_store": taps["q"]} if layer == 0 else None,
            "is declared missing, but",
        ),
    ],
    ids=["shape", "rows", "entries", "dtype", "ids", "wide ids", "name", "declared"],
)
def test_what_was_not_asked_for_is_refused(tiny, change, said):
    reason = refusal(tiny, change)
    assert said in reason
    assert reason.startswith("engine echo: ")


def test_a_tap_that_is_missing_and_not_declared_fails(tiny):
    def drop(layer, taps):
        if layer == 1:
            del taps["attn_out"]

    found, _ = answered(tiny, drop)
    assert found["status"] == State.FAIL
    assert (
        "layer 1, attn_out (attend) was not dumped (isolated, decode, prefill) and no adapter declared it"
        in (found["reasons"])
    )
    found, _ = answered(tiny, drop, missing=[*MISSING, "*/1/attn_out"])
    assert not [reason for reason in found["reasons"] if "was not dumped" in reason]


def test_values_that_are_not_finite_are_kept_and_counted(tiny):
    def spoil(x):
        x[3, 5], x[4, 6] = np.nan, np.inf
        return x

    found, _ = answered(tiny, at(0, "attn_in", spoil))
    assert found["status"] == State.FAIL
    assert found["reasons"][0].startswith("layer 0, attn_in (attn_mhc): ")
    assert "NaN or Inf" in found["reasons"][0]


def test_a_rung_on_its_parents_engine_may_move_only_what_its_field_claims(tiny):
    """Blast radius between two runs of one engine; the job says which plan is asked."""
    above = {"Echo": {"engine": "echo"}, "Next": {"parent": "Echo", "set": {"kv_read": "in_place"}}}
    setup = with_rungs(tiny, {"echo": {"command": ["echo"], "missing": MISSING}}, above)
    asked = []

    def start(engine, job):
        asked.append(json.loads((job / "job.json").read_text())["plan"]["kv_read"])
        echo(job, 0, at(1, "qr", lambda x: x * np.float32(1.5)) if asked[-1] == "in_place" else None)

    for name in above:
        write_engine_variant(setup, setup.config.ladder[name], start)
        found = verdict(setup, name)
    assert asked == ["gather_bf16", "in_place"]
    assert found["blast_radius"] == {"ok": False, "changed": ["layer 1 qr"]}
    assert any(reason.startswith("blast radius: layer 1, qr (q_a) differs") for reason in found["reasons"])


def rewrite(**changes):
    def after(out):
        manifest = json.loads((out / "manifest.json").read_text())
        (out / "manifest.json").write_text(json.dumps(manifest | changes))

    return after


def broken(content):
    """Another content of one layer's file; None: its second half is lost."""

    def after(out):
        path = out / "isolated/one/0.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)

    return after


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (lambda out: (out / "manifest.json").unlink(), "manifest.json is missing: it did not finish"),
        (rewrite(schema=9), "schema is 9, expected 1; copy dsv4/engine/tap_writer.py again"),
        (rewrite(job="another"), "job is 'another', expected"),
        (rewrite(speed=3), "unknown key speed; keys: device, version"),
        (rewrite(exercised={"clamp": 1}), "unknown key clamp"),
        (lambda out: (out / "manifest.json").write_text("{"), "manifest.json: no valid JSON"),
        (lambda out: (out / "manifest.json").write_text("[]"), "is no object of keys"),
        (broken(b"\x09"), "no safetensors file: its header cannot be read (JSONDecodeError"),
        (
            broken(b"\x02" + bytes(7) + b"[]"),
            "no safetensors file: its header cannot be read (TypeError",
        ),
        (
            broken(b"\x08" + bytes(7) + b'{"q": 1}'),
            "no safetensors file: its header cannot be read (TypeError",
        ),
        (broken(None), ": cut short"),
        (
            lambda out: (out / "isolated/one/1.safetensors").rename(out / "isolated/one/01.safetensors"),
            "01.safetensors was not asked for; near it: isolated/one/1.safetensors",
        ),
        (lambda out: (out.parent / "rank1").mkdir(), "holds rank1 too; set engines.echo.ranks.n"),
    ],
    ids=[
        *(
            "unfinished",
            "schema",
            "job",
            "key",
            "exercised",
            "json",
            "list",
            "no header",
            "header a list",
            "entry",
        ),
        *("cut short", "layer", "ranks"),
    ],
)
def test_files_that_do_not_answer_the_job_are_refused(tiny, after, said):
    assert said in refusal(tiny, after=after)


MERGE = {"n": 2, "merge": {"q": 1, "attn_out": -2}}


class TestRanks:
    """Two ranks: heads are split, all else is the same in both."""

    @staticmethod
    def split(layer, taps, rank):
        for name in ("q", "attn_out"):
            if name in taps:
                taps[name] = taps[name][:, 2 * rank : 2 * rank + 2]

    def test_declared_axes_are_joined(self, tiny):
        answered(tiny, self.split, ranks=MERGE)
        with (
            DumpReader(tiny.results / "variants" / "Echo" / "one.h5") as dump,
            DumpReader(tiny.results / "reference" / "one.h5") as reference,
        ):
            for tap in ("q", "attn_out", "kv"):
                ours, theirs = (side.get("isolated", "decode", 2, tap) for side in (dump, reference))
                np.testing.assert_array_equal(ours, theirs)

    def test_an_undeclared_split_is_refused(self, tiny):
        reason = refusal(tiny, self.split, ranks={"n": 2, "merge": {"q": 1}})
        assert (
            "attn_out differs between rank 0 (9, 2, 128) and rank 1 (9, 2, 128); give its axis in" in reason
        )

    def test_partial_sums_are_refused(self, tiny):
        def partial(layer, taps, rank):
            self.split(layer, taps, rank)
            if "routed" in taps:
                taps["routed"] = taps["routed"] * np.float32(rank)

        assert "record it after the reduction" in refusal(tiny, partial, ranks=MERGE)

    def test_a_rank_without_its_part_is_refused(self, tiny):
        def one(layer, taps, rank):
            self.split(layer, taps, rank)
            if rank:
                taps.pop("q", None)

        reason = refusal(tiny, one, ranks=MERGE)
        assert "q is merged on axis 1, but of 2 ranks only 0 gave it" in reason

    def test_an_axis_that_does_not_fit_is_refused(self, tiny):
        reason = refusal(tiny, self.split, ranks={"n": 2, "merge": {"q": 2, "attn_out": 1}})
        assert "q is [9, 2, 256], expected [9, 4, 128]" in reason


def test_a_finished_dump_is_judged_like_a_process_and_an_old_one_is_refused(tiny, tmp_path):
    setup, _ = asked(tiny)
    write_job(setup, setup.config.ladder["Echo"], tmp_path / "job")
    echo(tmp_path / "job")
    given = {"dump": str(tmp_path / "job"), "missing": MISSING}
    setup = with_rungs(tiny, {"there": given}, {"There": {"engine": "there"}})
    write_engine_variant(setup, setup.config.ladder["There"])
    assert verdict(setup, "There")["culprit"]["stage"] == "attend"
    rewrite(job="of another reference")(tmp_path / "job/out/rank0")
    write_engine_variant(setup, setup.config.ladder["There"])
    assert "the dump answers another job: run it again" in verdict(setup, "There")["reasons"][0]
