"""Rows of kv as bytes of a cache, in a record of ``kernels.formats``: kv_record, aligned_record or nvfp4_record.

A slot is page * page_size + offset; a negative one is skipped (a padded batch).
"""

from torch import Tensor

from kernels.formats import aligned_record
from kernels.formats.kv_record import RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout


def store(kv: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write rows as records of seven scales (one per 64 nope), in place.

    Parameters
    ----------
    kv : (T, nope + 64) floating
    pages : (P, page_bytes) uint8
        Changed: the slots' bytes alone. Returned is None, not a (T,) of anything.
    slots : (T,) int64
        Each once but for negative ones.
    """
    _write(RecordLayout(kv.shape[-1] - 64), kv, pages, slots)


def store_nvfp4(kv: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write rows as records of NVFP4 (a scale per 16 nope, gsa a row), in place.

    Parameters
    ----------
    kv : (T, nope + 64) floating
    pages : (P, page_bytes) uint8
        Changed: the slots' bytes alone.
    slots : (T,) int64
        Each once but for negative ones.
    """
    _write(Nvfp4Layout(kv.shape[-1] - 64), kv, pages, slots)


def _write(layout: RecordLayout, kv: Tensor, pages: Tensor, slots: Tensor) -> None:
    own = slots >= 0
    layout.write(pages, slots[own], *layout.encode(kv[own]))


def store_aligned(kv: Tensor, data: Tensor, token_scale: Tensor, slots: Tensor) -> None:
    """Write rows as aligned records, in place.

    Parameters
    ----------
    kv : (T, nope + 64) floating
    data : (P, p, nope + 128) uint8
    token_scale : (P, p) FP32
        Changed like ``data``: the slots' values alone.
    slots : (T,) int64
        Each once but for negative ones.
    """
    own = slots >= 0
    page, offset = slots[own] // data.shape[1], slots[own] % data.shape[1]
    encoded, scale = aligned_record.encode(kv[own])
    data[page, offset] = encoded
    token_scale[page, offset] = scale.squeeze(-1)
