"""The compressor's pooling against loops, its window arithmetic by hand, and the borders of chunks."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_differs,
    assert_nearest,
    assert_rows_alone,
    assert_threads_agree,
    draw,
    to_bf16,
)
from kernels.compress.ref import pool, windows

D = 33


def slots_by_hand(x, ratio, *, overlap):
    """Entry w's slots, written out token by token."""
    entries = []
    for w in range(len(x) // ratio - int(overlap)):
        if overlap:  # row w * ratio + i is window w - 1, since the rows start one window early
            before = [x[w * ratio + i, : x.shape[1] // 2] for i in range(ratio)]
            own = [x[(w + 1) * ratio + i, x.shape[1] // 2 :] for i in range(ratio)]
            entries.append(before + own)
        else:
            entries.append([x[w * ratio + i] for i in range(ratio)])
    slots = 2 * ratio if overlap else ratio
    width = x.shape[1] // 2 if overlap else x.shape[1]
    return np.array([[v.numpy() for v in e] for e in entries], np.float32).reshape(-1, slots, width)


def oracle(kv, gate):
    """Channel by channel: exponentials over their sum, in 80 bits."""
    kv, gate = kv.astype(np.longdouble), gate.astype(np.longdouble)
    out = np.zeros((kv.shape[0], kv.shape[2]), np.longdouble)
    for w, c in np.ndindex(*out.shape):
        weight = np.exp(gate[w, :, c] - gate[w, :, c].max())
        out[w, c] = (weight * kv[w, :, c]).sum() / weight.sum()
    return out


def projected(windows_, ratio, *, overlap, seed):
    """Rows as the projections give them; with overlap the first window's gate is closed."""
    rows = (windows_ + int(overlap)) * ratio
    width = 2 * D if overlap else D
    kv, gate = draw(rows, width, seed=seed), draw(rows, width, seed=seed + 1) * 3
    if overlap:
        kv[:ratio], gate[:ratio] = 0.0, -math.inf
    return kv, gate


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False), (8, False), (1, True)])
@pytest.mark.parametrize("W", [0, 1, 3, 7])
def test_windows_take_the_right_rows_and_halves(W, ratio, overlap):
    kv, gate = projected(W, ratio, overlap=overlap, seed=1)
    got = windows(kv, gate, ratio, overlap=overlap)
    for tensor, source in zip(got, (kv, gate), strict=True):
        assert_bitwise(tensor.contiguous(), slots_by_hand(source, ratio, overlap=overlap))


def test_windows_by_hand():
    # ratio 2, one channel a series: rows hold (Ca, Cb); the rows before the first window are closed
    kv = torch.tensor([[0.0, 0], [0, 0], [1, 10], [2, 20], [3, 30], [4, 40]])
    slots, _ = windows(kv, kv, 2, overlap=True)
    assert slots.squeeze(-1).tolist() == [[0, 0, 10, 20], [1, 2, 30, 40]]
    slots, _ = windows(kv, kv, 2, overlap=False)
    assert slots[1].tolist() == [[1, 10], [2, 20]]


@pytest.mark.parametrize("slots", [8, 128])
@pytest.mark.parametrize("W", SIZES)
def test_pool_equals_80_bit_arithmetic_rounded_once(W, slots):
    kv, gate = draw(W, slots, 5, seed=3, decades=1), draw(W, slots, 5, seed=4) * 4
    slack = 2.0**-48 * np.abs(kv.numpy()).max(1, initial=0)
    assert_nearest(pool(kv, gate), oracle(kv.numpy(), gate.numpy()), slack=slack)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
def test_the_first_window_of_a_sequence_uses_its_own_half_alone(ratio, overlap):
    kv, gate = projected(2, ratio, overlap=overlap, seed=5)
    entries = pool(*windows(kv, gate, ratio, overlap=overlap))
    if overlap:
        own = kv[ratio : 2 * ratio, D:][None], gate[ratio : 2 * ratio, D:][None]
        assert_bitwise(entries[:1], pool(*own))
    else:
        assert_bitwise(entries[:1], pool(kv[None, :ratio], gate[None, :ratio]))


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_chunk_border_with_the_previous_window_carried_changes_nothing(cut):
    kv, gate = projected(7, 4, overlap=True, seed=7)
    whole = pool(*windows(kv, gate, 4, overlap=True))
    first = pool(*windows(kv[: (cut + 1) * 4], gate[: (cut + 1) * 4], 4, overlap=True))
    second = pool(*windows(kv[cut * 4 :], gate[cut * 4 :], 4, overlap=True))
    assert_bitwise(torch.cat((first, second)), whole)
    lost = gate[cut * 4 :].clone()
    lost[:4] = -math.inf  # the fault: the half window before the border is dropped
    assert_differs(pool(*windows(kv[cut * 4 :], lost, 4, overlap=True)), second)


@pytest.mark.parametrize("W", SIZES[1:])
def test_an_entry_does_not_see_the_others(W):
    rows = {"kv": draw(W, 8, D, seed=9), "gate": draw(W, 8, D, seed=10)}
    assert_rows_alone(lambda r: pool(r["kv"], r["gate"]), rows)


def test_threads_powers_of_two_and_slot_order():
    kv, gate = draw(300, 8, D, seed=11), draw(300, 8, D, seed=12)
    whole = pool(kv, gate)
    assert_threads_agree(lambda: pool(kv, gate))
    assert_bitwise(pool(kv * 2.0**-40, gate), whole * 2.0**-40)
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    assert_bitwise(pool(kv[:, order], gate[:, order]), whole)


def test_strided_slots_give_the_same_bits():
    kv, gate = draw(5, 2, 8, D, seed=13), draw(5, 2, 8, D, seed=14)
    assert_bitwise(pool(kv[:, 1], gate[:, 1]), pool(kv[:, 1].contiguous(), gate[:, 1].contiguous()))


def test_equal_gates_give_the_mean_and_one_open_slot_its_value():
    kv = draw(3, 8, D, seed=15)
    got = pool(kv, torch.full_like(kv, 2.5))
    assert_nearest(got, kv.double().numpy().mean(1), slack=2.0**-50)
    gate = torch.full_like(kv, -math.inf)
    gate[:, 5] = -7.0
    assert_bitwise(pool(kv, gate), kv[:, 5])


def test_extreme_gates_and_values():
    kv = torch.tensor([[[1.0], [2.0]]])
    assert pool(kv, torch.tensor([[[3e38], [-3e38]]])).item() == 1.0
    assert pool(kv, torch.tensor([[[-3e38], [-3e38]]])).item() == 1.5
    assert pool(torch.full((1, 2, 1), 3e38), torch.zeros(1, 2, 1)).item() == np.float32(3e38)
    assert pool(torch.full((1, 2, 1), 2.0**-149), torch.zeros(1, 2, 1)).item() == 2.0**-149


def test_a_window_with_no_open_slot_is_nan_and_nan_stays_in_its_channel():
    kv, gate = draw(4, 8, D, seed=17), draw(4, 8, D, seed=18)
    clean = pool(kv, gate)
    gate[0, :, 3], kv[1, 2, 5], gate[2, 1, 7] = -math.inf, math.nan, math.nan
    got = pool(kv, gate)
    assert got.isnan().nonzero().tolist() == [[0, 3], [1, 5], [2, 7]]
    assert_bitwise(got.masked_fill(got.isnan(), 0.0), clean.masked_fill(got.isnan(), 0.0))


def test_narrower_inputs_or_weights_would_show():
    kv, gate = draw(40, 8, D, seed=19), draw(40, 8, D, seed=20)
    got = pool(kv, gate)
    assert_differs(got, oracle(to_bf16(kv.numpy()), gate.numpy()).astype(np.float32))
    assert_differs(got, oracle(kv.numpy(), to_bf16(gate.numpy())).astype(np.float32))
    weights = torch.softmax(gate, 1).numpy()
    assert_differs(got, (to_bf16(weights) * kv.numpy().astype(np.float64)).sum(1).astype(np.float32))
