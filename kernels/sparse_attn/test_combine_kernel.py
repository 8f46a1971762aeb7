"""The join of splits against its formula, at every number of parts that takes another turn or another program."""

import pytest
import torch

from kernels.sparse_attn.combine_kernel import AT_ONCE, MAX_SPLITS, combine


@pytest.mark.parametrize("parts", [1, 2, 3, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 1, MAX_SPLITS])
def test_every_part_joins_once(parts, accelerator):
    generator = torch.Generator().manual_seed(parts)
    rows, heads, width = 2, 3, 256
    part = torch.randn(parts, rows, heads, width, generator=generator).bfloat16()
    part_lse = torch.randn(parts, rows, heads, generator=generator)
    part_lse[parts // 2, 0] = -torch.inf  # a part without keys
    sinks = torch.randn(heads, generator=generator)
    out = torch.empty(rows, heads, width, device=accelerator)
    lse = torch.empty(rows, heads, device=accelerator)
    combine(*(tensor.to(accelerator) for tensor in (part, part_lse, sinks)), out, lse)

    weights = torch.exp2(part_lse.double())
    total = weights.sum(0)
    want = (weights[..., None] * part.double()).sum(0) / (total + sinks.double().exp())[..., None]
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), total.log(), rtol=1e-6, atol=1e-6)
