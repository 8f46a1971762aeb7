"""Paged bytes of a KV entry in four bits: nope in NVFP4 with a gsa a token, 64 rope values in BF16.

A token is ``nope / 2`` bytes of codes, the even index in the low nibble, then 64 BF16 little-endian (128 B); its
scale bytes are one E4M3 per 16 nope, then gsa as FP32 little-endian. A page of p tokens holds the data of all, then
the scales of all, then padding to a multiple of 16 bytes. For nope = 448 that is 224 + 128 + 28 + 4 = 384 B.
Rounding is :mod:`kernels.formats.nvfp4`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import e2m1, nvfp4
from kernels.formats.kv_record import ROPE, RecordLayout, check_last, rope_bytes, rope_values

PAGE_UNIT = 16  # bytes


@dataclass(frozen=True)
class Nvfp4Layout(RecordLayout):
    """Sizes of the record, its encoder, and :class:`~kernels.formats.kv_record.RecordLayout`'s access to pages of it.

    Parameters
    ----------
    nope : int
        Values without rotary embedding, a positive multiple of 64.
    """

    @property
    def data_bytes(self) -> int:
        """Half a byte a nope value, two a rope value."""
        return self.nope // 2 + 2 * ROPE

    @property
    def scale_bytes(self) -> int:
        """One E4M3 per 16 nope, and gsa."""
        return self.nope // nvfp4.GROUP + 4

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` tokens, padding included."""
        return -(-page_size * self.token_bytes // PAGE_UNIT) * PAGE_UNIT

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of each token.

        Parameters
        ----------
        x : (..., nope + 64) floating
            Rope last. A NaN or an infinity in nope makes all nope values NaN; in rope it is kept.

        Returns
        -------
        data : (..., nope / 2 + 128) uint8
        scales : (..., nope / 16 + 4) uint8

        Raises
        ------
        ValueError
            The last axis is not nope + 64.
        """
        check_last(x, self.nope + ROPE)
        codes, scales, gsa = nvfp4.quantise(x[..., : self.nope])
        data = torch.cat((e2m1.pack(codes), rope_bytes(x[..., self.nope :])), dim=-1)
        return data, torch.cat((scales, gsa.contiguous().view(torch.uint8)), dim=-1)

    def decode(self, data: Tensor, scales: Tensor) -> Tensor:
        """Values of each token's bytes.

        Parameters
        ----------
        data : (..., nope / 2 + 128) uint8
        scales : (..., nope / 16 + 4) uint8

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
        half, blocks = self.nope // 2, self.nope // nvfp4.GROUP
        gsa = scales[..., blocks:].contiguous().view(torch.float32)
        nope = nvfp4.dequantise(e2m1.unpack(data[..., :half]), scales[..., :blocks], gsa)
        return torch.cat((nope, rope_values(data[..., half:])), dim=-1)
