"""Experts in FP8 and MXFP4: one product at a time against exact sums, given the bytes that it read, and the whole."""

import numpy as np
import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import bf16
from kernels.fp8_quantise.ref import Fp8Rows, quantise
from kernels.grouped_ffn import fp8_kernel
from kernels.grouped_ffn.fp8_kernel import fp8_grouped_ffn
from kernels.grouped_ffn.ref import FfnRounding
from kernels.grouped_ffn.ref import grouped_ffn as ffn_ref
from kernels.linear.ref import Activation
from kernels.linear.test_fp8_kernel import unit_of, weight_of
from kernels.linear.test_linear_kernel import bound, exact, is_close

E, D, F, K = 5, 256, 128, 2
LIMIT = 1.0
PLAN = FfnRounding(gate_up=bf16.round, hidden=bf16.round, quantise=True, out=bf16.round)
FORMATS = [("fp8", "fp8"), ("mxfp4", "mxfp4"), ("mxfp4", "fp8")]
pytestmark = pytest.mark.usefixtures("poisoned")


def case(T, device):
    """Rows, distinct ascending experts (expert 3 is never chosen), weights: packed and the ref's."""
    rng = np.random.default_rng([2, T])
    ids = [sorted(rng.choice([0, 1, 2, 4], K, replace=False)) for _ in range(T)]
    ids = torch.from_numpy(np.array(ids, dtype=np.int64).reshape(T, K))
    rows = quantise(draw(T, D, seed=3) * 10.0 ** draw(T, 1, seed=4).clamp(-1, 0))
    x = Activation(values=rows.values(), narrow=True)
    return (
        Fp8Rows(*(part.to(device) for part in rows)),
        ids.to(device),
        draw(T, K, seed=5).abs().to(device),
        x,
    )


def stacks(forms, device):
    (gate_up, gate_up_ref), (down, down_ref) = (
        weight_of(form, E, *shape, seed=seed, device=device)
        for form, shape, seed in zip(forms, ((2 * F, D), (D, F)), (6, 7), strict=True)
    )
    return gate_up, down, gate_up_ref, down_ref


def assert_product(x, weight, ref, out, per_row, ids, form, device):
    """Every slot is its expert's exact product within what its sums can lose."""
    values = Fp8Rows(*(part.cpu() for part in x)).values()
    dtype = out.dtype
    for slot, expert in enumerate(ids.flatten().tolist()):
        row = slot // per_row
        one = Activation(values=values[row : row + 1], narrow=True)
        slack = bound(one, ref[expert], dtype, unit_of(form, values.shape[1], device))
        assert is_close(out[slot : slot + 1], exact(one, ref[expert]), slack), (slot, expert)


@pytest.mark.parametrize("forms", FORMATS, ids="-".join)
@pytest.mark.parametrize(("T", "batch"), [(1, False), (3, False), (9, False), (17, True)])
def test_products_are_exact_sums_and_the_whole_is_the_refs(T, batch, forms, accelerator, monkeypatch):
    seen, product = [], fp8_kernel._product

    def spy(x, weight, blocks, tile, out, *, per_row):
        product(x, weight, blocks, tile, out, per_row=per_row)
        seen.append((x, weight, out.clone(), per_row))

    monkeypatch.setattr(fp8_kernel, "_product", spy)
    if batch:
        monkeypatch.setattr(fp8_kernel, "tile_for", lambda *_: fp8_kernel.BATCH)
    gate_up, down, gate_up_ref, down_ref = stacks(forms, accelerator)
    rows, ids, weights, x = case(T, accelerator)
    got = fp8_grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT)
    for (given, weight, out, per_row), ref, form in zip(seen, (gate_up_ref, down_ref), forms, strict=True):
        assert_product(given, weight, ref, out, per_row, ids, form, accelerator)
    y = seen[1][2].cpu().double().view(T, K, D)
    total = (y * weights.cpu().double()[..., None]).sum(1)
    mass = (y * weights.cpu().double()[..., None]).abs().sum(1)
    assert bool(((got.cpu().double() - total).abs() <= mass * 2.0**-22 + total.abs() * 2.0**-8).all())
    want = ffn_ref(x, ids.cpu(), weights.cpu(), gate_up_ref, down_ref, limit=LIMIT, at=PLAN)
    assert float((got.cpu().float() - want).norm()) <= 0.05 * float(
        want.norm()
    )  # a store next to a code's boundary


@pytest.mark.parametrize("forms", FORMATS[:2], ids="-".join)
def test_a_token_has_its_bits_alone_and_none_gives_none(forms, accelerator):
    gate_up, down, _, _ = stacks(forms, accelerator)
    rows, ids, weights, _ = case(5, accelerator)
    whole = fp8_grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT)
    for row in (0, 4):
        cut = slice(row, row + 1)
        alone = fp8_grouped_ffn(
            Fp8Rows(*(part[cut] for part in rows)), ids[cut], weights[cut], gate_up, down, limit=LIMIT
        )
        assert_bitwise(alone.float().cpu(), whole[cut].float().cpu())
    none = fp8_grouped_ffn(
        Fp8Rows(*(part[:0] for part in rows)), ids[:0], weights[:0], gate_up, down, limit=LIMIT
    )
    assert none.shape == (0, D)


def test_misfits_are_refused():
    gate_up, down, _, _ = stacks(("fp8", "mxfp4"), "cpu")
    rows, ids, weights, _ = case(3, "cpu")
    with pytest.raises(ValueError, match=r"down is of shape .* expected \(E, D, F\)"):
        fp8_grouped_ffn(
            rows, ids, weights, gate_up, down._replace(codes=down.codes[1:], scales=down.scales[1:]), limit=1
        )
    with pytest.raises(ValueError, match="codes is"):
        fp8_grouped_ffn(Fp8Rows(rows.codes[:, :128], rows.scales), ids, weights, gate_up, down, limit=1)
    with pytest.raises(TypeError, match="ids is"):
        fp8_grouped_ffn(rows, ids.float(), weights, gate_up, down, limit=1)
