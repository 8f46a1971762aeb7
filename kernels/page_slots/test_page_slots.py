"""Slots behind page tables: the ref by hand, and the kernel equal to it on every size, table and edge."""

import pytest
import torch

from kernels._check import SIZES, assert_bitwise, assert_fault_seen
from kernels.page_slots import kernel, ref

PAGE, WINDOW = 4, 6
WINDOWS = torch.tensor([[7, 0, 3, -1], [2, 9, 1, 5]], dtype=torch.int32)  # -1 is behind what a row sees
ENTRIES = torch.tensor([[8, 4], [6, 2**24]], dtype=torch.int32)


def drawn(T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 12, (T,), generator=generator)
    chosen = torch.randint(-1, 8, (T, 5), generator=generator).int()
    return positions, torch.arange(T).int() % 2, chosen


def test_slots_by_hand():
    rows, sequence = torch.tensor([0, 5, -1]), torch.tensor([0, 1, 0])
    assert ref.row_slots(rows, WINDOWS, sequence, PAGE).tolist() == [28, 37, -1]
    got = ref.key_slots(
        torch.tensor([4]), torch.tensor([0]), WINDOWS, ENTRIES, window=3, page_size=PAGE, ratio=2, count=3
    )
    assert got.tolist() == [[30, 31, 0, 32, 33, -1]]


@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_slots_equal_the_ref(T, dtype, accelerator):
    positions, sequence, _ = drawn(T)
    rows = torch.where(positions % 3 == 1, -positions, positions).to(dtype)  # some are row 0
    wide = torch.full((2, 9), 77, dtype=dtype)
    wide[:, 2:6] = WINDOWS
    got = kernel.row_slots(*(t.to(accelerator) for t in (rows, wide)), sequence.to(accelerator), PAGE)
    assert_bitwise(got.cpu(), ref.row_slots(rows, wide, sequence, PAGE))
    strided = wide.to(accelerator)[:, 2:6]
    got = kernel.row_slots(rows.to(accelerator), strided, sequence.to(accelerator), PAGE)
    assert_bitwise(got.cpu(), ref.row_slots(rows, WINDOWS, sequence, PAGE))


@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("kind", ["window", "csa", "hca", "no entries yet"])
def test_key_slots_equal_the_ref(T, kind, accelerator):
    positions, sequence, chosen = drawn(T, seed=1)
    args = [positions, sequence, WINDOWS]
    args += [] if kind == "window" else [ENTRIES, chosen] if kind == "csa" else [ENTRIES]
    options = {"window": WINDOW, "page_size": PAGE, "ratio": 2, "count": 8 if kind == "hca" else 0}
    got = kernel.key_slots(*(t.to(accelerator) for t in args), **options)
    assert_bitwise(got.cpu(), ref.key_slots(*args, **options))
    if T == 129 and kind in ("csa", "hca"):
        for fault in (args[0] + 1, args[0] - 1):
            wrong = ref.key_slots(fault.clamp(0, 11), *args[1:], **options)
            assert_fault_seen(lambda wrong=wrong: assert_bitwise(got.cpu(), wrong))


def test_a_list_wider_than_a_program(accelerator):
    table = torch.randperm(200, generator=torch.Generator().manual_seed(2)).int()[None]
    args = torch.tensor([799, 399]), torch.zeros(2, dtype=torch.int32), table, table
    options = {"window": 300, "page_size": PAGE, "ratio": 2, "count": 390}
    got = kernel.key_slots(*(t.to(accelerator) for t in args), **options)
    assert_bitwise(got.cpu(), ref.key_slots(*args, **options))


def test_a_misfit_is_refused():
    positions, sequence, _ = drawn(3)
    with pytest.raises(ValueError, match="key_slots: ratio = 0"):
        kernel.key_slots(positions, sequence, WINDOWS, ENTRIES, window=3, page_size=PAGE, count=2)
    with pytest.raises(TypeError, match=r"row_slots: rows is torch\.float32"):
        kernel.row_slots(positions.float(), WINDOWS, sequence, PAGE)
    with pytest.raises(ValueError, match="key_slots: sequence"):
        kernel.key_slots(positions, sequence[:2], WINDOWS, window=3, page_size=PAGE)
