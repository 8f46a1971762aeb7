"""The texts that attribution runs on hold the KL, and cost no more than there is."""

import pandas as pd
import pytest

from dsv4.attribute.window import LEAST, choose


def table(**texts):
    frames = [
        pd.DataFrame({"prompt": name, "step": range(len(kl)), "kl_nats": kl}) for name, kl in texts.items()
    ]
    return pd.concat(frames).sample(frac=1.0, random_state=0)


def test_the_text_with_most_kl_comes_first_and_takes_what_there_is():
    texts = table(low=[1e-6] * 500, high=[1e-3] * 500)
    assert choose(texts, {"low": 10, "high": 100}, rows=192) == {"high": 93}  # 100 + 93 - 1 rows


def test_another_text_is_taken_while_there_is_room_and_it_holds_a_tenth():
    texts = table(one=[1e-3] * 40, two=[5e-4] * 40, three=[1e-6] * 20)
    assert choose(texts, {"one": 10, "two": 20, "three": 5}, rows=192) == {"one": 40, "two": 40}
    assert choose(texts, {"one": 10, "two": 20, "three": 5}, rows=90) == {"one": 40, "two": 22}


def test_kl_behind_the_budget_counts_for_nothing():
    texts = table(late=[0.0] * 300 + [1.0] * 100, early=[1e-3] * 50)
    assert choose(texts, {"late": 10, "early": 10}, rows=100)["early"] == 50


@pytest.mark.parametrize("rows", [1, 100])
def test_where_no_prompt_has_room_the_shortest_is_run_on_a_few_positions(rows):
    texts = table(long=[1.0] * 50, short=[1e-3] * 50)
    assert choose(texts, {"long": 4000, "short": 3000}, rows) == {"short": LEAST}
    assert choose(table(tiny=[1.0] * 3), {"tiny": 4000}, rows) == {"tiny": 3}


def test_of_nothing_nothing():
    assert choose(table(a=[]), {}) == {}
