"""What a sequence keeps on the device between calls: stores in the layers' pools, and compressor tails."""

from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.backend.pool import PagePool, PooledStore
from dsv4.model.cache import LayerCache, SequenceCache
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics


@dataclass(frozen=True)
class LayerPools:
    """Pools of one layer: KV records (window rows and entries), and index keys in CSA layers."""

    records: PagePool
    keys: PagePool | None


def layer_pools(
    config: ModelConfig, numerics: Numerics, page_size: int, device: torch.device
) -> list[LayerPools]:
    """Empty pools of every layer."""
    return [
        LayerPools(
            PagePool(numerics.record, page_size, device),
            PagePool(numerics.index_record, page_size, device) if config.kind(layer) == "csa" else None,
        )
        for layer in range(config.num_hidden_layers)
    ]


@dataclass
class PooledLayer(LayerCache):
    """One layer of one sequence in its pools."""

    window: Any
    entries: Any = None
    index: Any = None
    tails: dict[str, Any] = field(default_factory=dict)


class PooledCache(SequenceCache):
    """All layers of one sequence.

    Window rows are written to new pages, as entries are, and whole pages that have left the window go back to the
    pool after each call: every row of a chunk, however long, finds the rows before it in place.

    Parameters
    ----------
    config : ModelConfig
    pools : pools of every layer.
    device : of the pools.
    """

    def __init__(self, config: ModelConfig, pools: list[LayerPools], device: torch.device) -> None:
        self.length, self.device = 0, device
        self.window_rows = config.sliding_window
        self.layers = [
            PooledLayer(
                window=PooledStore(pool.records),
                entries=PooledStore(pool.records) if ratio else None,
                index=PooledStore(pool.keys) if pool.keys is not None else None,
            )
            for pool, ratio in zip(pools, config.compress_ratios, strict=True)
        ]

    def advance(self, rows: int) -> None:
        """Count ``rows`` more tokens; let go of window pages that no later token sees."""
        self.length += rows
        for layer in self.layers:
            layer.window.release(self.length - self.window_rows + 1)
