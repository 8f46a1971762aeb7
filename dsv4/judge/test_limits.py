import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from dsv4.config import load
from dsv4.judge import derive_claims, derive_limits
from dsv4.judge.evaluate import WORST
from dsv4.judge.evidence import OPS_FILE
from dsv4.judge.limits import FILE, LimitError, derived, limits, tightened
from dsv4.plan import Plan, choices, flatten
from dsv4.taps import BY_NAME, layer_taps

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("derive", "file"),
    [(derive_limits.derive, FILE), (derive_claims.derive, OPS_FILE)],
    ids=["limits", "claims"],
)
def test_the_committed_numbers_are_what_the_script_derives(derive, file):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = derive()
    finally:
        torch.set_num_threads(threads)
    # Two digits: sums in another order move the last one, and a limit does not hang on it.
    assert found == pytest.approx(json.loads(file.read_text())["values"], rel=0.02, abs=1e-9)


def test_every_limit_says_where_it_comes_from():
    for limit in limits():
        assert limit.source.startswith("dsv4/judge/derive_limits.py: ")
        assert limit.source.split(": ")[1] in derived()
        assert limit.name.startswith(f"{limit.tap}.")
        assert limit.against in limit.name
        assert all(set(values) <= set(choices()[field]) for field, values in limit.when)


def test_limits_stand_where_the_formats_put_them():
    """Closed forms: a uniform error in a code's step, for values spread over a binade."""
    values = derived()
    bf16 = 2**-8 / 3**0.5 * 0.72  # step 2^-7 at 1..2, rms of the value there 1.5
    assert bf16 < values["bf16.rel_l2"] < 2 * bf16
    assert values["bf16_rope.rel_l2"] < 2**-8  # no value can be off by more than half a step
    assert 0.0264 < values["fp8_nope.rel_l2"] < 2**-4
    assert 0.09 < values["nvfp4.rel_l2"] < 0.14
    assert values["nvfp4.rel_l2"] < values["q.rel_l2"] < 2 * values["nvfp4.rel_l2"]
    assert values["fp8_nope.rel_l2"] < 0.09  # the 4-bit record is outside the 8-bit one's budget


PRO = (128, 128, *(4, 128) * 29, 4)  # compress_ratios of DeepSeek-V4-Pro, the largest model
ROWS = 113  # judged rows of an audit's prompts


def test_the_false_alarm_rate_is_of_all_comparisons_of_the_largest_audit():
    layers = Counter(tap.name for ratio in PRO for tap in layer_taps(ratio))
    made = 0
    for variant in load(ROOT / "config.yaml").ladder:
        for limit in limits():
            if limit.applies(flatten(variant.plan)):
                made += max(layers[limit.tap], 1) * (ROWS if limit.metric in WORST else 1)
    assert derive_limits.COMPARISONS / 2 < made <= derive_limits.COMPARISONS


def test_the_limits_of_a_plan_do_not_contradict():
    for field, allowed in choices().items():
        for value in allowed:
            plan = flatten(Plan()) | {field: value}
            seen = [(x.tap, x.part, x.metric, x.against, x.mode) for x in limits() if x.applies(plan)]
            assert len(seen) == len(set(seen))


def test_what_is_stored_computed_and_chosen_is_limited():
    bounded = {limit.tap for limit in limits()}
    bare = {
        "kv_bytes",
        "comp_bytes",
        "topk",
        "expert_weights",
    }  # judged by the floor, or through what they come from
    assert set(BY_NAME) - bounded == bare


def test_config_may_only_tighten():
    limit = next(x for x in limits() if x.name == "attn_in.rel_l2.trained")
    (mine,) = [x for x in tightened({limit.name: limit.value / 2}) if x.name == limit.name]
    assert (mine.value, mine.source) == (limit.value / 2, "config.yaml: tighten")
    assert len(tightened({})) == len(limits())


@pytest.mark.parametrize(
    ("tighten", "message"),
    [
        (
            {"attn_in.rel_l2.trained": 0.5},
            r"tighten\.attn_in\.rel_l2\.trained = 0\.5 is looser than at most 0\.00",
        ),
        ({"attn_out.cos.B0.q_fp8": 0.5}, r"= 0\.5 is looser than at least 0\.99"),
        ({"attn_in.rel_l2.trained": float("nan")}, "looser"),
        ({"cosine": 0.9}, "no limit 'cosine'; limits: attn_comb"),
    ],
    ids=["max", "min", "NaN", "unknown"],
)
def test_loosening_is_refused(tighten, message):
    with pytest.raises(LimitError, match=message):
        tightened(tighten)
