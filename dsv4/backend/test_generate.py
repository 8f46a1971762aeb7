"""Generation on kernels, through the interface of the refs."""

import torch

from dsv4.backend.conftest import PAGE, ROOT, SIZES, TOKENS
from dsv4.backend.model import KernelTransformer
from dsv4.generate.batch import Request, generate
from dsv4.model.random_model import random_weights, small_config
from dsv4.plan import Plan
from dsv4.prompts import PromptTokenizer


def test_a_text_on_kernels_does_not_depend_on_its_batch(accelerator):
    """Up to 16 rows a row's sums are in one order: tokens are those of the sequence alone."""
    config = small_config(**SIZES | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
    model = KernelTransformer(config, random_weights(config, 1), Plan(), page_size=PAGE, device=accelerator)
    tokenizer = PromptTokenizer(ROOT / "data/nano")  # its first 32 ids are bytes
    long, short = TOKENS[:3], TOKENS[4:5]
    asked = [Request(tokens=long.tolist(), budget=2), Request(tokens=short.tolist(), budget=1)]
    both = generate(model, tokenizer, asked)
    assert [one.cache.length for one in both] == [4, 1]
    first, second = both[0].tokens
    alone = model.forward([model.new_cache()], [torch.cat((long, torch.tensor([first])))])
    assert alone[2:].argmax(-1).tolist() == [first, second]
