"""A small audit of nano for every folder's tests: two short prompts, few rows, references on disk once a session."""

from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "data/nano/heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def nano_audit(tmp_path_factory):
    """Setup with a prompt of 45 and one of 200 tokens (over window and top-k), references written.

    Defined here alone: imported into two conftest.py it would be two fixtures, each with a run of its own. Modules
    that use it are one ``xdist_group``, so that one worker writes references and floors once.
    """
    import torch

    from dsv4 import config as configuration
    from dsv4.model.checkpoint import load
    from dsv4.prompts import Prompt, PromptTokenizer
    from dsv4.run.reference import write_plain, write_trained
    from dsv4.run.setup import Setup

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = configuration.load(ROOT / "config.yaml")
    config = replace(
        config,
        checkpoint=ROOT / config.checkpoint,
        decode_steps=5,
        prefill_rows=40,
        floor_draws=8,
        backend="ref",
    )
    prompts = {
        "short": Prompt(id="short", kind="plain", text=TEXT[200:244]),
        "long": Prompt(id="long", kind="plain", text=TEXT[1000:1199], rows=(127, 128, 159, 164)),
    }
    tokenizer = PromptTokenizer(config.checkpoint)
    setup = Setup(
        config=config,
        results=tmp_path_factory.mktemp("results"),
        checkpoint=load(config.checkpoint),
        tokens={name: tokenizer.encode(prompt) for name, prompt in prompts.items()},
        prompts=prompts,
    )
    write_trained(setup)
    write_plain(setup)
    return setup
