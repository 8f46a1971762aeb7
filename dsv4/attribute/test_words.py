"""What is said of an attribution, and that chance is called chance."""

import numpy as np
import pytest

from dsv4.attribute.words import standing_out, words


def op(name, returned, se=0.01, same=False, **more):
    return {"op": name, "returned": returned, "se": se, "same_bits": same, **more}


OPEN = "no op stands out: q_b returns 30% of the KL, and half of the ops return 30% or more"
NOISE = [op(f"noise{index}", share) for index, share in enumerate((0.05, 0.03, 0.02, 0.0, -0.02, -0.03))]


@pytest.mark.parametrize(
    ("ops", "layers", "said"),
    [
        (
            [op("index_topk", 0.85), *NOISE],
            [op("index_topk", 0.83, layer=5)],
            "layer 5, index_topk: 83% of the KL",
        ),
        ([op("lm_head", 0.9), *NOISE], [op("lm_head", 0.9, layer="model")], "lm_head: 90% of the KL"),
        ([op("q_b", 0.9)], [op("q_b", 0.2, layer=3)], "q_b in all layers: 90% of the KL, layer 3 alone 20%"),
        ([op("q_b", 0.9)], [], "q_b: 90% of the KL"),
        (NOISE, [], "no op stands out: noise0 returns 5% of the KL, and half of the ops return 1% or more"),
        (
            [op("q_b", 0.3, se=0.2)],
            [],
            OPEN,
        ),
        ([op("q_b", -0.3)], [], "no op alone returns any of the KL"),
        ([op("q_b", None, None)], [], "no op alone returns any of the KL"),
        ([op("q_b", 0.0, 0.0, same=True)], [], "no op alone returns any of the KL"),
    ],
)
def test_words(ops, layers, said):
    assert words(ops, layers) == said


def test_shares_that_all_ops_return_are_chance():
    """Of nano's lowest rung at 34 positions, one of which holds two thirds of the KL."""
    shares = "0.56 0.56 0.56 0.55 0.50 0.48 0.47 0.47 0.40 0.39 0.34 0.30 0.26 0.24 0.23 0.22 0.00 -0.17"
    ops = [op(f"op{index}", float(share), 0.05) for index, share in enumerate(shares.split())]
    assert standing_out(ops) == []
    fewer = [
        entry | {"returned": entry["returned"] / 3} for entry in ops
    ]  # where a fault holds two thirds of the KL
    guilty = op("guilty", 0.7, 0.05)
    assert standing_out([guilty, *fewer]) == [guilty]
    assert standing_out([guilty | {"se": 0.4}, *fewer]) == []


def test_an_op_stands_out_of_equal_ones_by_chance_as_seldom_as_stated():
    """18 ops with normal shares: 3 deviations are 1 in 740 each, and the median deviation of so few widens that."""
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(2000):
        alarms += bool(standing_out([op("x", share, 0.0) for share in rng.normal(0.3, 0.1, 18)]))
    assert 0.01 < alarms / 2000 < 0.15
