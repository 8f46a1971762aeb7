"""How steps are timed, by a clock that counts: turns, shares, and what has no time."""

from types import SimpleNamespace

import pytest

from dsv4.backend.paths import NoKernelError
from dsv4.config import load
from dsv4.device import Backend
from dsv4.run import times
from dsv4.run.times import Replays, beside, in_turns, measured

GPU = Backend(kind="kernel", device="cuda", name="a card", capability=(9, 0))


def replays(us, **stages):
    return Replays(step=lambda: us, stages={name: lambda took=took: took for name, took in stages.items()})


def test_each_runs_once_a_round_and_neither_is_always_first():
    order = []
    runs = {name: lambda name=name: order.append(name) or 1.0 for name in ("own", "parent")}
    taken = in_turns(runs, lambda run: run(), 4)
    assert {name: len(samples) for name, samples in taken.items()} == {"own": 4, "parent": 4}
    first = order[2::2]  # after one warming run of each
    assert set(first) == {"own", "parent"}
    assert all({*order[at : at + 2]} == {"own", "parent"} for at in range(2, len(order), 2))


def test_a_variant_beside_its_parent():
    found = beside(
        replays(90.0, attend=30.0, q_a=5.0), replays(100.0, attend=40.0, q_a=5.0), lambda run: run()
    )
    assert found["step_us"]["median"] == 90.0
    assert found["parent_us"]["median"] == 100.0
    assert found["ratio"]["median"] == pytest.approx(0.9)
    assert found["stages"] == {"attend": [30.0, 40.0], "q_a": [5.0, 5.0]}


def test_a_stage_that_launches_nothing_takes_no_time():
    found = beside(
        replays(90.0, attn_mhc=30.0), replays(100.0, attn_mhc=25.0, attn_quant=9.0), lambda run: run()
    )
    assert found["stages"] == {"attn_mhc": [30.0, 25.0], "attn_quant": [0.0, 9.0]}


def test_what_drifts_for_both_cancels_in_the_ratio():
    turns = iter(range(10_000))

    def clock(run):
        return run() * (1 + next(turns) // 2)  # slower round by round

    found = beside(replays(90.0), replays(100.0), clock)
    assert found["step_us"]["q3"] > 2 * found["step_us"]["q1"]
    assert found["ratio"]["median"] == pytest.approx(0.9, rel=0.05)


def test_the_bottom_of_the_ladder_has_no_ratio():
    found = beside(replays(90.0, attend=30.0), None, lambda run: run())
    assert found["parent_us"] is None
    assert found["ratio"] is None
    assert found["stages"] == {"attend": [30.0, None]}


@pytest.fixture
def setup():
    return SimpleNamespace(
        config=load(times.Path("config.yaml")), tokens={"a": [1, 2], "b": [3]}, backend=GPU
    )


def test_a_model_is_made_once_for_itself_and_for_those_above_it(setup, monkeypatch):
    made = []
    monkeypatch.setattr(times, "replays_of", lambda setup, plan: made.append(plan) or replays(10.0))
    monkeypatch.setattr("kernels.bench.gpu.elapsed_us", lambda run: run())
    found = measured(setup, ["B0_unfused", "P4", "P5"])
    assert len(made) == 3
    assert found["sequences"] == [2, 1]
    assert found["variants"]["P5"]["parent"] == "P4"
    assert found["variants"]["B0_unfused"]["ratio"] is None


def test_what_has_no_kernels_and_the_interpreter_are_not_timed(setup, monkeypatch):
    def refuse(setup, plan):
        raise NoKernelError("no kernel for this plan")

    monkeypatch.setattr(times, "replays_of", refuse)
    assert measured(setup, ["KV_nvfp4"])["variants"] == {"KV_nvfp4": {"why_not": "no kernel for this plan"}}
    setup.backend = Backend(kind="kernel", device="cpu", name="Triton's interpreter")
    found = measured(setup, ["B0_unfused"])["variants"]["B0_unfused"]
    assert found == {"why_not": "Triton's interpreter is no device to time"}
