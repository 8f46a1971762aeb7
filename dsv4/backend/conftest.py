"""Kernels run interpreted where there is no GPU; one small random model and its reference, in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.model import numerics
from dsv4.model.config import ModelConfig
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.model.weights import ModelWeights
from dsv4.run.rows import Rows
from kernels.conftest import INTERPRETED, _one_thread, accelerator

__all__ = ["_one_thread", "accelerator"]
ROOT = Path(__file__).parents[2]
TOKENS = torch.tensor([3, 17, 29, 5, 11, 2, 30, 8, 19, 23])
ROWS = Rows(prompt=9, prefill=torch.tensor([3, 8]).numpy(), decode=torch.tensor([9]).numpy())
SIZES: dict[str, Any] = {
    "compress_ratios": [8, 4],  # HCA with a hash table, CSA with a choice
    "num_hidden_layers": 2,
    "head_dim": 256,
    "index_head_dim": 128,
    "num_attention_heads": 2,
    "index_topk": 1,
    "sliding_window": 3,
    "hc_sinkhorn_iters": 2,
    "n_routed_experts": 4,
    "vocab_size": 32,
}
PAGE = 4


def pytest_collection_modifyitems(items):
    """Show which tests wait for a GPU."""
    for item in items:
        if "gpu" in item.keywords and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="no GPU: this test is not interpreted"))


class InMemory:
    """A ``trained`` reference as :class:`dsv4.run.isolated.Reference` gives it, without a dump."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        tokens: torch.Tensor = TOKENS,
        rows: Rows = ROWS,
    ) -> None:
        model = Transformer(config, weights, numerics.trained(config), page_size=PAGE)
        self.tokens, self.rows = tokens, rows
        self.taps: dict[Any, Any] = {}
        model.forward([model.new_cache()], [tokens], self._keep)

    def _keep(self, layer: Any, name: str, value: Any) -> Any:
        self.taps[layer, name] = value
        return value

    def judged(self, layer: Any, name: str) -> torch.Tensor:
        """A row tap at the judged rows."""
        return self.every_row(layer, name)[torch.from_numpy(self.rows.all)]

    def every_row(self, layer: Any, name: str) -> torch.Tensor:
        """A tap at every row or entry."""
        value = self.taps[layer, name]
        return value if isinstance(value, torch.Tensor) else value.dequantised()


@pytest.fixture(scope="session", autouse=True)
def _no_grad():
    torch.set_grad_enabled(False)


@pytest.fixture(scope="session")
def small() -> tuple[ModelConfig, ModelWeights, InMemory]:
    """Config, weights and reference of the smallest model that kernels take."""
    torch.set_num_threads(1)
    config = small_config(**SIZES)
    weights = random_weights(config, 0)
    return config, weights, InMemory(config, weights)
