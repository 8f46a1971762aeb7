"""Paged bytes of a KV entry: nope in FP8 blocks of 64 with UE8M0 scale bytes, 64 rope values in BF16.

A token is ``nope`` E4M3 bytes, then 64 BF16 little-endian (128 B); its scale bytes, one per 64 nope, are
zero-padded to a multiple of 8. A page of p tokens holds the data of all, then the scales of all, then padding
to a multiple of the data size. For nope = 448 that is 448 + 128 + 8 = 584 B, FlashMLA's ``MODEL1_FP8Sparse``
(tests/quant.py, read 2026-11). Rounding is :mod:`kernels.formats.fp8_block`'s, with the floor on amax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import bf16, fp8_block, ue8m0
from kernels.formats._args import check_uint8

GROUP = 64
ROPE = 64


@dataclass(frozen=True)
class RecordLayout:
    """Sizes of the record, its encoder, and access to pages of it.

    Parameters
    ----------
    nope : int
        Values without rotary embedding, a positive multiple of 64.
    """

    nope: int

    def __post_init__(self) -> None:
        """Refuse a ``nope`` that is no positive multiple of 64."""
        if self.nope < GROUP or self.nope % GROUP:
            raise ValueError(f"nope must be a positive multiple of {GROUP}, got {self.nope}")

    @property
    def data_bytes(self) -> int:
        """Bytes of nope and rope."""
        return self.nope + 2 * ROPE

    @property
    def scale_bytes(self) -> int:
        """Scale bytes, padding included."""
        return -(-(self.nope // GROUP) // 8) * 8

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, data and scales."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` tokens, padding included."""
        return -(-page_size * self.token_bytes // self.data_bytes) * self.data_bytes

    def page_size(self, page_bytes: int) -> int:
        """Tokens in a page of ``page_bytes``: the padding is shorter than a token, so the size tells.

        Raises
        ------
        ValueError
            No page has that size.
        """
        size = page_bytes // self.token_bytes
        if not size or self.page_bytes(size) != page_bytes:
            raise ValueError(f"no page of nope {self.nope} has {page_bytes} bytes")
        return size

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of each token.

        Parameters
        ----------
        x : (..., nope + 64) floating
            Rope last. A NaN or an infinity in 64 nope values makes these 64 NaN; in rope it is kept.

        Returns
        -------
        data : (..., nope + 128) uint8
        scales : (..., scale_bytes) uint8

        Raises
        ------
        ValueError
            The last axis is not nope + 64.
        """
        check_last(x, self.nope + ROPE)
        codes, scale = fp8_block.quantise(x[..., : self.nope], GROUP)
        data = torch.cat([codes, rope_bytes(x[..., self.nope :])], -1)
        used = ue8m0.encode(scale)
        return data, torch.nn.functional.pad(used, (0, self.scale_bytes - used.shape[-1]))

    def decode(self, data: Tensor, scales: Tensor) -> Tensor:
        """Values of each token's bytes.

        Parameters
        ----------
        data : (..., nope + 128) uint8
        scales : (..., scale_bytes) uint8

        Returns
        -------
        (..., nope + 64) float32

        Raises
        ------
        ValueError
            A last axis is not as above.
        """
        check_last(data, self.data_bytes)
        check_last(scales, self.scale_bytes)
        used = ue8m0.decode(scales[..., : self.nope // GROUP])
        nope = fp8_block.dequantise(data[..., : self.nope], used, GROUP)
        return torch.cat([nope, rope_values(data[..., self.nope :])], -1)

    def write(self, pages: Tensor, slots: Tensor, data: Tensor, scales: Tensor) -> None:
        """Store tokens in pages, in place; every other byte stays.

        Parameters
        ----------
        pages : (P, page_bytes) uint8
            Changed. Rows may be strided.
        slots : (T,) int64
            page * page_size + offset, each once.
        data : (T, nope + 128) uint8
        scales : (T, scale_bytes) uint8

        Raises
        ------
        ValueError
            A shape does not match; a slot is outside the pages or appears twice.
        """
        check_last(data, self.data_bytes)
        check_last(scales, self.scale_bytes)
        page, offset, data_view, scale_view = self._locate(pages, slots)
        if data.shape[:-1] != slots.shape or scales.shape[:-1] != slots.shape:
            got = f"{tuple(data.shape)} and {tuple(scales.shape)}"
            raise ValueError(f"{slots.numel()} slots need as many data and scales, got {got}")
        if slots.unique().numel() != slots.numel():
            raise ValueError(
                f"slots of shape {tuple(slots.shape)} hold a slot twice: which token would stay?"
            )
        data_view[page, offset] = check_uint8(data)
        scale_view[page, offset] = check_uint8(scales)

    def read(self, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of tokens in pages.

        Parameters
        ----------
        pages : (P, page_bytes) uint8
        slots : (T,) int64
            page * page_size + offset; repeats are fine.

        Returns
        -------
        data : (T, nope + 128) uint8
        scales : (T, scale_bytes) uint8

        Raises
        ------
        ValueError
            A shape does not match, or a slot is outside the pages (-1 too).
        """
        page, offset, data_view, scale_view = self._locate(pages, slots)
        return data_view[page, offset], scale_view[page, offset]

    def _locate(self, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Page and offset of each slot, and the views (P, p, bytes) of data and scales."""
        # The padding is shorter than a token, so the page's size tells how many tokens it holds.
        page_size = pages.shape[-1] // self.token_bytes
        if pages.ndim != 2 or pages.dtype != torch.uint8 or self.page_bytes(page_size) != pages.shape[-1]:
            raise ValueError(f"no page of nope {self.nope} is {pages.dtype} of shape {tuple(pages.shape)}")
        if slots.ndim != 1 or slots.dtype != torch.int64:
            raise ValueError(
                f"slots must be int64 of one axis, got {slots.dtype} of shape {tuple(slots.shape)}"
            )
        total = pages.shape[0] * page_size
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < total:
            raise ValueError(
                f"slots span {int(slots.min())} to {int(slots.max())}, pages hold 0 to {total - 1}"
            )
        split, end = page_size * self.data_bytes, page_size * self.token_bytes
        data_view = pages[:, :split].unflatten(1, (page_size, self.data_bytes))
        scale_view = pages[:, split:end].unflatten(1, (page_size, self.scale_bytes))
        return slots // page_size, slots % page_size, data_view, scale_view


def rope_bytes(rope: Tensor) -> Tensor:
    """BF16 little-endian bytes of (..., n) floating values: (..., 2 n) uint8."""
    bits = bf16.bits(rope).to(torch.int32)
    return torch.stack([bits & 0xFF, bits >> 8], -1).flatten(-2).to(torch.uint8)


def rope_values(data: Tensor) -> Tensor:
    """Values of BF16 little-endian bytes (..., 2 n) uint8: (..., n) float32."""
    wide = data.to(torch.int32)
    return bf16.from_bits((wide[..., 0::2] | (wide[..., 1::2] << 8)).to(torch.uint16))


def check_last(x: Tensor, size: int) -> None:
    """Refuse a last axis other than ``size``."""
    if x.ndim == 0 or x.shape[-1] != size:
        raise ValueError(f"expected a last axis of {size}, got shape {tuple(x.shape)}")
