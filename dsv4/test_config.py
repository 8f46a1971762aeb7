"""What config.yaml may say, and what it is told otherwise."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from dsv4 import config
from dsv4.config import CheckpointError, ConfigError, load

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "config.yaml").read_text()


@pytest.fixture
def written(tmp_path):
    def write(before="", after=""):
        assert before in TEXT
        path = tmp_path / "config.yaml"
        path.write_text(TEXT.replace(before, after, 1) if before else TEXT)
        return path

    return write


def test_the_committed_configuration_loads(written):
    loaded = load(written())
    assert loaded.checkpoint == Path("data/nano")
    assert (loaded.decode_steps, loaded.floor_draws, loaded.tighten) == (16, 8, {})
    assert [rung.id for rung in loaded.ladder.lineage("B1")] == ["B0_unfused", "P4", "P5", "B0", "B1a", "B1"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("seed: 0", "seeds: 0", r"top level: (key 'seed' is missing|unknown key 'seeds'; keys: checkpoint)"),
        (
            "seed: 0",
            "seed: 0\nlimits: {}",
            "top level: unknown key 'limits'; keys: checkpoint, prompts, seed",
        ),
        ("seed: 0", "seed: 0\nseed: 1", "key 'seed' stands twice"),
        ("seed: 0", "seed: -1", "seed: -1 is less than the minimum of 0"),
        ("seed: 0", "seed: [", "no valid YAML"),
        ("seed: 0", "seed: x: 0", r"no valid YAML: mapping values .* line \d+, .* seed: x: 0 \^"),
        ("floor_draws: 8", "floor_draws: 4", "floor_draws: 4 is less than the minimum of 8"),
        ("page_size: 64", "page_size: 64.5", "page_size: 64.5 is not of type 'integer'"),
        ("tighten: {}", "tighten: {cos_min: high}", "tighten.cos_min: 'high' is not of type 'number'"),
        (
            "    spine: true",
            "    spin: true",
            "ladder.B0_unfused: unknown key 'spin'; keys: parent, set, ",
        ),
        ("  P4:", "  p4:", "ladder: name 'p4' must match"),
        (
            "{q_format: fp8}",
            "{q_format: fp9}",
            "ladder.B1.set: plan field q_format = 'fp9'; allowed: bf16, fp8, fp8x2",
        ),
        ("{q_format: fp8}", "{q_form: fp8}", "ladder.B1.set: plan has no field 'q_form'; fields: norm_quant"),
        (
            "{q_format: fp8}",
            "{q_format: bf16}",
            "ladder.B1 changes nothing against B1a; a rung changes exactly one",
        ),
        (
            "{q_format: fp8}",
            "{q_format: fp8, pv_format: fp8}",
            "ladder.B1 changes q_format.*pv_format.*exactly one",
        ),
        ('archived: ["', 'archived: ["/', "archived.0: '/dsv4/.*' does not match"),
        ("parent: B2", "parent: B0", "ladder.B3 needs B1 among its ancestors"),
        ("parent: B2", "parent: B9", "ladder.B3.parent = 'B9': no such rung"),
        ("parent: B3", "parent: B2_fp4", "its parent B2_fp4 is a leaf"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_value(written, before, after, message):
    path = written(before, after)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


SCHEMA = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())["properties"]
INTEGERS = [key for key, rule in SCHEMA.items() if rule.get("type") == "integer"]
NOT_WHOLE = [
    "16.0",
    "1.6e+1",
    "16.5",
    ".inf",
    ".nan",
    "true",
    "off",
    "'16'",
    "[16]",
    "{a: 16}",
    "",
    "2026-11-30",
]


@pytest.mark.parametrize("value", [*NOT_WHOLE, "-1", "99999999999999999999"])
@pytest.mark.parametrize("key", INTEGERS)
def test_what_is_no_whole_number_of_its_range_is_refused_by_key(written, key, value):
    line = re.search(rf"^{key}: .*$", TEXT, re.MULTILINE)
    with pytest.raises(
        ConfigError, match=rf"config\.yaml: {key}: .* (is not of type|is (less|greater) than)"
    ):
        load(written(line[0], f"{key}: {value}"))


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "true", "'1'", "[1]", ""])
def test_a_limit_that_is_no_finite_number_is_refused_by_name(written, value):
    with pytest.raises(ConfigError, match=r"config\.yaml: tighten\.q\.cosine: .* is not of type 'number'"):
        load(written("tighten: {}", f"tighten: {{q.cosine: {value}}}"))


@pytest.mark.parametrize("key", ["1", "1.5", "true", "null", "2026-11-30", "[a, b]", "{a: b}"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("seed: 0", "seed: 0\n{}: 0"),
        ("  P4:", "  {}: {{parent: B0_unfused, set: {{norm_quant: fused}}, why: a}}\n  P4:"),
        ("{norm_quant: fused}", "{{{}: fused}}"),
        ("tighten: {}", "tighten: {{{}: 0.1}}"),
    ],
    ids=["top", "ladder", "set", "tighten"],
)
def test_a_key_that_is_no_text_is_refused_with_its_line(written, before, after, key):
    with pytest.raises(ConfigError, match=r"config\.yaml: .*key .* is no text; put it in quotes.* line \d+"):
        load(written(before, after.format(key)))


@pytest.mark.parametrize(
    "value", ["2026-02-30", "!!int a", "9" * 5000, "[" * 5000, "&a [*a]", "&a {b: *a}", "!!python/name:os.x"]
)
def test_what_yaml_cannot_build_is_refused(written, value):
    with pytest.raises(ConfigError, match=r"config\.yaml: "):
        load(written("prompts: data/prompts.yaml", f"prompts: {value}"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read"):
        load(tmp_path / "no.yaml")


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "tiny model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_run_is_named_by_model_weights_and_prompts(written, checkpoint):
    def name():
        return config.run_id(
            load(written("checkpoint: data/nano", f"checkpoint: {json.dumps(str(checkpoint))}"))
        )

    prompts = checkpoint.parent / "prompts.yaml"
    prompts.write_text("[{id: a, kind: plain, text: x}]")
    text = TEXT.replace("data/nano", f"{json.dumps(str(checkpoint))}").replace(
        "data/prompts.yaml", str(prompts)
    )
    (checkpoint.parent / "config.yaml").write_text(text)

    def run():
        return config.run_id(load(checkpoint.parent / "config.yaml"))

    first = run()
    assert first.startswith("tiny_model-")
    assert run() == first
    prompts.write_text("[{id: a, kind: plain, text: y}]")
    second = run()
    assert second.rsplit("-", 1)[0] == first.rsplit("-", 1)[0]
    assert second != first
    (checkpoint / "model.safetensors").write_bytes(b"others!")
    assert run().rsplit("-", 2)[1] != first.rsplit("-", 2)[1]


HEADER = (8).to_bytes(8, "little") + b'{"a": 1}'


@pytest.fixture
def sha256(checkpoint, monkeypatch):
    """Hash of a checkpoint with one file of these bytes, which counts as large."""
    monkeypatch.setattr(config, "HASH_WHOLE", 16)
    monkeypatch.setattr(config, "SAMPLE", 4)

    def hashed(content):
        (checkpoint / "model.safetensors").write_bytes(content)
        config._hash_files.cache_clear()  # a file of the same size may be written twice in one tick
        return config.checkpoint_sha256(checkpoint)

    return hashed


def test_a_large_file_is_told_by_header_size_and_samples(sha256):
    data = b"x" * 4096  # 64 samples of 4 bytes, 64.95 bytes apart
    first = sha256(HEADER + data)
    others = [
        HEADER.replace(b"a", b"b") + data,
        HEADER + data + b"x",
        HEADER + b"y" + data[1:],
        HEADER + data[:-1] + b"y",
        *(HEADER + data[:k] + b"y" * 66 + data[k + 66 :] for k in range(0, 4030, 31)),
    ]
    assert first not in [sha256(content) for content in others]
    assert first == sha256(HEADER + data)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 200, 256])
def test_a_file_smaller_than_its_samples_is_hashed_whole(sha256, size):
    contents = {HEADER + bytes(k == byte for k in range(size)) for byte in range(size + 1)}
    assert len({sha256(content) for content in contents}) == len(contents)


def test_a_checkpoint_of_hundreds_of_gigabytes_is_hashed_at_once(checkpoint):
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write(HEADER)
        file.truncate(500 * 10**9)  # a hole: no byte of it is on the disk
    started = time.monotonic()
    config.checkpoint_sha256(checkpoint)
    assert time.monotonic() - started < 10


def test_a_small_checkpoint_keeps_its_hash_and_its_results():
    name = config.run_id(load(ROOT / "config.yaml"))
    assert name.startswith("nano-f9e7c37a-"), "results folders of earlier runs are named by it"


def test_a_missing_shard_is_named(checkpoint):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"model-2\.safetensors: missing, named by model\.safetensors\.index\.json; fetch"
    ):
        config.checkpoint_files(checkpoint)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("", "no valid JSON"),
        ("[]", "holds list, not an object"),
        ("{}", "weight_map = None names no shards"),
        ('{"weight_map": []}', r"weight_map = \[\] names no shards"),
        ('{"weight_map": {}}', r"weight_map = \{\} names no shards"),
        ('{"weight_map": "a"}', "weight_map = 'a' names no shards"),
        ('{"weight_map": {"a": 1}}', r"weight_map\.a = 1 is no file's name"),
        ('{"weight_map": {"a": "model.safetensors", "b": null}}', r"weight_map\.b = None is no file's name"),
        ('{"weight_map": {"a": "model.safetensors", "b": 1}}', r"weight_map\.b = 1 is no file's name"),
        (
            '{"weight_map": {"a": ["model.safetensors"]}}',
            r"weight_map\.a = \['model\.safetensors'\] is no file's",
        ),
        ('{"weight_map": {"a": {}}}', r"weight_map\.a = \{\} is no file's name"),
    ],
)
def test_a_broken_index_is_named(checkpoint, index, message):
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors\.index\.json: {message}.*; fetch"):
        config.checkpoint_files(checkpoint)


@pytest.mark.parametrize("name", ["", ".", "..", "no\0such", "/"])
def test_a_shard_that_cannot_be_a_file_is_missing(checkpoint, name):
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"missing, named by"):
        config.checkpoint_files(checkpoint)


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.safetensors: missing; fetch"):
        config.checkpoint_files(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        config.model_config(tmp_path / "nowhere")
