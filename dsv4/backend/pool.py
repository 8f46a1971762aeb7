"""Pages on the device that the caches of all sequences share, one pool a layer and record, and stores in them.

Window rows and compressed entries of a layer lie in one pool, so that attention reads both through one list of
slots (page * page_size + offset), for every sequence of a batch in one launch.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.model.records import AlignedRecord, Fp8Record, Nvfp4Record, Record
from kernels.page_slots.ref import row_slots

POISON = 0xFF  # NaN in every format of a record: a slot that is read before it is written shows
ALIGN = 16  # bytes: where pages may start


class PagePool:
    """Fixed-size pages of one record format.

    Parameters
    ----------
    record : Record
    page_size : int
        Tokens a page.
    device : of the pages.

    Attributes
    ----------
    pages : (P, page_bytes) uint8
        Data of a page's tokens, then their scales, then padding; an aligned record's scales lie in ``token_scale``.
    token_scale : (P, page_size) FP32, or None
    """

    def __init__(self, record: Record, page_size: int, device: torch.device) -> None:
        self.record, self.page_size, self.device = record, page_size, device
        self.aligned = isinstance(record, AlignedRecord)
        self.pages = torch.empty(0, self.page_bytes, dtype=torch.uint8, device=device)
        self.token_scale = torch.empty(0, page_size, device=device) if self.aligned else None
        self._free: list[int] = []

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without an aligned record's scales."""
        if isinstance(self.record, Fp8Record | Nvfp4Record):
            return self.record.layout.page_bytes(self.page_size)
        scales = 0 if self.aligned else self.record.scale_bytes
        return -(-self.page_size * (self.record.data_bytes + scales) // ALIGN) * ALIGN

    @property
    def data(self) -> Tensor:
        """Data of the tokens: (P, page_size, data_bytes) uint8."""
        size = self.page_size * self.record.data_bytes
        return self.pages[:, :size].unflatten(1, (self.page_size, self.record.data_bytes))

    @property
    def scales(self) -> Tensor:
        """Scale bytes of the tokens: (P, page_size, scale_bytes) uint8."""
        if self.token_scale is not None:
            return self.token_scale[..., None].view(torch.uint8)
        start, size = self.page_size * self.record.data_bytes, self.page_size * self.record.scale_bytes
        return self.pages[:, start : start + size].unflatten(1, (self.page_size, self.record.scale_bytes))

    def take(self, never: int) -> int:
        """A free page other than page ``never``: a reader that ignores the table reads something else."""
        if not self._free or self._free == [never]:
            self._grow()
        last = -2 if self._free[-1] == never else -1
        return self._free.pop(last)

    def give(self, pages: list[int]) -> None:
        """Take pages back; a negative one was given back before."""
        self._free += [page for page in pages if page >= 0]

    def _grow(self) -> None:
        old = len(self.pages)
        size = max(8, 2 * old)
        pages = torch.full((size, self.page_bytes), POISON, dtype=torch.uint8, device=self.device)
        pages[:old] = self.pages
        self.pages = pages
        if self.token_scale is not None:
            scale = torch.full((size, self.page_size), torch.nan, device=self.device)
            scale[:old] = self.token_scale
            self.token_scale = scale
        self._free += range(old, size)


class PooledStore:
    """Rows of one sequence in pages of a pool; the pages go back when the store is dropped.

    Attributes
    ----------
    table : page of each run of ``page_size`` rows; -1 where it was given back.
    rows : rows that were written.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.table: list[int] = []
        self.rows = 0
        weakref.finalize(self, pool.give, self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use."""
        scales = 4 * self.pool.page_size if self.pool.aligned else 0
        return sum(page >= 0 for page in self.table) * (self.pool.page_bytes + scales)

    def reserve(self, rows: int) -> None:
        """Have pages for rows 0 to ``rows``, which are written next."""
        self.rows = max(self.rows, rows)
        self.have_pages(rows)

    def have_pages(self, rows: int) -> None:
        """Have pages for rows 0 to ``rows``, written or not."""
        while len(self.table) * self.pool.page_size < rows:
            self.table.append(self.pool.take(len(self.table)))

    def release(self, first: int) -> None:
        """Give back the pages that hold only rows before ``first``."""
        for page in range(min(first // self.pool.page_size, len(self.table))):
            self.pool.give([self.table[page]])
            self.table[page] = -1

    def slots(self, rows: Tensor) -> Tensor:
        """Slots of rows of any shape, int64; negative rows stay -1."""
        if not self.table:
            return torch.full_like(rows, -1)
        return slots_of(
            rows, torch.tensor(self.table, dtype=torch.int64, device=rows.device), self.pool.page_size
        )

    def tables(self, stores: "Sequence[PooledStore]") -> Tensor:
        """Page tables of the stores of a batch's sequences, 0 beyond: (B, M) int32."""
        width = max(max(len(store.table) for store in stores), 1)
        padded = [store.table + [0] * (width - len(store.table)) for store in stores]
        return torch.tensor(padded, dtype=torch.int32, device=self.pool.device)

    def owners(self, counts: Sequence[int]) -> Tensor:
        """Whose each row of a batch is, of so many rows a sequence: (T,) int32."""
        every = torch.arange(len(counts), dtype=torch.int32)
        return every.repeat_interleave(torch.tensor(counts)).to(self.pool.device)


def slots_of(rows: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Slots of rows of any shape by a page table (M,); negative rows stay -1."""
    return row_slots(rows.flatten(), table[None], torch.zeros_like(rows).flatten(), page_size).view(
        rows.shape
    )


def stored_bytes(pool: PagePool, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Data (T, data_bytes) and scale bytes (T, scale_bytes) at slots (T,) int64."""
    page, offset = slots // pool.page_size, slots % pool.page_size
    return pool.data[page, offset], pool.scales[page, offset]


def put_bytes(pool: PagePool, slots: Tensor, data: Tensor, scales: Tensor) -> None:
    """Write encoded rows at slots (T,) int64."""
    page, offset = slots // pool.page_size, slots % pool.page_size
    pool.data[page, offset] = data
    pool.scales[page, offset] = scales
