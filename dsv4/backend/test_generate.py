"""Generation on kernels, through the interface of the refs."""

import torch

from dsv4.backend.conftest import PAGE, ROOT, SIZES, TOKENS
from dsv4.backend.stepping import SteppingTransformer
from dsv4.generate.batch import Request, generate
from dsv4.model.random_model import random_weights, small_config
from dsv4.plan import Plan
from dsv4.prompts import PromptTokenizer


def test_a_text_on_kernels_does_not_depend_on_its_batch(accelerator):
    """Up to 16 rows a row's sums are in one order: tokens are those of the sequence alone."""
    config = small_config(**SIZES | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
    model = SteppingTransformer(config, random_weights(config, 1), Plan(), page_size=PAGE, device=accelerator)
    tokenizer = PromptTokenizer(ROOT / "data/nano")  # its first 32 ids are bytes
    long, short = TOKENS[:3], TOKENS[4:5]
    asked = [Request(tokens=long.tolist(), budget=2), Request(tokens=short.tolist(), budget=1)]
    both = generate(model, tokenizer, asked)
    assert [one.cache.length for one in both] == [4, 1]
    first, second = both[0].tokens
    alone = model.forward([model.new_cache()], [torch.cat((long, torch.tensor([first])))])
    assert alone[2:].argmax(-1).tolist() == [first, second]


def test_captured_steps_give_the_text_of_passes_and_whole_caches(accelerator, monkeypatch):
    """One sequence ends before the others, and all caches can be read on from where they are."""
    config = small_config(**SIZES | {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 0})
    model = SteppingTransformer(config, random_weights(config, 2), Plan(), page_size=PAGE, device=accelerator)
    tokenizer = PromptTokenizer(ROOT / "data/nano")
    made, capture = [], model.captured
    monkeypatch.setattr(model, "captured", lambda *given: made.append(capture(*given)) or made[-1])
    found = {}
    for model.captures in (False, True):
        asked = [Request(tokens=TOKENS[:n].tolist(), budget=budget) for n, budget in ((3, 3), (2, 2))]
        ended = generate(model, tokenizer, asked)
        read_on = model.forward(
            [one.cache for one in ended], [torch.tensor(one.tokens[-1:]) for one in ended]
        )
        found[model.captures] = [one.tokens for one in ended], read_on
    assert [one is None for one in made] == [True] * 2 + [False] * 2  # once for each set of sequences
    assert found[True][0] == found[False][0]
    assert torch.equal(found[True][1], found[False][1])
