"""What every format's rounding shares: idempotence, symmetry, scaling, independence of batch and device."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from kernels.formats import _oracle, aligned_record, bf16, e2m1, e4m3, fp8_block, fp8_scaled, mxfp4, nvfp4
from kernels.formats.kv_record import RecordLayout

Round = Callable[[Tensor], Tensor]

RECORD = RecordLayout(64)  # with 64 rope: 128 values, as all inputs here
ELEMENT: dict[str, Round] = {
    "e4m3": lambda x: e4m3.decode(e4m3.encode(x)),
    "e2m1": lambda x: e2m1.decode(e2m1.encode(x)),
    "bf16": bf16.round,
}
BLOCK: dict[str, Round] = {
    "fp8_block_64": lambda x: fp8_block.round(x, 64),
    "fp8_block_128": lambda x: fp8_block.round(x, 128),
    "mxfp4": mxfp4.round,
    "kv_record": lambda x: RECORD.decode(*RECORD.encode(x)),
    "aligned_record": aligned_record.round,
}
FACTOR: dict[str, Round] = {"nvfp4": nvfp4.round, "fp8_scaled": fp8_scaled.round}
ALL = ELEMENT | BLOCK | FACTOR


def cases(table: dict[str, Round]) -> pytest.MarkDecorator:
    """Parametrise over the formats of a table."""
    return pytest.mark.parametrize("rounding", table.values(), ids=table.keys())


quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
anything = hnp.arrays(
    np.float32, (2, 128), elements=st.floats(-(2.0**100), 2.0**100, width=32), fill=st.floats(-4, 4, width=32)
)
# Magnitudes from 2^-2 to 2 or 0: after any shift below, no format but E2M1 meets its floor or its limit.
tame = hnp.arrays(
    np.float32,
    (2, 128),
    elements=st.one_of(st.just(0.0), st.floats(0.25, 2, width=32), st.floats(-2, -0.25, width=32)),
    fill=st.just(0.0),
)


@cases(ELEMENT | BLOCK)
@quick
@given(x=anything)
def test_rounding_twice_is_rounding_once(rounding, x):
    once = rounding(torch.from_numpy(x))
    assert torch.equal(rounding(once), once)


@cases(ALL)
@quick
@given(x=anything)
def test_sign_makes_no_difference(rounding, x):
    x = torch.from_numpy(x)
    assert torch.equal(rounding(-x), -rounding(x))


@cases({"e4m3": ELEMENT["e4m3"], "bf16": bf16.round} | BLOCK | FACTOR)
@quick
@given(x=tame, power=st.integers(-3, 7))
def test_powers_of_two_pass_through(rounding, x, power):
    x = torch.from_numpy(x)
    assert torch.equal(rounding(x * 2.0**power), rounding(x) * 2.0**power)


@cases(ALL)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 127, 129])
def test_a_row_does_not_see_its_batch(rounding, num_tokens, device):
    x = torch.from_numpy(_oracle.nasty_rows(num_tokens, 128, seed=num_tokens)).to(device)
    whole = rounding(x)
    assert whole.shape == x.shape
    assert whole.dtype == torch.float32
    for token in range(0, num_tokens, 9):
        assert torch.equal(rounding(x[token]), whole[token])
    assert torch.equal(rounding(x.reshape(1, num_tokens, 1, 128)).reshape(x.shape), whole)


@cases(ALL)
def test_strided_inputs_give_the_same_contiguous_values(rounding, device):
    x = torch.from_numpy(_oracle.nasty_rows(24, 128, seed=0)).to(device)
    want = rounding(x)
    columns = x.T.contiguous().T
    spread = torch.zeros(24, 2, 256, device=device)
    spread[:, 1, ::2] = x
    for same in (columns, spread[:, 1, ::2], x[:1].expand(24, 128)):
        got = rounding(same)
        assert got.is_contiguous()
        assert torch.equal(got, want if same.stride(0) else want[:1].expand(24, 128))


@cases(ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_input_dtype_changes_nothing_but_its_own_rounding(rounding, dtype, device):
    x = torch.from_numpy(_oracle.nasty_rows(30, 128, seed=1)).to(device, dtype).clamp(-6e4, 6e4)
    assert torch.equal(rounding(x), rounding(x.float()))


@cases(ALL)
def test_all_equal_rows_stay_equal(rounding, device):
    x = torch.from_numpy(_oracle.nasty_rows(30, 1, seed=2)).to(device).expand(30, 128)
    got = rounding(x)
    assert torch.equal(got[:, :1].expand(30, 64), got[:, :64])  # a record treats the upper half as rope


@cases(ALL)
def test_integers_are_refused(rounding):
    with pytest.raises(TypeError, match="int64"):
        rounding(torch.ones(2, 128, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: formats compared on the CPU only")
@cases(ALL)
def test_gpu_gives_the_bits_of_the_cpu(rounding):
    x = torch.from_numpy(_oracle.nasty_rows(4096, 128, seed=3))
    _oracle.same_values(rounding(x.cuda()).cpu(), rounding(x).numpy())
