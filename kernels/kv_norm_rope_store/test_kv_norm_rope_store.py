"""The fused ref is its parts; stores between them show."""

import torch

from kernels._check import Spy, assert_bitwise, assert_differs, draw
from kernels.formats import bf16
from kernels.formats.kv_record import RecordLayout
from kernels.kv_norm_rope_store.ref import (
    kv_norm_rope_store,
    kv_norm_rope_store_aligned,
    normed_and_turned,
)
from kernels.kv_store.ref import store, store_aligned
from kernels.rmsnorm.ref import rmsnorm
from kernels.rope.ref import cos_sin, inverse_frequencies, rope
from kernels.rounding import exact

EPS, SLOTS = 1e-6, torch.tensor([2, 0, 7])
TURN = cos_sin(torch.tensor([3, 70, 9000]), inverse_frequencies(64, 1e4))
KV, WEIGHT = draw(3, 256, seed=1), draw(256, seed=2)


def pages():
    return torch.zeros(2, RecordLayout(192).page_bytes(4), dtype=torch.uint8)


def stored(between):
    written = pages()
    kv_norm_rope_store(KV, WEIGHT, *TURN, written, SLOTS, eps=EPS, between=between)
    return written


def test_is_norm_rope_and_store():
    turned = rope(rmsnorm(KV, WEIGHT, eps=EPS), *TURN)
    want = pages()
    store(turned, want, SLOTS)
    assert_bitwise(stored(exact), want)
    got, also = ((torch.zeros(2, 4, 320, dtype=torch.uint8), torch.zeros(2, 4)) for _ in range(2))
    kv_norm_rope_store_aligned(KV, WEIGHT, *TURN, *got, SLOTS, eps=EPS)
    store_aligned(turned, *also, SLOTS)
    assert_bitwise(got[0], also[0])
    assert_bitwise(got[1], also[1])


def test_between_is_after_the_norm_and_after_the_turn():
    spy = Spy(bf16.round)
    normed_and_turned(KV, WEIGHT, *TURN, eps=EPS, between=spy)
    assert_bitwise(spy.given[0], rmsnorm(KV, WEIGHT, eps=EPS))
    assert_bitwise(spy.given[1], rope(spy.returned[0], *TURN))
    assert_differs(stored(bf16.round), stored(exact))
