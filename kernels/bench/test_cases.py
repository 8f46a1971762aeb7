"""Cases rotate: enough sets to pass the L2 cache, and nothing that a launch of one set writes belongs to another."""

import math

import pytest
import torch

from kernels import bench_case
from kernels.bench_case import L2_BYTES, MARGIN, rotation
from kernels.grouped_ffn import bench as experts
from kernels.hc import bench as streams
from kernels.index_topk import bench as choice
from kernels.kv_norm_rope_store import bench as records
from kernels.mhc_rmsnorm_quantise_nvfp4 import bench as p5
from kernels.q_norm_rope_quantise import bench as queries
from kernels.rmsnorm_quantise_nvfp4 import bench as p4
from kernels.sparse_attn import bench as attention
from kernels.test_repeats import tensors

CASES = {
    "p4": (p4, lambda device: p4._case(2, 64, device)),
    "p5": (p5, lambda device: p5._case(2, 64, True, device)),
    "q": (queries, lambda device: queries._case(1, 2, True, device)),
    "kv": (records, lambda device: records._case(2, False, device)),
    "kv, aligned": (records, lambda device: records._case(2, True, device)),
    "mix": (streams, lambda device: streams._mix(1, 64, device)),
    "streams": (streams, lambda device: streams._expand(1, 64, device)),
    "top-k": (choice, lambda device: choice._topk(1, 1024, device)),
}


@pytest.mark.parametrize("size", [L2_BYTES // 40, 20e6, 1.4 * L2_BYTES, 1e9])
def test_other_sets_pass_the_cache(size):
    copies = rotation(size, "cpu")
    assert (copies - 1) * size >= MARGIN * L2_BYTES > (copies - 2) * size or copies == 2
    assert rotation(1.0, "cpu") == bench_case.MOST_SETS
    assert rotation(1.0, "cpu", most=512) == 512


@pytest.mark.parametrize("name", CASES)
def test_sets_share_nothing_that_a_launch_writes(name, accelerator, monkeypatch):
    module, make = CASES[name]
    monkeypatch.setattr(module, "rotation", lambda *_args, **_more: 2)
    case = make(torch.device(accelerator))
    assert case.copies == 2
    for path, launch in case.paths.items():
        assert_apart(launch, f"{name}, {path}")


def assert_apart(launch, name):
    """What set 1 leaves in memory outlives a launch of set 0, and the other way round."""
    held = [tensor for tensor in tensors(launch) if tensor.numel()]
    launch(0)
    launch(1)
    before = [tensor.clone() for tensor in held]
    for i in (0, 1):
        launch(i)
        for tensor, old in zip(held, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8)), f"{name}: set {i}"


def test_a_shared_output_is_seen():
    out, sets = torch.zeros(2), torch.randn(2, 2)
    with pytest.raises(AssertionError, match="shared: set 0"):
        assert_apart(lambda i: out.copy_(sets[i]), "shared")


@pytest.fixture
def work(monkeypatch):
    """Attention's inputs, small."""
    monkeypatch.setattr(bench_case, "L2_BYTES", 100_000)
    monkeypatch.setattr(attention, "TOKENS", 1024)
    pool = attention.Cache(torch.zeros(16, 64 * 584), torch.zeros(16, 64, 576), torch.zeros(16, 64))
    return lambda keys=64, **more: attention.Work(pool, 2, 4, keys, **more)


def test_no_key_is_gathered_twice_before_every_set_had_its_turn(work):
    made = work()
    assert made.copies > 2
    assert made.idx.unique().numel() == made.idx.numel() == made.copies * 2 * 64
    assert made.idx.min() >= 0
    assert made.idx.max() < attention.TOKENS
    assert (made.copies - 1) * made.bytes >= MARGIN * 100_000


def test_attention_writes_each_set_apart(work, monkeypatch):
    made, written = work(), []
    for kernel in ("norm_rope", "gather_dequantise"):
        monkeypatch.setattr(attention, kernel, lambda *_args, out, **_more: written.append(out))
    for kernel in ("sparse_attn_gathered", "sparse_attn_product"):
        monkeypatch.setattr(
            attention,
            kernel,
            lambda *_args, into, codes=None, **_more: written.append((vars(into), codes)),
        )
    for launch in (made.b0(), made.b1(), made.b1(terms=2, aligned=True)):
        places = []
        for i in range(made.copies):
            written.clear()
            launch(i)
            places += {tensor.data_ptr() for tensor in tensors(written)}
        assert len(set(places)) == len(places) >= 4 * made.copies


def test_the_audits_one_split_has_rows_where_it_is_another_launch(work, monkeypatch):
    assert work(128).splits == 2
    assert work(128, splits=1).splits == 1
    names = []

    def seen(made, name):
        names.append((made.B, made.H, made.splits, name))
        yield from ()

    monkeypatch.setattr(attention, "_cache", lambda _device: work().cache)
    monkeypatch.setattr(attention, "_one_split", seen)
    monkeypatch.setattr(attention, "AGAINST_B0", ())
    monkeypatch.setattr(attention, "HCA", ())
    monkeypatch.setattr(attention, "_layers", lambda _cache: iter(()))
    monkeypatch.setattr(attention.Work, "case", lambda *_args, **_more: None)
    monkeypatch.setattr(attention, "AGAINST_PEER", ((2, 64, 64 * 5), (132, 64, 64)))
    monkeypatch.setattr(attention, "TOKENS", 132 * 64 * 4)
    list(attention.cases(torch.device("cpu")))
    assert names == [(2, 64, 1, "B=2, 64 heads, topk 320")]


@pytest.mark.parametrize(("T", "shared"), [(1, False), (4, False), (16, True)])
def test_sets_of_experts_are_apart_while_there_are_enough(T, shared):
    torch.manual_seed(0)
    sets = experts._choices(T, 256, 6, "cpu")
    assert [ids.shape for ids in sets] == [(T, 6)] * experts.COPIES
    assert all(
        torch.equal(ids, ids.sort(1).values) and len(set(row.tolist())) == 6 for ids in sets for row in ids
    )
    used = [set(ids.flatten().tolist()) for ids in sets]
    assert (len(set.union(*used)) < sum(map(len, used))) == shared
    assert math.prod((experts.COPIES, T, 6)) <= 256 or shared
