"""What the gathers of both records share: which keys a program copies, and their rope, BF16 as it is stored."""

import triton
import triton.language as tl

from kernels.sparse_attn.keys_kernel import key_slots


@triton.jit
def own_slots(
    idx_ptr, table_ptr, sequence_ptr, num_keys, table_stride, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """Row of this program, its keys [KEYS], and their slots, int64; -1 where there is no key."""
    row = tl.program_id(0).to(tl.int64)  # row * num_keys * K outgrows int32
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    return row, key, key_slots(idx_ptr, table_ptr, sequence_ptr, row, key, num_keys, table_stride, PAGE)


@triton.jit
def copy_rope(rope_at, out_at, slot, here, NOPE: tl.constexpr):
    """Copy 64 BF16 from [KEYS] to NOPE values after [KEYS], where ``here``; zeros where the slot is -1."""
    column = tl.arange(0, 64)[None, :]
    rope = tl.load(
        rope_at[:, None] + column, mask=(slot >= 0)[:, None], other=0.0, eviction_policy="evict_first"
    )
    tl.store(out_at[:, None] + NOPE + column, rope, mask=here[:, None])
