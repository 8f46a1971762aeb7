"""What a model's config.json may say, and what it is told otherwise."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.model.config import FIXED, FIXED_ROPE, CheckpointError, parse_config
from dsv4.model.random_model import SMALL

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": 100}, "head_dim = 100"),
        ({"head_dim": 64}, "head_dim = 64"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim = 32"),
        ({"o_groups": 3}, "o_groups = 3, num_attention_heads = 4"),
        ({"o_groups": 0}, "o_groups = 0"),
        ({"index_head_dim": 96}, "index_head_dim = 96"),
        ({"index_topk": 0}, "index_topk = 0"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"compress_ratios": [0, 4, 8]}, "compress_ratios has 3 entries for num_hidden_layers = 4"),
        ({"compress_ratios": [0, 4, 8, 2]}, "compress_ratios = (0, 4, 8, 2)"),
        ({"compress_ratios": [0, 4, 8, 4.0]}, "compress_ratios = [0, 4, 8, 4.0] is not a list of integers"),
        ({"compress_ratios": 4}, "compress_ratios = 4 is not a list of integers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9, n_routed_experts = 8"),
        ({"num_hash_layers": -1}, "num_hash_layers = -1"),
        ({"hc_eps": float("nan")}, "hc_eps = nan is not a finite number"),
        ({"hidden_size": float("inf")}, "hidden_size = inf is not an integer"),
        ({"hidden_size": 64.5}, "hidden_size = 64.5 is not an integer"),
        ({"hidden_size": True}, "hidden_size = True is not an integer"),
        ({"hidden_size": "64"}, "hidden_size = '64' is not an integer"),
        ({"hidden_size": None}, "hidden_size = None is not an integer"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rope_scaling": SMALL["rope_scaling"] | {"factor": 0.5}}, "rope_factor = 0.5"),
    ],
    ids=str,
)
def test_inconsistent_size_is_named_with_its_value(change, said):
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        parse_config(SMALL | change, Path("folder/config.json"))
    assert str(caught.value).startswith("folder/config.json: ")
    assert "correct config.json" in str(caught.value)


OTHERS = ["softmax", "sigmoid", "gelu", "greedy", "deepseek_v3", "linear", True, False, 0, 1, 2, 0.5, [], {}]
ROPE = [f"rope_scaling.{key}" for key in FIXED_ROPE]


def with_key(where: str, value: Any) -> dict[str, Any]:
    """A small config with one key of :data:`FIXED`, or of ``rope_scaling``, set."""
    outer, _, inner = where.partition(".")
    return SMALL | {outer: SMALL["rope_scaling"] | {inner: value} if inner else value}


@pytest.mark.parametrize("key", [*FIXED, *ROPE])
def test_a_model_that_computes_otherwise_is_refused_by_key_and_value(key):
    own = (FIXED | {f"rope_scaling.{name}": value for name, value in FIXED_ROPE.items()})[key]
    for value in (own, None):
        assert parse_config(with_key(key, value)) == parse_config(SMALL)
    for value in OTHERS:
        if value == own:
            continue
        with pytest.raises(CheckpointError) as caught:
            parse_config(with_key(key, value), Path("folder/config.json"))
        said = f"folder/config.json: {key} = {value!r}, but only {json.dumps(own)} is computed"
        assert str(caught.value).startswith(said)
        assert "set another `checkpoint`" in str(caught.value)


def test_nano_says_what_it_computes():
    raw = json.loads((ROOT / "data/nano/config.json").read_text())
    assert set(FIXED) - set(raw) == {"mlp_bias", "n_group"}


# Sizes and the keys of FIXED in config.json of huggingface.co/deepseek-ai/DeepSeek-V4-Flash, 2026-08-14.
FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}


def test_flash_is_taken():
    config = parse_config(FLASH)
    kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    assert [kinds.count(kind) for kind in ("window", "csa", "hca")] == [2, 21, 20]


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.integers())
    | st.just({})
)


@given(key=st.sampled_from([*SMALL, *FIXED, "rope_parameters"]), value=VALUES)
@settings(max_examples=300, deadline=None)
def test_any_json_for_a_key_is_a_config_or_a_refusal(key, value):
    with suppress(CheckpointError):
        parse_config(SMALL | {key: value})


def test_a_longer_list_of_ratios_belongs_to_mtp_layers():
    assert parse_config(SMALL | {"compress_ratios": [0, 4, 8, 4, 4]}).compress_ratios == (0, 4, 8, 4)


def test_rope_may_be_nested_as_transformers_writes_it():
    nested = {key: value for key, value in SMALL.items() if key != "rope_scaling"}
    nested["rope_parameters"] = {"main": {}, "compress": SMALL["rope_scaling"]}
    assert parse_config(nested) == parse_config(SMALL)
