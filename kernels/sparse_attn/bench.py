"""Attention from q_b's product to the attended values, beside B0 and FlashMLA.

Every path starts at the product: the norm of each head, RoPE and the form of q that it reads are in its time. It
ends before the inverse RoPE of the result, the same launch for all. A pool holds keys for all sets of the largest
case; the slots of a case are a part of a permutation of it, so that no key is gathered twice before every set had
its turn. What a path writes, B0's buffer too, rotates with the sets.

A row's keys are split as :func:`kernels.sparse_attn.tiles.room` does where it is not told how; the audit has one split,
whose bits do not depend on the batch. Where the two differ, a row of its own has one.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.bench_case import OURS, REPLACED, Case, rotation
from kernels.formats import aligned_record
from kernels.formats.kv_record import RecordLayout
from kernels.gather_dequantise.kernel import gather_dequantise
from kernels.q_norm_rope_quantise.kernel import norm_rope
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.sparse_attn.combine_kernel import num_splits
from kernels.sparse_attn.kernel import path_of, room, sparse_attn_gathered
from kernels.sparse_attn.product import launches_of, sparse_attn_product
from kernels.sparse_attn.tiles import BLOCK, Room

NOPE, ROPE, WIDTH, PAGE = 448, 64, 512, 64
TOKENS = 1040 * 1024  # of the pool, 620 MB of records: two sets of the largest case
SLAB = 40 * 1024  # tokens that are written at once
MOST_SETS = 512  # two rows of 128 keys: 0.4 MB
EPS, SCALE = 1e-6, WIDTH**-0.5
AGAINST_B0 = ((64, 64, 640), (128, 64, 640), (128, 128, 1152))
AGAINST_PEER = ((2, 64, 640), *AGAINST_B0)
WINDOW = 128
HCA = ((64, "8K", 8192 // 128), (64, "64K", 65536 // 128), (4, "1M", 2**20 // 128), (64, "1M", 2**20 // 128))
ERROR = {1: 8e-2, 2: 1e-2}  # relative L2 by terms of q: measured 2.5e-2 to 5.3e-2 and 2.6e-3 to 5.2e-3


@dataclass(frozen=True)
class Cache:
    """One pool of keys in both records."""

    pages: Tensor
    data: Tensor
    token_scale: Tensor


def _cache(device: torch.device) -> Cache:
    """Keys whose magnitude varies between tokens and between groups, written a slab at a time."""
    layout = RecordLayout(NOPE)
    pages = torch.zeros(TOKENS // PAGE, layout.page_bytes(PAGE), dtype=torch.uint8, device=device)
    data = torch.empty(TOKENS // PAGE, PAGE, NOPE + 2 * ROPE, dtype=torch.uint8, device=device)
    token_scale = torch.empty(TOKENS // PAGE, PAGE, device=device)
    for first in range(0, TOKENS, SLAB):
        slots = torch.arange(first, min(first + SLAB, TOKENS), device=device)
        x = torch.randn(len(slots), WIDTH, device=device)
        x *= torch.exp2(torch.randn(len(slots), WIDTH // 64, device=device)).repeat_interleave(64, -1)
        layout.write(pages, slots, *layout.encode(x))
        own, scale = aligned_record.encode(x)
        data.view(-1, NOPE + 2 * ROPE)[slots] = own
        token_scale.view(-1)[slots] = scale[:, 0]
    return Cache(pages, data, token_scale)


class Work:
    """Inputs of one shape, in rotation, and every path over them; ``splits`` of a row's keys, None: as many as fit."""

    def __init__(self, cache: Cache, B: int, H: int, S: int, splits: int | None = None) -> None:
        device = cache.pages.device
        self.cache, self.B, self.H, self.S = cache, B, H, S
        self.copies = rotation(self.bytes, device, MOST_SETS)
        slots = torch.randperm(TOKENS, dtype=torch.int32, device=device)[: self.copies * B * S]
        self.idx = slots.view(self.copies, B, S)
        self.product = self.memory(H, WIDTH).normal_()
        self.sinks = torch.randn(H, device=device)
        angle = torch.rand(B, ROPE // 2, device=device) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.q = self.memory(H, WIDTH).normal_()
        self.wanted = splits
        self.rooms: dict[str, list[Room]] = {}

    def memory(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Memory of each set, (copies, B, ...)."""
        return torch.empty(self.copies, self.B, *shape, dtype=dtype, device=self.cache.pages.device)

    def room(self, path: str) -> list[Room]:
        """Results of a path by set, allocated once."""
        if path not in self.rooms:
            sizes = self.B, self.H, self.S, WIDTH, self.q.device
            self.rooms[path] = [room(*sizes, splits=self.wanted) for _ in range(self.copies)]
        return self.rooms[path]

    @property
    def splits(self) -> int:
        """Splits of a row's keys, on all of our paths."""
        return self.room("b0")[0].splits

    def b0(self) -> Callable[[int], None]:
        """Norm and RoPE, gather into a BF16 buffer, BF16 attention."""
        into, keys = self.room("b0"), self.memory(self.S, WIDTH)

        def launch(i: int) -> None:
            norm_rope(self.product[i], self.cos, self.sin, eps=EPS, out=self.q[i])
            gather_dequantise(self.cache.pages, self.idx[i], nope=NOPE, out=keys[i])
            sparse_attn_gathered(self.q[i], keys[i], self.idx[i], self.sinks, scale=SCALE, into=into[i])

        return launch

    def b1(self, *, terms: int = 1, aligned: bool = False) -> Callable[[int], None]:
        """Norm, RoPE and quantisation, attention over the pages."""
        into, byte = self.room(f"b1 {terms} {aligned}"), torch.uint8
        record = self.memory(self.H, NOPE + 2 * ROPE, dtype=byte)
        scale = self.memory(self.H, dtype=torch.float32)
        second = self.memory(self.H, NOPE, dtype=byte) if terms == 2 else [None] * self.copies
        q = [QuantisedQ(*parts) for parts in zip(record, scale, second, strict=True)]
        pages, token_scale = (
            (self.cache.data, self.cache.token_scale) if aligned else (self.cache.pages, None)
        )

        def launch(i: int) -> None:
            sparse_attn_product(
                self.product[i],
                self.cos,
                self.sin,
                pages,
                self.idx[i],
                self.sinks,
                eps=EPS,
                scale=SCALE,
                token_scale=token_scale,
                codes=q[i],
                into=into[i],
            )

        return launch

    def flash_mla(self) -> Callable[[int], None]:
        """Norm and RoPE, FlashMLA over the 584-byte record; its schedule is made by the first call."""
        import flash_mla  # type: ignore[import-not-found]

        pages = self.cache.pages
        blocks = pages.view(torch.float8_e4m3fn).as_strided(
            (len(pages), PAGE, 1, 584), (pages.stride(0), 584, 584, 1)
        )
        schedule, _ = flash_mla.get_mla_metadata()
        self.peer: tuple[Tensor, Tensor] | None = None

        def launch(i: int) -> None:
            norm_rope(self.product[i], self.cos, self.sin, eps=EPS, out=self.q[i])
            self.peer = flash_mla.flash_mla_with_kvcache(
                self.q[i][:, None],
                blocks,
                None,
                None,
                WIDTH,
                schedule,
                softmax_scale=SCALE,
                is_fp8_kvcache=True,
                indices=self.idx[i][:, None],
                attn_sink=self.sinks,
            )

        return launch

    def case(
        self, group: str, name: str, ours: Callable[[int], None], **paths: Callable[[int], None]
    ) -> Case:
        """Of this work: bytes are the records and q once, the result once; multiply-adds as B1 does them."""
        terms = 2 if "q2" in group else 1
        pairs = 2.0 * self.B * self.H * self.S

        def check() -> None:
            ours(0)
            got = self.rooms[f"b1 {terms} {'aligned' in name}"][0]
            self.b0()(0)
            want = self.rooms["b0"][0]
            keys = gather_dequantise(self.cache.pages, self.idx[0], nope=NOPE)
            apart = _lse_limit(self.q[0], keys, terms)
            _same(got.out, got.lse, want.out, want.lse, ERROR[terms], apart)
            if "flashmla" in paths:
                paths["flashmla"](0)
                assert self.peer is not None
                out, lse = self.peer[0][:, 0], self.peer[1][:, :, 0]
                _same(got.out, got.lse, out, lse, ERROR[terms], apart)

        return Case(
            group=group,
            name=f"{name}, {path_of(WIDTH, self.q.device)}, {_splits(self.splits)}",
            paths={OURS: ours} | paths,
            copies=self.copies,
            bytes=self.bytes,
            flops={"fp8": pairs * NOPE * terms, "bf16": pairs * (ROPE + WIDTH)},
            launches={
                OURS: launches_of(self.B, self.H, WIDTH, self.q.device, terms=terms) + (self.splits > 1)
            },
            check=check,
        )

    @property
    def bytes(self) -> float:
        """Of the product, the result, the index list and the records."""
        return self.B * (4.0 * self.H * WIDTH + (4 + 584) * self.S)


def _same(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, limit: float, lse_limit: Tensor
) -> None:
    """Refuse a relative L2 over ``limit``, or an LSE (T, H) further off than ``lse_limit`` (T, H).

    Raises
    ------
    ValueError
        They differ.
    """
    wide = other.float()
    error = ((out.float() - wide).norm() / wide.norm()).item()
    share = ((lse - other_lse).abs() / lse_limit).max().item()
    if not error <= limit or not share <= 1:
        raise ValueError(f"relative L2 {error:.2e}, at most {limit:.0e}; LSE {share:.2f} of its limit apart")


def _lse_limit(q: Tensor, keys: Tensor, terms: int) -> Tensor:
    """How far FP8 products may move an LSE from BF16's: (T, H, K), (T, S, K) BF16 -> (T, H) FP32.

    An LSE moves by no more than its logits do. A rounding to E4M3 changes a value by 2^-4 of itself or less, with two
    terms by 2^-8, evenly spread. Then a dot product changes by more than z times 2^-4 / sqrt(3) times the root of the
    sum of squared products with a probability under 2 e^(-z^2 / 2) (an even spread is sub-Gaussian by its variance):
    z = 8 leaves 5e-7 for the 19 million logits of the largest case. The products' sums are cut to 13 bits behind the
    leading one, 14 or 28 times in a row: 2^-4 of the same root holds 8 standard deviations of that (``cut_sums`` in
    the tests) for a sum six times the root.
    """
    spread = torch.einsum("thk,tsk->ths", q.float().square(), keys.float().square()).amax(-1).sqrt()
    return (8 * 2.0 ** (-4 * terms) / 3**0.5 + 2.0**-4) * SCALE * spread + 2.0**-10


def _splits(count: int) -> str:
    return f"{count} splits" if count > 1 else "1 split"


def cases(device: torch.device) -> Iterator[Case]:
    """B1 against B0 and FlashMLA, B0 against its own floor, HCA and window-only layers; the audit's one split."""
    device = torch.device(device)
    cache = _cache(device)
    for B, H, S in AGAINST_B0:
        work = Work(cache, B, H, S)
        name = f"B={B}, {H} heads, topk {S}"
        yield work.case("b1_b0", f"{name}, 584-byte record", work.b1(), **{REPLACED: work.b0()})
        yield work.case("b1_q2_b0", f"{name}, 584-byte record", work.b1(terms=2), **{REPLACED: work.b0()})
        yield from _b0(work, name)
    for B, H, S in AGAINST_PEER:
        work = Work(cache, B, H, S)
        name = f"B={B}, {H} heads, topk {S}"
        for group, terms, aligned in (
            ("b1_flashmla", 1, False),
            ("b1_aligned_flashmla", 1, True),
            ("b1_q2_flashmla", 2, True),
            ("b1_q2_584_flashmla", 2, False),
        ):
            record = "aligned record" if aligned else "584-byte record"
            ours = work.b1(terms=terms, aligned=aligned)
            yield work.case(group, f"{name}, {record}", ours, **_peers(work))
    yield from _layers(cache)
    for B, H, S in AGAINST_PEER:
        if num_splits(B, -(-H // BLOCK), S, BLOCK) > 1:
            yield from _one_split(Work(cache, B, H, S, splits=1), f"B={B}, {H} heads, topk {S}")


def _peers(work: Work) -> dict[str, Callable[[int], None]]:
    """FlashMLA if it is here."""
    return {"flashmla": work.flash_mla()} if importlib.util.find_spec("flash_mla") else {}


def _layers(cache: Cache) -> Iterator[Case]:
    """Layers whose keys are no top-k: HCA's entries with the window, and the window alone."""
    for B, context, entries in HCA:
        work = Work(cache, B, 64, WINDOW + entries)
        name = f"HCA at {context} tokens, B={B}, {entries} entries and the window, 64 heads"
        yield work.case("b1_hca", f"{name}, 584-byte record", work.b1(), **{REPLACED: work.b0()})
    for B in (2, 64, 128):
        work = Work(cache, B, 64, WINDOW)
        name = f"window only, B={B}, {WINDOW} keys, 64 heads"
        yield work.case("b1_window", f"{name}, 584-byte record", work.b1(), **{REPLACED: work.b0()})


def _one_split(work: Work, name: str) -> Iterator[Case]:
    """What the audit launches: one term of q, and two."""
    for group, terms in (("b1_one_split", 1), ("b1_q2_one_split", 2)):
        others = {REPLACED: work.b0()} | _peers(work)
        yield work.case(group, f"{name}, 584-byte record", work.b1(terms=terms), **others)


def _b0(work: Work, name: str) -> Iterator[Case]:
    """B0's share of its floor: whole, and its two large launches, as one is bound by bytes, the other by multiply-adds.

    The whole row's floor is the larger of all bytes and all multiply-adds, less than the sum of its launches' floors.
    """
    keys, into, buffer = work.B * work.S, work.room("b0"), work.memory(work.S, WIDTH)
    flops = {"bf16": 4.0 * keys * work.H * WIDTH}

    def gather(i: int) -> None:
        gather_dequantise(work.cache.pages, work.idx[i], nope=NOPE, out=buffer[i])

    def attend(i: int) -> None:
        sparse_attn_gathered(work.q[i], buffer[i], work.idx[i], work.sinks, scale=SCALE, into=into[i])

    launches = 1 + (work.splits > 1)
    record, wide = 584.0 * keys, 2.0 * WIDTH * keys
    q_and_out = work.bytes - record
    for part, launch, moved, work_done, count in (
        ("whole", work.b0(), work.bytes + 4.0 * work.B * work.H * WIDTH + 2 * wide, flops, 2 + launches),
        ("gather", gather, record + wide + 4 * keys, {}, 1),
        ("attention", attend, q_and_out + wide, flops, launches),
    ):
        yield Case(
            group="b0",
            name=f"{name}, {part}" + ("" if part == "gather" else f", {_splits(work.splits)}"),
            paths={OURS: launch},
            copies=work.copies,
            bytes=moved,
            flops=work_done,
            launches={OURS: count},
        )
