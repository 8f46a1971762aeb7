"""The record of a checkpoint, on which every dump rests."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from dsv4 import config
from dsv4.model.random_model import SMALL, random_tensors, small_config
from dsv4.run import checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Write the record of a small checkpoint whose weight files count as large; return it and the run's name."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    stored = {name: tensor.contiguous() for name, tensor in random_tensors(small_config(), 0).items()}
    save_file(stored, folder / "model.safetensors")
    settings = tmp_path / "config.yaml"
    text = (ROOT / "config.yaml").read_text().replace("data/nano", str(folder))
    settings.write_text(text.replace("data/prompts", f"{ROOT}/data/prompts"))
    monkeypatch.setattr(config, "HASH_WHOLE", 4096)
    monkeypatch.setattr(config, "SAMPLE", 4)

    def write():
        config._hash_files.cache_clear()
        checkpoint.main(["--config", str(settings), "--results", str(tmp_path / "results")])
        record = json.loads((tmp_path / "results/checkpoint.json").read_text())
        return record, config.run_id(config.load(settings))

    return write


def test_one_changed_byte_that_no_sample_sees_changes_the_record(record, tmp_path):
    first, run = record()
    file = tmp_path / "model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-6] ^= 1  # before the last sample; the sign or a low bit of one value
    file.write_bytes(content)
    second, same = record()
    assert same == run
    assert {name for name in first if first[name] != second[name]} == {"files"}
    assert first["files"]["config.json"] == second["files"]["config.json"]
    assert first["files"]["model.safetensors"] != second["files"]["model.safetensors"]
