"""What a variant's dump says of the paths that its run went through."""

import numpy as np
import pytest

from dsv4.model.cache import LayerCache
from dsv4.model.random_model import small_config
from dsv4.run.variant import exercised
from dsv4.run.watch import Watch


class Store:
    """A store of so many pages."""

    def __init__(self, pages):
        self.table = list(range(pages))


class Cache:
    """Layers given as (window's pages, entries' pages or None)."""

    nbytes = 0

    def __init__(self, layers):
        self.layers = [
            LayerCache(window=Store(window), entries=None if entries is None else Store(entries))
            for window, entries in layers
        ]


@pytest.mark.parametrize(
    ("layers", "pages"),
    [
        ([(1, None)], 1),
        ([(1, 1)], 1),  # a page of each store: no table was followed to a second page
        ([(1, 1), (1, 1), (1, None)], 1),
        ([(2, 1)], 2),
        ([(1, None), (1, 2)], 2),
        ([(2, 7), (2, None)], 7),
        ([(0, 0)], 0),
    ],
)
def test_pages_are_those_of_one_store(layers, pages):
    config = small_config()
    found = exercised(config, np.arange(3), Cache(layers), Watch(config), 1)
    assert found["kv_pages"] == pages
