"""How large keys may be: powers of two on them, taken back by the softmax's scale, change no bit.

Everywhere on the portable path; on the Hopper path, whose sums carry 2^60, up to the scales that its docstring names.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from kernels._check import assert_bitwise
from kernels.sparse_attn.test_bound import Inputs, case, run
from kernels.sparse_attn.test_hopper_kernel import on_hopper

PATHS = ("b1", "b1_q2", "b1_aligned", "b1_aligned_q2")
LARGEST = {"b1": 2.0**67, "b1_q2": 2.0**67, "b1_aligned": 2.0**40, "b1_aligned_q2": 2.0**40}  # scale of a key


@dataclass(frozen=True)
class Raised(Inputs):
    """Inputs whose keys were multiplied by 2^power, and whose logits were not."""

    power: int = 0

    @property
    def scale(self) -> float:
        return super().scale * 2.0**-self.power


def raised(inputs: Inputs, power: int) -> Raised:
    return Raised(inputs.q, inputs.x * 2.0**power, inputs.idx, inputs.sinks, inputs.sequence, power)


def highest(inputs: Inputs, path: str) -> int:
    """Power that brings the largest scale of a key to the path's largest."""
    amax = inputs.x[..., : inputs.nope].abs().max()
    return int(torch.log2(LARGEST[path] / torch.exp2(torch.ceil(torch.log2(amax / 448)))))


def assert_unchanged(path: str, inputs: Inputs, power: int, device: str, by: str) -> None:
    (out, lse), _, _ = run(path, inputs, device, by=by)
    (up, up_lse), _, _ = run(path, raised(inputs, power), device, by=by)
    assert_bitwise(up.float().cpu(), out.float().cpu() * 2.0**power)
    assert_bitwise(up_lse.cpu(), lse.cpu())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("power", [40, 100])
def test_the_portable_path_takes_keys_of_any_size(path, power, accelerator):
    assert_unchanged(path, case(3, 3, 70), power, accelerator, "portable")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("path", PATHS)
def test_the_hopper_path_takes_keys_up_to_its_largest(path):
    inputs = case(3, 64, 200, nope=448)
    assert_unchanged(path, inputs, 24, "cuda", "hopper")
    # further, no scale of the model's takes the logits back: they are zeros, and results a mean of keys
    still, power = replace(inputs, q=torch.zeros_like(inputs.q)), highest(inputs, path)
    (out, lse), _, _ = run(path, still, "cuda", by="hopper")
    (up, up_lse), _, _ = run(path, replace(still, x=still.x * 2.0**power), "cuda", by="hopper")
    assert_bitwise(up.float().cpu(), out.float().cpu() * 2.0**power)
    assert_bitwise(up_lse.cpu(), lse.cpu())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("path", PATHS)
def test_beyond_that_the_hopper_path_is_wrong_as_it_says(path):
    inputs, power = case(3, 64, 200, nope=448), 100
    (clean, _), _, _ = run(path, inputs, "cuda", by="hopper")
    (out, _), _, _ = run(path, raised(inputs, power), "cuda", by="hopper")
    if "aligned" in path:
        assert not out[0].isfinite().any()
    else:
        assert out[0].isfinite().all()
        assert out[0].float().abs().sum() < 2.0**power * clean[0].float().abs().sum() / 2


@pytest.mark.parametrize("path", ["b0", "b1a", *PATHS])
def test_a_nan_query_without_keys_is_zeros_on_the_portable_path(path, accelerator):
    inputs = case(3, 3, 20)
    inputs = replace(inputs, q=inputs.q.clone())
    inputs.q[1] = torch.nan  # the row without keys
    (out, lse), _, _ = run(path, inputs, accelerator, by="portable")
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("path", ["b0", *PATHS])
def test_a_nan_query_without_keys_is_nan_on_the_hopper_path(path):
    inputs = case(3, 64, 200, nope=448)
    inputs = replace(inputs, q=inputs.q.clone())
    inputs.q[1] = torch.nan
    (out, lse), _, _ = run(path, inputs, "cuda", by="hopper")
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert out[0].isfinite().all()
