"""The files of the tap writer are safetensors files, and an old writer says so."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from dsv4.engine.tap_writer import Job, read_tensors, write_tensors


def test_files_are_safetensors_both_ways(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([[1, -1]], np.int64),
        "c": np.zeros((0, 4), np.uint8),
    }
    write_tensors(tmp_path / "ours.safetensors", arrays)
    theirs = load_file(tmp_path / "ours.safetensors")
    save_file(arrays, tmp_path / "theirs.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(read_tensors(tmp_path / "theirs.safetensors")[name], array)
    with pytest.raises(ValueError, match="d is complex128; writable: float32"):
        write_tensors(tmp_path / "no.safetensors", {"d": np.zeros(2, complex)})


def test_bf16_is_read_as_float32(tmp_path):
    x = torch.randn(5, 3).bfloat16()
    save_torch({"x": x}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read_tensors(tmp_path / "x.safetensors")["x"], x.float().numpy())


def test_an_old_tap_writer_says_so(tmp_path):
    (tmp_path / "job.json").write_text('{"schema": 99}')
    with pytest.raises(SystemExit, match="schema 99, this tap writer has 1"):
        Job(tmp_path)
