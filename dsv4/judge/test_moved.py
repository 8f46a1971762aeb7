"""What counts as moved text: a change beyond chance, from the parent or from `trained` itself."""

import numpy as np
import pytest

from dsv4.judge.moved import moved


def test_a_shift_moves_and_noise_does_not(texts):
    parent = texts.table(kl=1e-3, noise=1e-4)
    assert not moved(texts.table(kl=1e-3, noise=1e-4, seed=1), parent)
    assert moved(parent.assign(kl_nats=parent["kl_nats"] * 1.1), parent)
    assert not moved(parent, parent)


def test_the_bottom_of_the_ladder_is_moved_from_trained(texts):
    assert moved(texts.table(kl=1e-3, noise=1e-4), None)
    assert not moved(texts.table(kl=0.0), None)
    one = texts.table(kl=0.0)
    assert not moved(
        one.assign(kl_nats=np.where(one.index == 7, 1.0, 0.0)), None
    )  # one position is no error bar


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_longer_finite_moved(texts, bad):
    sound = texts.table()
    broken = sound.assign(kl_nats=np.where(sound.index == 3, bad, sound["kl_nats"]))
    assert moved(broken, sound)
    assert moved(sound, broken)
    assert moved(broken, None)
    assert not moved(broken, broken)
