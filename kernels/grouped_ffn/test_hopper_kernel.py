"""The Gluon grouped product on a Hopper: both products of the whole op within FP32's bound, and a row alone."""

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.grouped_ffn import hopper_kernel
from kernels.grouped_ffn import kernel as ffn_module
from kernels.grouped_ffn.kernel import grouped_ffn
from kernels.grouped_ffn.test_grouped_ffn_kernel import holds, stack
from kernels.linear.hopper_kernel import here
from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise

D, F = 512, 256
LIMIT = 1.0


@pytest.fixture
def hopper(accelerator):
    if accelerator == "cpu" or not here(torch.device(accelerator)):
        pytest.skip("Gluon for sm_90 is neither interpreted nor built elsewhere")
    return accelerator


def case(T, device):
    """Rows, two distinct experts each, skewed to the first: blocks of 1 to 8 slots, and more than one of an expert."""
    picks = torch.tensor([[0, 1], [0, 2], [0, 4], [0, 1], [0, 2], [2, 4], [0, 1]])
    rows = Nvfp4Rows(*(part.to(device) for part in quantise(draw(T, D, seed=3))))
    weights = draw(T, 2, seed=4).abs().to(device)
    return rows, picks.repeat(-(-T // 7), 1)[:T].contiguous().to(device), weights


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 3, 5, 7])
def test_both_products_are_exact_within_the_bound(hopper, T, monkeypatch):
    seen, launch = [], hopper_kernel.launch

    def spy(x, weight, work, out):
        launch(x, weight, work, out)
        seen.append((Nvfp4Rows(x[0].view(torch.uint8), *x[1:]), out.clone(), work.per_row))

    monkeypatch.setattr(hopper_kernel, "launch", spy)
    monkeypatch.setattr(ffn_module, "tile_for", lambda *_: ffn_module.DECODE)
    (gate_up, gate_up_ref), (down, down_ref) = stack(2 * F, D, 0, hopper), stack(D, F, 1, hopper)
    rows, ids, weights = case(T, hopper)
    whole = grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT, dtype=torch.float32)
    (x, both, per_row), (hidden, y, per_slot) = seen
    assert (per_row, per_slot) == (2, 1)
    assert holds(both, x, ids, gate_up_ref, 2)
    assert holds(y, hidden, ids, down_ref, 1)
    assert not holds(both, x, ids.flip(1), gate_up_ref, 2)
    for row in range(T):
        alone = [part[row : row + 1] for part in (*rows, ids, weights)]
        got = grouped_ffn(Nvfp4Rows(*alone[:3]), *alone[3:], gate_up, down, limit=LIMIT, dtype=torch.float32)
        assert_bitwise(got.cpu(), whole[row : row + 1].cpu())


@pytest.mark.gpu
def test_an_expert_with_more_slots_than_a_block_takes_several(hopper, monkeypatch):
    monkeypatch.setattr(ffn_module, "tile_for", lambda *_: ffn_module.DECODE)
    gate_up, down = stack(2 * F, D, 0, hopper)[0], stack(D, F, 1, hopper)[0]
    rows, ids, weights = case(40, hopper)
    assert int(ids.flatten().bincount().max()) > 3 * hopper_kernel.MOST_SLOTS
    whole = grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT, dtype=torch.float32)
    few = [part[5:8] for part in (*rows, ids, weights)]
    got = grouped_ffn(Nvfp4Rows(*few[:3]), *few[3:], gate_up, down, limit=LIMIT, dtype=torch.float32)
    assert_bitwise(got.cpu(), whole[5:8].cpu())
