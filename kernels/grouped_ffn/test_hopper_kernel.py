"""The Gluon grouped products on a Hopper: both within FP32's bound, a row alone, and few tokens' own ways bitwise."""

import pytest
import torch

from kernels._check import assert_bitwise, assert_fault_seen, draw
from kernels.grouped_ffn import hopper_down_kernel, hopper_kernel
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
        pytest.skip("no Hopper GPU: Gluon for sm_90 is neither interpreted nor built elsewhere")
    return accelerator


def case(T, device):
    """Rows, two distinct experts each, skewed to the first: blocks of 1 to 8 slots, and more than one of an expert."""
    picks = torch.tensor([[0, 1], [0, 2], [0, 4], [0, 1], [0, 2], [2, 4], [0, 1]])
    rows = Nvfp4Rows(*(part.to(device) for part in quantise(draw(T, D, seed=3))))
    weights = draw(T, 2, seed=4).abs().to(device)
    return rows, picks.repeat(-(-T // 7), 1)[:T].contiguous().to(device), weights


@pytest.mark.gpu
@pytest.mark.parametrize("most_alone", [0, hopper_kernel.MOST_ALONE], ids=["sorted", "each slot alone"])
@pytest.mark.parametrize("T", [1, 2, 3, 5, 7])
def test_both_products_are_exact_within_the_bound(hopper, T, most_alone, monkeypatch):
    seen, launch = [], hopper_kernel.launch

    def spy(x, weight, work, out):
        launch(x, weight, work, out)
        seen.append((Nvfp4Rows(x[0].view(torch.uint8), *x[1:]), out.clone(), work.per_row))

    monkeypatch.setattr(hopper_kernel, "launch", spy)
    monkeypatch.setattr(hopper_kernel, "MOST_ALONE", most_alone)
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


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 5, 8])
def test_slots_alone_have_the_bits_of_slots_by_expert(hopper, T, monkeypatch):
    gate_up, down = stack(2 * F, D, 0, hopper)[0], stack(D, F, 1, hopper)[0]
    rows, ids, weights = case(T, hopper)
    found = []
    for most_alone in (0, T):
        monkeypatch.setattr(hopper_kernel, "MOST_ALONE", most_alone)
        monkeypatch.setattr(ffn_module, "tile_for", lambda *_: ffn_module.DECODE)
        found.append(grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT, dtype=torch.float32))
    assert_bitwise(found[0].cpu(), found[1].cpu())


@pytest.fixture(scope="module")
def wide():
    """Weights of F = 2048, on the CPU: what the kernel that makes SwiGLU's row takes."""
    return stack(2 * 2048, D, 0, "cpu")[0], stack(D, 2048, 1, "cpu")[0]


def both_ways(wide, T, device, monkeypatch, limit=LIMIT):
    """The op with SwiGLU in a launch of its own, and made again by each program of the down product."""
    gate_up, down = (type(part)(*(tensor.to(device) for tensor in part)) for part in wide)
    rows, ids, weights = case(T, device)
    if T > 2:  # a row of zeros, one that is no number, one whose products are near the largest FP32
        rows.codes[0], rows.gsa[1] = 0, float("nan")
        rows.gsa[2] *= 1e30
    monkeypatch.setattr(ffn_module, "tile_for", lambda *_: ffn_module.DECODE)
    launched, launch = [], hopper_down_kernel.launch
    monkeypatch.setattr(
        hopper_down_kernel, "launch", lambda *args, **options: launched.append(1) or launch(*args, **options)
    )
    found = [grouped_ffn(rows, ids, weights, gate_up, down, limit=limit, dtype=torch.float32)]
    monkeypatch.setattr(hopper_down_kernel, "takes", lambda *_: False)
    found.append(grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT, dtype=torch.float32))
    assert launched == [1]
    return [part.cpu() for part in found]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 4])
def test_swiglu_in_the_down_product_has_the_bits_of_its_own_launch(hopper, wide, T, monkeypatch):
    fused, apart = both_ways(wide, T, hopper, monkeypatch)
    assert_bitwise(fused, apart)
    assert fused[-1].isfinite().all()


@pytest.mark.gpu
def test_a_limit_that_is_off_is_seen(hopper, wide, monkeypatch):
    fused, apart = both_ways(wide, 4, hopper, monkeypatch, limit=0.99 * LIMIT)
    assert_fault_seen(lambda: assert_bitwise(fused, apart))
