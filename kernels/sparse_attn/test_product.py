"""Attention from q_b's product: one kernel gives the bits of two, on Hopper; two those of their own functions."""

import pytest
import torch

from kernels._check import assert_bitwise, assert_replay_equals_eager, draw
from kernels.q_norm_rope_quantise.kernel import norm_rope_quantise
from kernels.sparse_attn import hopper_launch_kernel as hopper_launch
from kernels.sparse_attn.kernel import room, sparse_attn_fp8
from kernels.sparse_attn.product import LEAST, launches_of, sparse_attn_product
from kernels.sparse_attn.test_bound import case, slots, stored
from kernels.sparse_attn.test_hopper_kernel import CUDA, on_hopper

EPS = 1e-6


def call(T, H, S, *, nope, aligned=False, device, of=torch.bfloat16, seed=0):
    """Arguments of both ways, by position and by name; heads of unlike size, as q_b's are."""
    inputs = case(T, H, S, nope=nope, seed=seed)
    pages, token_scale, _ = stored(inputs, aligned)
    width = nope + 64
    q = draw(T, H, width, seed=seed + 7) * torch.exp2(4 * draw(T, H, 1, seed=seed + 8)).to(of)
    angle = draw(T, 32, seed=seed + 9) * 6
    tensors = q.to(of), angle.cos(), angle.sin(), pages, slots(inputs.idx, inputs.sequence), inputs.sinks
    scale = None if token_scale is None else token_scale.to(device)
    return [t.to(device) for t in tensors], {"scale": width**-0.5, "token_scale": scale}


def by_two(args, on, *, residual=False, splits=1, **options):
    q, cos, sin, pages, idx, sinks = args
    made = norm_rope_quantise(q, cos, sin, eps=EPS, residual=residual)
    into = room(*q.shape[:2], idx.shape[1], q.shape[2], q.device, splits=splits)
    return sparse_attn_fp8(
        made.record, made.scale, pages, idx, sinks, residual=made.residual, into=into, **on, **options
    )


def by_one(args, on, *, splits=1, **options):
    q, idx = args[0], args[4]
    into = room(*q.shape[:2], idx.shape[1], q.shape[2], q.device, splits=splits)
    into.out.fill_(torch.nan)
    into.lse.fill_(torch.nan)
    return sparse_attn_product(*args, eps=EPS, launches=1, into=into, **on, **options)


def assert_same(got, want):
    for one, two in zip(got, want, strict=True):
        assert_bitwise(one.float().cpu(), two.float().cpu())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("options", [{}, {"rope_fp8": True}, {"pv_fp8": True}], ids=["plain", "rope", "pv"])
def test_two_launches_are_the_two_functions(residual, options, accelerator):
    args, on = call(3, 5, 20, nope=192, device=accelerator)
    got = sparse_attn_product(*args, eps=EPS, residual=residual, **on, **options)
    q = args[0]
    into = room(*q.shape[:2], 20, q.shape[2], q.device)
    assert_same(got, by_two(args, on, residual=residual, splits=into.splits, **options))


def test_no_rows(accelerator):
    args, on = call(1, 5, 20, nope=192, device=accelerator)
    none = [t[:0] if t.shape[:1] == (1,) else t for t in args]
    out, lse = sparse_attn_product(*none, eps=EPS, **on)
    assert out.shape == (0, 5, 256)
    assert lse.shape == (0, 5)


def test_what_no_kernel_makes_at_once_is_refused(accelerator):
    args, on = call(3, 5, 20, nope=192, device=accelerator)
    with pytest.raises(
        ValueError, match=r"^sparse_attn_product: no kernel makes q and attention of this call: "
    ):
        sparse_attn_product(*args, eps=EPS, launches=1, **on)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "S", "splits"),
    [(1, 1, 1, 1), (3, 40, 65, 2), (3, 64, 640, 10), (5, 128, 1152, 1), (130, 64, 640, 1), (3, 72, 300, 3)],
)
def test_one_launch_gives_the_bits_of_two(aligned, T, H, S, splits):
    args, on = call(T, H, S, nope=448, aligned=aligned, device=CUDA, seed=T)
    assert_same(by_one(args, on, splits=splits), by_two(args, on, splits=splits))


EDGES = {
    "nan": lambda q: q[0, 3].index_fill_(0, torch.tensor([100, 480], device=CUDA), torch.nan),
    "nan in rope": lambda q: q[0, 3, 470].fill_(torch.nan),
    "inf": lambda q: q[1, 2, 5].fill_(torch.inf),
    "-inf in rope": lambda q: q[1, 2, 511].fill_(-torch.inf),
    "zeros": lambda q: q[2].zero_(),
    "nope of zeros": lambda q: q[2, :, :448].zero_(),
    "huge": lambda q: q[0].mul_(2.0**100),
    "past the square's range": lambda q: q[0].fill_(3e38),
    "denormal": lambda q: q[0].mul_(2.0**-130),
    "one outlier": lambda q: q[2, 7, 447].fill_(2.0**20),
    "all equal": lambda q: q.fill_(0.75),
    "signed zeros": lambda q: q[1].fill_(-0.0),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("edge", EDGES)
def test_one_launch_gives_the_bits_of_two_for_edges(edge):
    args, on = call(3, 64, 130, nope=448, device=CUDA)
    EDGES[edge](args[0])
    assert_same(by_one(args, on), by_two(args, on))


@pytest.mark.gpu
@on_hopper
def test_one_launch_reads_strided_tokens_and_any_bf16():
    """Every finite BF16 magnitude is in some head, beside others of its size; tokens lie apart."""
    args, on = call(130, 64, 64, nope=448, device=CUDA)
    bits = torch.randint(0, 0x7F00, (130, 64, 1), generator=torch.Generator().manual_seed(0))
    bits = (bits + torch.arange(512) * 7 % 0x100).clamp(max=0x7F7F).short()
    room_for = torch.zeros(130, 66, 512, dtype=torch.bfloat16, device=CUDA)
    room_for[:, :64] = bits.cuda().view(torch.bfloat16)
    args[0] = room_for[:, :64]
    assert_same(by_one(args, on), by_two(args, on))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("aligned", [False, True])
def test_one_launch_repeats_and_a_replayed_graph_equals_it(aligned):
    args, on = call(65, 64, 640, nope=448, aligned=aligned, device=CUDA)
    for row in range(65):
        args[4][row, 640 - 9 * row :] = -1
    first = by_one(args, on)
    for _ in range(20):
        assert_same(by_one(args, on), first)
    into = room(65, 64, 640, 512, CUDA, splits=1)

    def launch():
        sparse_attn_product(*args, eps=EPS, launches=1, into=into, **on)

    assert_replay_equals_eager(launch, (into.out, into.lse), lambda: args[0].mul_(-0.5))


@pytest.mark.gpu
@on_hopper
def test_one_launch_is_what_runs_from_so_many_heads_on(monkeypatch):
    assert launches_of(LEAST // 64, 64, 512, CUDA) == 1
    assert launches_of(LEAST // 64 - 1, 64, 512, CUDA) == launches_of(LEAST, 64, 256, CUDA) == 2
    assert launches_of(LEAST, 64, 512, CUDA, terms=2) == 2
    made = []
    launch = hopper_launch.launch
    monkeypatch.setattr(hopper_launch, "launch", lambda q, *rest: made.append(type(q)) or launch(q, *rest))
    for rows in (LEAST // 64, LEAST // 64 - 1):
        args, on = call(rows, 64, 64, nope=448, device=CUDA)
        sparse_attn_product(*args, eps=EPS, **on)
    assert [kind.__name__ for kind in made] == ["Product", "QuantisedQ"]
