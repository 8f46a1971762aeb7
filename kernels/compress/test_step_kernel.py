"""A compressor's decode step: the bits of the whole windows' kernel, whose bound on the ref holds for it too."""

import math

import pytest
import torch

from kernels._check import assert_bitwise, assert_fault_seen, draw
from kernels.compress import kernel, ref
from kernels.compress.step_kernel import compress_step
from kernels.compress.test_compress_kernel import bound, slots

CASES = [pytest.param(4, True, 96, id="csa"), pytest.param(16, False, 70, id="hca")]


def rings(B, ratio, overlap, K):
    size = ratio * (1 + overlap)
    return torch.zeros(B, size, K), torch.full((B, size, K), -math.inf)


@pytest.mark.parametrize(("ratio", "overlap", "D"), CASES)
def test_closed_windows_have_the_bits_of_whole_ones(ratio, overlap, D, accelerator):
    """Two sequences, of which one began a few tokens earlier, token by token."""
    K, before, lead, count = D * (1 + overlap), ratio * overlap, 3, 2 * ratio + 1
    kv, gate = draw(2, before + lead + count, K, seed=1), 2 * draw(2, before + lead + count, K, seed=2)
    kv[:, :before], gate[:, :before] = 0, -math.inf
    bias = draw(ratio, K, seed=3).to(accelerator)
    first, second = rings(2, ratio, overlap, K)
    mine, expected = (first.to(accelerator), second.to(accelerator)), (first.clone(), second.clone())
    closed = []
    for token in range(lead + count):
        some = slice(0, 1) if token < lead else slice(0, 2)  # the second starts behind
        positions = torch.tensor([token, token - lead])[some]
        at = positions + before
        new = [x[torch.arange(len(at)), at].to(accelerator) for x in (kv, gate)]
        ring = [x[: len(at)].contiguous() for x in mine]
        got = compress_step(
            *new, *ring, bias, positions.to(accelerator), ratio=ratio, overlap_windows=overlap
        )
        for whole, part in zip(mine, ring, strict=True):
            whole[: len(at)] = part
        assert got.starts.tolist() == [int(p) // ratio * ratio for p in positions]
        for row, position in enumerate(positions.tolist()):
            parts = (x[row].cpu() for x in new), (x[row] for x in expected)
            wanted = ref.step(*parts[0], *parts[1], bias.cpu(), position, overlap=overlap)
            whole = position % ratio == ratio - 1
            assert int(got.entries[row]) == (position // ratio if whole else -1)
            if whole:
                run = slice(position + 1 - ratio, position + 1 + before)
                args = kv[row, run], gate[row, run], bias.cpu()
                same = kernel.compress(*(x.to(accelerator) for x in args), ratio=ratio, overlap=overlap)
                assert_bitwise(got.rows[row].cpu(), same[0].cpu())
                slack = bound(*slots(*args, ratio, overlap))[0]
                assert bool(((got.rows[row].cpu().double() - wanted.double()).abs() <= slack).all())
                closed.append((got.rows[row].cpu(), wanted))
        for ours, theirs in zip(mine, expected, strict=True):
            assert_bitwise(ours.cpu(), theirs)
    assert len(closed) >= 3
    assert_fault_seen(lambda: assert_bitwise(closed[0][0], closed[-1][0]))


def test_refuses(accelerator):
    x, bias, at = torch.zeros(2, 8, device=accelerator), torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64)
    ring = [part.to(accelerator) for part in rings(2, 4, True, 8)]
    args = bias.to(accelerator), at.to(accelerator)
    with pytest.raises(ValueError, match="ring_kv is"):
        compress_step(x, x, *ring, *args, ratio=4, overlap_windows=False)
    with pytest.raises(TypeError, match="positions is"):
        compress_step(x, x, *ring, args[0], args[1].int(), ratio=4, overlap_windows=True)
