"""Expert kernels: slots by expert, one product at a time against exact sums, and the whole against its parts.

The whole is not compared with the ref in one step: a sum that is one FP32 rounding off may move a BF16 store, the
store a code, and no bound would be both safe and sharp. Each product is held to what FP32 sums can lose (see
kernels/linear/test_linear_kernel.py), given the bytes that it read; SwiGLU's quantiser is bitwise in its own op.
"""

import math

import numpy as np
import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import bf16, e2m1, nvfp4
from kernels.grouped_ffn import kernel as ffn_module
from kernels.grouped_ffn.group_kernel import group, max_blocks
from kernels.grouped_ffn.kernel import dense_ffn, grouped_ffn
from kernels.grouped_ffn.ref import FfnRounding
from kernels.grouped_ffn.ref import grouped_ffn as ffn_ref
from kernels.linear.kernel import Nvfp4Weight
from kernels.linear.ref import Weight, quantise_activation
from kernels.linear.tiles import DECODE, Tile
from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise

E, D, F, K = 5, 144, 64, 2
LIMIT = 1.0
PLAN = FfnRounding(gate_up=bf16.round, hidden=bf16.round, quantise=True, out=bf16.round)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that no kernel wrote is NaN, or an index far outside."""
    empty = torch.empty

    def filled(*size, **options):
        memory = empty(*size, **options)
        return memory.view(torch.uint8).fill_(0xFF).view(memory.dtype)

    monkeypatch.setattr(torch, "empty", filled)


def stack(n, k, seed, device):
    """Experts packed, and the ref's."""
    matrix = draw(E, n, k, seed=seed)
    scale_2 = matrix.abs().amax((1, 2)) / 2688 * torch.tensor([1.0, 2, 0.5, 1, 3])
    codes, scales, _ = nvfp4.quantise(matrix, scale_2[:, None, None])
    scale_2 /= 8
    values = nvfp4.scaled_values(codes, scales).double().transpose(1, 2).contiguous()
    packed = Nvfp4Weight(e2m1.pack(codes), scales, scale_2)
    return Nvfp4Weight(*(part.to(device) for part in packed)), Weight(
        values=values, scale=scale_2.double(), format="nvfp4"
    )


def case(T, device, seed=2):
    """Rows, distinct ascending experts (expert 3 is never chosen), weights: packed and the ref's."""
    rng = np.random.default_rng([seed, T])
    ids = [sorted(rng.choice([0, 1, 2, 4], K, replace=False)) for _ in range(T)]
    ids = torch.from_numpy(np.array(ids, dtype=np.int64).reshape(T, K))
    x = draw(T, D, seed=seed) * 10.0 ** draw(T, 1, seed=seed + 2).clamp(-2, 1)
    rows = Nvfp4Rows(*(part.to(device) for part in quantise(x)))
    weights = draw(T, K, seed=seed + 1).abs()
    return rows, ids.to(device), weights.to(device), quantise_activation(x, "nvfp4")


def slots_by_hand(ids, bt):
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    blocks = []
    for expert in sorted(set(flat)):
        mine = [at for at, slot in enumerate(order) if flat[slot] == expert]
        blocks += [(expert, mine[i], len(mine[i : i + bt])) for i in range(0, len(mine), bt)]
    return order, blocks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("T", "k", "experts", "bt"),
    [(1, 1, 1, 8), (3, 2, 5, 8), (127, 6, 256, 8), (600, 6, 16, 64), (40, 2, 2, 8)],
)
def test_slots_are_sorted_by_expert_and_cut_into_blocks(accelerator, T, k, experts, bt, dtype):
    rng = np.random.default_rng([T, k])
    ids = np.stack([np.sort(rng.choice(experts, k, replace=False)) for _ in range(T)])
    if (T, k) == (40, 2):
        ids[:] = [0, 1]
    got = group(torch.from_numpy(ids).to(dtype).to(accelerator), experts, bt)
    order, blocks = slots_by_hand(ids, bt)
    assert got.slots.tolist() == order
    count = len(blocks)
    assert count <= len(got.expert) == max_blocks(T * k, experts, bt)
    assert list(zip(*(part[:count].tolist() for part in got[1:]), strict=True)) == blocks
    assert (got.expert[count:] == -1).all()


def test_no_choice_needs_more_blocks_than_there_are(accelerator):
    for size, experts, bt in ((1, 8, 8), (64, 4, 8), (100, 7, 16), (12, 256, 8)):
        for spread in range(
            1, min(size, experts) + 1
        ):  # all but `spread` experts idle, one of them holds the rest
            counts = [1] * (spread - 1) + [size - spread + 1]
            assert sum(math.ceil(c / bt) for c in counts) <= max_blocks(size, experts, bt)


def products(accelerator, T, monkeypatch, tile=None):
    """Runs the whole; gives (what each product read and wrote, result, the case)."""
    seen = []
    product = ffn_module._product

    def spy(x, weight, blocks, tile_, how, out, *, per_row):
        product(x, weight, blocks, tile_, how, out, per_row=per_row)
        seen.append((x, weight, out.clone(), per_row))

    monkeypatch.setattr(ffn_module, "_product", spy)
    if tile is not None:
        monkeypatch.setattr(ffn_module, "tile_for", lambda *_: tile)
    (gate_up, gate_up_ref), (down, down_ref) = stack(2 * F, D, 0, accelerator), stack(D, F, 1, accelerator)
    rows, ids, weights, x = case(T, accelerator)
    got = grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT)
    want = ffn_ref(x, ids.cpu(), weights.cpu(), gate_up_ref, down_ref, limit=LIMIT, at=PLAN)
    return seen, got, want, (ids, weights, gate_up_ref, down_ref)


def exact_slots(x, ids, weight, per_row):
    """Exact product of every slot, and its sum of magnitudes: (S, N) FP64."""
    values = nvfp4.scaled_values(e2m1.unpack(x.codes.cpu()), x.scales.cpu()).double()
    total, mass = [], []
    for slot, expert in enumerate(ids.flatten().tolist()):
        row = slot // per_row
        scale = weight.scale[expert] * float(x.gsa[row])
        total.append(values[row] @ weight.values[expert] * scale)
        mass.append(values[row].abs() @ weight.values[expert].abs() * scale)
    return torch.stack(total), torch.stack(mass)


def holds(got, x, ids, weight, per_row):
    want, mass = exact_slots(x, ids, weight, per_row)
    half_ulp = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-24
    slack = (weight.values.shape[1] * 17 / 16 + 10) * 2.0**-23 * mass + half_ulp * want.abs()
    return bool(((got.cpu().double() - want).abs() <= slack).all())


@pytest.mark.parametrize("T", [1, 3, 5, 17, 33])
def test_both_products_and_the_weighted_sum(accelerator, T, monkeypatch):
    seen, got, want, (ids, weights, gate_up, down) = products(accelerator, T, monkeypatch)
    (x, _, both, per_row), (hidden, _, y, per_slot) = seen
    assert (per_row, per_slot) == (K, 1)
    assert holds(both, x, ids, gate_up, K)
    assert holds(y, hidden, ids, down, 1)
    terms = y.cpu().double().view(T, K, D) * weights.cpu().double()[:, :, None]
    slack = (K + 1) * 2.0**-24 * terms.abs().sum(1) + 2.0**-8 * terms.sum(1).abs()
    assert ((got.cpu().double() - terms.sum(1)).abs() <= slack).all()
    # codes that moved with a store move the result a little: the whole is near the ref, the sharp limits are above
    distance = (got.cpu().double() - want.double()).norm() / want.double().norm()
    assert distance < 2.0**-7
    faults = {
        "scale_2 of the next expert": Weight(
            values=gate_up.values, scale=gate_up.scale.roll(1), format="nvfp4"
        ),
        "next expert": Weight(values=gate_up.values.roll(1, 0), scale=gate_up.scale, format="nvfp4"),
        "up before gate": Weight(values=gate_up.values.roll(F, 2), scale=gate_up.scale, format="nvfp4"),
    }
    for name, fault in faults.items():
        assert not holds(both, x, ids, fault, K), name
    assert not holds(both, x, ids.flip(1), gate_up, K)


def test_an_expert_with_more_slots_than_a_tile_takes_several_blocks(accelerator, monkeypatch):
    seen, _, _, (ids, _, gate_up, down) = products(accelerator, 33, monkeypatch, tile=DECODE)
    assert ids.flatten().bincount().max() > DECODE.bt
    assert holds(seen[0][2], seen[0][0], ids, gate_up, K)
    assert holds(seen[1][2], seen[1][0], ids, down, 1)


def test_a_block_that_is_skipped_shows(accelerator, monkeypatch):
    grouped = ffn_module.group

    def short(*args):
        blocks = grouped(*args)
        blocks.expert[2] = -1
        return blocks

    monkeypatch.setattr(ffn_module, "group", short)
    seen, *_, (ids, _, gate_up, _) = products(accelerator, 5, monkeypatch)
    assert not holds(seen[0][2], seen[0][0], ids, gate_up, K)


def test_rows_do_not_see_their_batch(accelerator):
    gate_up, down = stack(2 * F, D, 0, accelerator)[0], stack(D, F, 1, accelerator)[0]
    rows, ids, weights, _ = case(5, accelerator)  # 10 slots of 5 experts: the small tile
    whole = grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT, dtype=torch.float32)
    for row in range(5):
        alone = [part[row : row + 1] for part in (*rows, ids, weights)]
        got = grouped_ffn(Nvfp4Rows(*alone[:3]), *alone[3:], gate_up, down, limit=LIMIT, dtype=torch.float32)
        assert_bitwise(got.cpu(), whole[row : row + 1].cpu())
    again = grouped_ffn(
        rows, ids.int(), weights, gate_up, down, limit=LIMIT, dtype=torch.float32, out=torch.empty_like(whole)
    )
    assert_bitwise(again.cpu(), whole.cpu())


def test_no_tokens_and_a_bad_row(accelerator):
    gate_up, down = stack(2 * F, D, 0, accelerator)[0], stack(D, F, 1, accelerator)[0]
    rows, ids, weights, _ = case(3, accelerator)
    none = grouped_ffn(
        Nvfp4Rows(*(part[:0] for part in rows)), ids[:0], weights[:0], gate_up, down, limit=LIMIT
    )
    assert none.shape == (0, D)
    rows.gsa[1] = math.nan
    got = grouped_ffn(rows, ids, weights, gate_up, down, limit=LIMIT)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("T", [0, 1, 3])
def test_the_shared_expert_is_one_expert_of_all_rows(accelerator, T):
    gate_up, down = stack(2 * F, D, 0, accelerator)[0], stack(D, F, 1, accelerator)[0]
    rows, ids, weights, _ = case(T, accelerator)
    halves = Nvfp4Weight(
        gate_up.codes[2].view(2, F, -1), gate_up.scales[2].view(2, F, -1), gate_up.scale_2[2:3].clone()
    )
    one = Nvfp4Weight(down.codes[2], down.scales[2], down.scale_2[2:3].clone())
    got = dense_ffn(rows, halves, one, limit=LIMIT, dtype=torch.float32)
    as_routed = grouped_ffn(
        rows,
        torch.full_like(ids[:, :1], 2),
        torch.ones_like(weights[:, :1]),
        gate_up,
        down,
        limit=LIMIT,
        dtype=torch.float32,
    )
    assert_bitwise(got.cpu(), as_routed.cpu())


def test_another_stored_format_is_refused_by_name(accelerator):
    gate_up, down = stack(2 * F, D, 0, "cpu")[0], stack(D, F, 1, "cpu")[0]
    rows, ids, weights, _ = case(3, "cpu")
    bad = {
        "gate_up is torch.bfloat16": (gate_up._replace(codes=torch.zeros(E, 2 * F, D // 2).bfloat16()), down),
        "down_scales is": (gate_up, down._replace(scales=down.scales[:, :, :2].contiguous())),
        "gate_up_scale_2 is": (gate_up._replace(scale_2=gate_up.scale_2[:1]), down),
        "gate_up is torch.uint8": (gate_up._replace(codes=gate_up.codes[:, :F].contiguous()), down),
    }
    for message, pair in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            grouped_ffn(rows, ids, weights, *pair, limit=LIMIT)
    with pytest.raises(TypeError, match="ids is"):
        grouped_ffn(rows, ids.float(), weights, gate_up, down, limit=LIMIT)


def test_the_large_tile_is_for_more_than_two_slots_an_expert():
    assert ffn_module.tile_for(64 * 6, 256, False) == DECODE
    assert ffn_module.tile_for(4096 * 6, 256, False).bt == 64
    assert isinstance(ffn_module.tile_for(6, 256, True), Tile)
