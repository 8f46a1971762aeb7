"""The judge's own decoder against the records' encoders and decoders, byte for byte."""

import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4.judge.records import E2M1_VALUES, E4M3_VALUES, UE8M0_VALUES, RecordError, decode, same_values
from dsv4.model.records import AlignedRecord, Fp8Record, Nvfp4Record
from dsv4.plan import Plan, change, flatten

RECORDS = {
    "seven scales": ({}, Fp8Record(192)),
    "aligned": ({"kv_record": "aligned"}, AlignedRecord(192)),
    "nvfp4": ({"kv_format": "nvfp4"}, Nvfp4Record(192)),
}


def test_every_code_is_what_ml_dtypes_says():
    byte = np.arange(256, dtype=np.uint8)
    assert same_values(E4M3_VALUES, byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
    assert same_values(UE8M0_VALUES, byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)).all()
    assert same_values(E2M1_VALUES, byte[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)).all()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_decodes_to_the_values_that_its_reader_gets(name):
    fields, record = RECORDS[name]
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))
    x = x * torch.logspace(-6, 3, 40)[:, None]
    x[0] = 0.0
    x[1, 5] = torch.nan
    x[2, 250] = -torch.inf
    data, scales = record.encode(x)
    values, _ = record.decode(data, scales)
    found = decode(torch.cat((data, scales), -1).numpy(), flatten(change(Plan(), fields)), 192, 64)
    assert same_values(found.values, values.numpy()).all()
    spread = np.repeat(found.scale, 192 // found.scale.shape[-1], axis=-1)
    assert np.allclose(found.codes * spread, values[:, :192].numpy(), rtol=1e-7, atol=0, equal_nan=True)


def test_bytes_of_another_record_are_refused():
    with pytest.raises(RecordError, match="300 bytes a row, a record of this plan has 328"):
        decode(np.zeros((2, 300), np.uint8), flatten(Plan()), 192, 64)


def test_equal_in_every_bit_but_for_nan():
    one = np.array([0.0, 1.0, np.nan, np.inf], np.float32)
    assert same_values(one, np.array([-0.0, 1.0, -np.nan, np.inf], np.float32)).tolist() == [
        False,
        True,
        True,
        True,
    ]
