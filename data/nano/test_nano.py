"""The stored checkpoint: sizes, names, formats, tokenizer, and a slice of the recorded figures again."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

import chats
import corpus
import evaluate
import forward
import make_tokenizer
import quantise
import sinkhorn

from kernels.formats import nvfp4

HERE = Path(__file__).resolve().parent
transformers = pytest.importorskip("transformers", reason="no transformers: nano's trainer and oracle")
tokenizers = pytest.importorskip("tokenizers", reason="no tokenizers: nano's tokenizer is made with it")


@pytest.fixture(scope="module")
def tensors():
    return load_file(HERE / "model.safetensors")


@pytest.fixture(scope="module")
def record():
    return json.loads((HERE / "training.json").read_text())


@pytest.fixture(scope="module")
def config():
    config = transformers.DeepseekV4Config.from_pretrained(HERE)
    config._attn_implementation = "eager"
    return config


@pytest.fixture(scope="module")
def model(config):
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    model.load_state_dict(quantise.load(HERE))
    return model


def test_files_are_small():
    assert (HERE / "model.safetensors").stat().st_size <= 16_000_000
    assert (HERE / "heldout.txt").stat().st_size <= 200_000


def test_config_means_the_same_to_transformers(config):
    own = json.loads((HERE / "config.json").read_text())
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    assert config.layer_types == [kinds[ratio] for ratio in own["compress_ratios"]]
    assert config.mlp_layer_types == ["hash_moe"] * own["num_hash_layers"] + ["moe"] * 6
    assert config.qk_rope_head_dim == own["qk_rope_head_dim"] == 64
    yarn = config.rope_parameters["compress"]
    wanted = own["rope_parameters"]["compress"]
    assert {key: yarn[key] for key in wanted} == wanted
    assert config.rope_parameters["main"]["rope_theta"] == own["rope_theta"]


def test_names_shapes_and_dtypes(tensors, config):
    with torch.device("meta"):
        state = transformers.DeepseekV4ForCausalLM(config).state_dict()
    packed = {name for name in state if quantise.NVFP4_NAMES.search(name)}
    scales = {name + suffix for name in packed for suffix in ("_scale", "_scale_2")}
    assert set(tensors) == set(state) | scales
    for name, want in state.items():
        have = tensors[name]
        if name in packed:
            assert (have.dtype, have.shape) == (torch.uint8, (*want.shape[:-1], want.shape[-1] // 2))
            scale, factor = tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
            assert scale.dtype == torch.float8_e4m3fn
            assert scale.shape == (*want.shape[:-1], want.shape[-1] // 16)
            assert (factor.dtype, factor.shape) == (torch.float32, want.shape[:-2])
            continue
        assert have.shape == want.shape
        narrow = want.is_floating_point() and not quantise.FP32_NAMES.search(name)
        assert have.dtype == (torch.bfloat16 if narrow else want.dtype), name
    assert len(packed) == 8 * 10


def test_stored_weights_are_a_fixed_point_of_the_format(tensors):
    for name in filter(quantise.NVFP4_NAMES.search, tensors):
        scale, factor = tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
        values = quantise.unpack(tensors[name], scale, factor)
        codes, _, _ = nvfp4.quantise(values, factor[..., None, None])
        stored = torch.stack([tensors[name] & 15, tensors[name] >> 4], -1).flatten(-2)
        assert torch.equal(codes, stored), name
        assert values.isfinite().all()


def test_fake_quantiser_agrees_with_the_format():
    weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0, :16] = 0
    torch.testing.assert_close(
        quantise.fake_quantise(weight), quantise.unpack(*quantise.pack(weight)), rtol=3e-7, atol=0
    )


def test_hash_layers_choose_distinct_balanced_experts(tensors):
    for layer in range(2):
        table = tensors[f"model.layers.{layer}.mlp.gate.tid2eid"]
        assert all(len(set(row)) == 4 for row in table.tolist())
        assert torch.equal(table.flatten().bincount(minlength=16), torch.full((16,), 320 * 4 // 16))


def test_every_byte_is_its_own_token():
    tokenizer = tokenizers.Tokenizer.from_file(str(HERE / "tokenizer.json"))
    assert [tokenizer.token_to_id(char) for char in make_tokenizer.byte_alphabet()] == list(range(256))
    text = "".join(map(chr, range(0x250))) + "\u2028 \U0001f600\r\n\t  end"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    chat = tokenizer.encode("<|bos|><|user|>hi<|end_of_turn|><|assistant|><|eos|>").ids
    assert chat == [256, 258, *b"hi", 260, 259, 257]
    assert tokenizer.get_vocab_size() == 320


def test_tokenizer_file_is_what_its_script_writes():
    assert json.loads((HERE / "tokenizer.json").read_text()) == make_tokenizer.tokenizer_json()


def test_sample_is_held_out(record):
    documents = corpus.read_sample(HERE / "heldout.txt")
    assert len(documents) > 5
    assert all(document.held_out for document in documents)
    assert {document.path for document in documents} <= set(record["data"]["held_out_paths"])


def test_record_is_consistent(record, tensors):
    assert record["data"]["held_out_share"] >= 0.05
    nats, bits = record["nats_per_byte"], record["bits_per_byte"]
    assert all(math.isclose(bits[key], nats[key] / math.log(2)) for key in nats)
    assert nats["stored"] <= 0.8
    assert abs(nats["stored"] - nats["fp32"]) < 0.01
    for layer in record["recall"]:
        assert 1.5 * layer["random"] < layer["indexer"] <= layer["best"]
    config = json.loads((HERE / "config.json").read_text())
    assert record["clamp"]["limit"] == config["swiglu_limit"]
    assert min(record["clamp"]["mean"].values()) > 0
    stored = sum(t.numel() for n, t in quantise.dequantised(tensors).items() if "tid2eid" not in n)
    assert record["parameters"] == stored - 6 * 16  # the routers' correction biases are buffers


def test_recorded_loss_holds_and_the_fast_forward_agrees(model, record, config):
    """The blocked forward pass of the trainer is transformers' function, up to near ties in the choices."""
    size = record["check"]["bytes_of_first_sample_file"]
    document = corpus.read_sample(HERE / "heldout.txt")[0]
    row = torch.from_numpy(corpus.eval_rows([document], size + 1)[[0]])
    theirs = evaluate.transformers_nats(model, row)[0] / size
    assert abs(theirs - record["check"]["stored_nats_per_byte"]) < 1e-3
    padded = torch.nn.functional.pad(row, (0, 7 * 128 + 1 - row.shape[1]), value=-1)
    nano, zero = forward.Nano(model), torch.zeros(())
    knobs = forward.Knobs(zero, zero, zero, zero, torch.tensor(config.swiglu_limit))
    ctx = forward.context(nano.rotary, 7 * 128, "cpu")
    with torch.no_grad():
        ours = evaluate.nats_per_byte(nano, padded, ctx, knobs, torch.float32, 1)
    assert abs(ours - theirs) < 1e-3


def test_answers_and_ends_its_turn(model):
    prompt = [corpus.BOS, chats.USER, *b"What is the capital of France?", chats.EOT, chats.ASSISTANT]
    ids = torch.tensor([prompt])
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    assert new[0, len(prompt) :].tolist() == [*b"The capital of France is Paris.", chats.EOT]


def test_sinkhorn_gradient_is_the_unrolled_one():
    def unrolled(x):
        x = x.softmax(-1) + sinkhorn.EPS
        x = x / (x.sum(-2, keepdim=True) + sinkhorn.EPS)
        for _ in range(sinkhorn.ITERATIONS - 1):
            x = x / (x.sum(-1, keepdim=True) + sinkhorn.EPS)
            x = x / (x.sum(-2, keepdim=True) + sinkhorn.EPS)
        return x

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 4, 4, generator=generator, requires_grad=True)
    weight = torch.randn(50, 4, 4, generator=generator)
    (want,) = torch.autograd.grad(unrolled(logits), logits, weight)
    (have,) = torch.autograd.grad(sinkhorn.sinkhorn(logits), logits, weight)
    torch.testing.assert_close(have, want, atol=1e-3, rtol=0)
