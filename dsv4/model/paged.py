"""Paged storage of records behind a page table."""

import copy

import torch
from torch import Tensor

from dsv4.model.records import Fp8Record, Record


class PagedStore:
    """Rows of one record format in fixed-size pages.

    Physical pages are handed out from the end of the pool, and logical page i is never physical
    page i, so that a reader that ignores the table reads something else.

    Parameters
    ----------
    record : Record
    page_size : int
        Tokens a page.
    capacity : int or None
        None: grows. Else a ring: row ``r`` lives in slot ``r mod`` the capacity, rounded up to
        whole pages.
    device : of the pages.
    """

    def __init__(
        self,
        record: Record,
        page_size: int,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.record, self.page_size = record, page_size
        self.slots = None if capacity is None else -(-capacity // page_size) * page_size
        self.pages = torch.empty(0, self._page_bytes(), dtype=torch.uint8, device=device)
        self.table: list[int] = []

    def _page_bytes(self) -> int:
        if isinstance(self.record, Fp8Record):
            return self.record.layout.page_bytes(self.page_size)
        return self.page_size * (self.record.data_bytes + self.record.scale_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use."""
        return len(self.table) * self._page_bytes()

    def copy(self) -> "PagedStore":
        """The same rows in pages of their own; what is written to one is not in the other."""
        other = copy.copy(self)
        other.pages, other.table = self.pages.clone(), list(self.table)
        return other

    def write(self, rows: Tensor, data: Tensor, scales: Tensor) -> None:
        """Store encoded rows at logical indices ``rows`` (T,) int64."""
        rows = rows.to(self.pages.device)
        slots = rows if self.slots is None else rows % self.slots
        if len(slots):
            self._reserve(int(slots.max()) // self.page_size + 1)
        physical = self._physical(slots)
        if isinstance(self.record, Fp8Record):
            self.record.layout.write(self.pages, physical, data, scales)
            return
        data_view, scale_view = self._views()
        data_view[physical // self.page_size, physical % self.page_size] = data
        scale_view[physical // self.page_size, physical % self.page_size] = scales

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Decode the rows at logical indices (T,) int64; see :meth:`Record.decode`."""
        rows = rows.to(self.pages.device)
        physical = self._physical(rows if self.slots is None else rows % self.slots)
        if isinstance(self.record, Fp8Record):
            return self.record.decode(*self.record.layout.read(self.pages, physical))
        data_view, scale_view = self._views()
        page, offset = physical // self.page_size, physical % self.page_size
        return self.record.decode(data_view[page, offset], scale_view[page, offset])

    def _views(self) -> tuple[Tensor, Tensor]:
        split = self.page_size * self.record.data_bytes
        data = self.pages[:, :split].unflatten(1, (self.page_size, self.record.data_bytes))
        return data, self.pages[:, split:].unflatten(1, (self.page_size, self.record.scale_bytes))

    def _reserve(self, count: int) -> None:
        if count >= len(self.pages):  # one page to spare, so that the last one too has a choice
            size = max(count + 1, 2 * len(self.pages)), self._page_bytes()
            grown = torch.zeros(size, dtype=torch.uint8, device=self.pages.device)
            grown[: len(self.pages)] = self.pages
            self.pages = grown
        used = set(self.table)
        free = [page for page in range(len(self.pages)) if page not in used]
        while len(self.table) < count:
            self.table.append(free.pop(-2 if free[-1] == len(self.table) else -1))

    def _physical(self, slots: Tensor) -> Tensor:
        if not len(slots):
            return slots
        table = torch.tensor(self.table, dtype=torch.int64, device=slots.device)
        return table[slots // self.page_size] * self.page_size + slots % self.page_size
