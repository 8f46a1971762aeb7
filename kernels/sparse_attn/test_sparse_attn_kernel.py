"""Sparse attention's kernels against the ref, within the bound of test_bound.py; faults leave it."""

from dataclasses import replace

import pytest
import torch

from kernels._check import assert_bitwise
from kernels.sparse_attn.combine_kernel import num_splits
from kernels.sparse_attn.kernel import path_of, sparse_attn_fp8, sparse_attn_widened
from kernels.sparse_attn.test_bound import (
    PAGES,
    ROWS,
    Inputs,
    assert_close,
    assert_faults_leave_the_bound,
    case,
    close,
    hidden_first,
    q_record,
    rising,
    run,
    slots,
    stored,
    want,
)

PATHS = ("b0", "b1a", "b1", "b1_q2", "b1_aligned", "b1_aligned_q2", "b1_rope_fp8", "b1_pv_fp8")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("T", "H", "S", "nope", "splits", "table"),
    [
        pytest.param(1, 1, 1, 192, 1, False, id="one"),
        pytest.param(3, 3, 70, 192, 1, True, id="page-table"),
        pytest.param(1, 40, 129, 192, 3, False, id="heads40-splits3"),
        pytest.param(1, 8, 127, 448, 2, True, id="head_dim512-splits2"),
        pytest.param(2, 70, 20, 192, 1, False, id="heads70-two-tiles"),
    ],
)
def test_within_the_bound_of_its_roundings(path, T, H, S, nope, splits, table, accelerator):
    inputs = case(T, H, S, nope=nope)
    got, q, pool = run(path, inputs, accelerator, table=table, splits=splits)
    assert_close(got, want(path, inputs, q, pool))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_without_a_key_before_those_with_some(path, splits, accelerator):
    inputs = hidden_first(case(2, 3, 200), 129)
    got, q, pool = run(path, inputs, accelerator, splits=splits)
    assert_close(got, want(path, inputs, q, pool))


@pytest.mark.parametrize("path", ["b0", "b1"])
def test_tiles_without_a_key_after_those_with_some(path, accelerator):
    inputs = case(2, 3, 200)
    inputs.idx[:, 20:] = -1
    got, q, pool = run(path, inputs, accelerator)
    assert_close(got, want(path, inputs, q, pool))


@pytest.mark.parametrize("path", PATHS)
def test_scores_that_rise_from_tile_to_tile(path, accelerator):
    """What was summed under a smaller maximum is rescaled: drawn keys hardly raise it after their first tile."""
    inputs = rising(case(1, 3, 130))
    got, q, pool = run(path, inputs, accelerator)
    assert_close(got, want(path, inputs, q, pool))


def test_many_small_probabilities_are_kept(accelerator):
    """One key has most of the weight, and 199 have e^-7 of its: together 0.15, of which E4M3 of p itself keeps none."""
    inputs = case(1, 3, 200)
    x, idx = torch.ones_like(inputs.x), torch.arange(200).int()[None] % (ROWS - 1)
    x[:, :-1, ::2] = -1  # but for the last row, orthogonal to q
    idx[:, 0] = ROWS - 1
    inputs = replace(inputs, q=torch.full_like(inputs.q, 7 / 16), x=x, idx=idx)
    got, q, pool = run("b1_pv_fp8", inputs, accelerator)
    assert_close(got, want("b1_pv_fp8", inputs, q, pool))


@pytest.mark.parametrize("path", PATHS)
def test_planted_faults_leave_the_bound(path, accelerator):
    inputs = case(3, 3, 70)
    inputs = replace(
        inputs, sinks=inputs.sinks + 6
    )  # of the LSE's size: a sink of 0 is 2^-10 of a denominator
    got, q, pool = run(path, inputs, accelerator)
    assert_close(got, want(path, inputs, q, pool))
    assert_faults_leave_the_bound(got, inputs, q, pool, path)


@pytest.mark.parametrize("path", ["b0", "b1"])
@pytest.mark.parametrize("splits", [1, 2])
def test_the_sink_joins_once_however_keys_are_split(path, splits, accelerator):
    inputs = case(1, 3, 70)
    inputs = replace(inputs, sinks=inputs.sinks + 6)  # of the LSE's size
    got, q, pool = run(path, inputs, accelerator, splits=splits)
    assert_close(got, want(path, inputs, q, pool))
    for count in (0, 2):
        other = replace(inputs, sinks=inputs.sinks + torch.tensor(count).log().clamp_min(-1e4))
        assert not close(got, want(path, other, q, pool)), f"{count} sinks are within the bound"


def test_b1a_is_b0_up_to_the_order_of_sums(accelerator):
    inputs = case(3, 3, 129)
    got, q, pool = run("b0", inputs, accelerator)
    mean = want("b0", inputs, q, pool)[2] * 2**7  # over a mean of |v|
    b0, b1a = got[0].double().cpu(), run("b1a", inputs, accelerator)[0][0].double().cpu()
    assert (
        (b0 - b1a).abs() <= 2.0**-8 * b0.abs() + 2.0**-20 * mean
    ).all()  # one step of BF16, where a sum crosses it
    assert ((b0 != b1a).double().mean()) < 0.05


def test_no_two_paths_compute_the_same(accelerator):
    inputs = case(1, 3, 40)
    names = (
        "b0",
        "b1",
        "b1_rope_fp8",
        "b1_pv_fp8",
    )  # two terms hold a BF16 q, one scale holds seven: both exact here
    outs = {path: run(path, inputs, accelerator)[0][0] for path in names}
    for path, out in outs.items():
        for other, its in outs.items():
            assert path == other or not torch.equal(out, its), f"{path} and {other} are the same"


@pytest.mark.parametrize("path", ["b0", "b1", "b1_aligned_q2"])
def test_a_row_does_not_see_its_batch(path, accelerator):
    inputs = case(3, 3, 70)
    (out, lse), _, _ = run(path, inputs, accelerator, splits=2)
    alone = Inputs(inputs.q[2:3], inputs.x, inputs.idx[2:3], inputs.sinks, inputs.sequence[2:3])
    (one, one_lse), _, _ = run(path, alone, accelerator, splits=2)
    assert_bitwise(one.float().cpu(), out[2:3].float().cpu())
    assert_bitwise(one_lse.cpu(), lse[2:3].cpu())


@pytest.mark.parametrize("path", ["b0", "b1a", "b1", "b1_aligned_q2", "b1_pv_fp8"])
def test_a_nan_key_stays_with_the_rows_that_name_it(path, accelerator):
    inputs = case(3, 3, 20)
    inputs.idx[2:, 3:][inputs.idx[2:, 3:] == 7] = 8
    inputs.idx[0, 5] = 7
    (clean, _), _, _ = run(path, inputs, accelerator)
    inputs.x[:, 7, 3] = torch.nan
    (out, lse), _, _ = run(path, inputs, accelerator)
    assert out[0, :, 3].isnan().all()
    assert lse[0].isnan().all()
    assert_bitwise(out[1:].float().cpu(), clean[1:].float().cpu())


@pytest.mark.parametrize("path", ["b1a", "b1", "b1_aligned"])
def test_strided_pages_and_rows_are_read_where_they_are(path, accelerator):
    inputs = case(3, 3, 20)
    (out, _), _, _ = run(path, inputs, accelerator)
    pages, token_scale, _ = stored(inputs, "aligned" in path)
    wide = torch.full((PAGES, 3, *pages.shape[1:]), 0xFF, dtype=torch.uint8, device=accelerator)
    wide[:, 1] = pages.to(accelerator)
    idx, sinks = slots(inputs.idx, inputs.sequence).to(accelerator), inputs.sinks.to(accelerator)
    if path == "b1a":
        rows = torch.zeros(3, 2, *inputs.q.shape[1:], dtype=torch.bfloat16, device=accelerator)
        rows[:, 1] = inputs.q.to(accelerator)
        got = sparse_attn_widened(rows[:, 1], wide[:, 1], idx, sinks, scale=inputs.scale)
    else:
        record, q_scale = (t.to(accelerator) for t in q_record(inputs.q, inputs.nope)[:2])
        token_scale = None if token_scale is None else token_scale.to(accelerator)
        got = sparse_attn_fp8(
            record, q_scale, wide[:, 1], idx, sinks, scale=inputs.scale, token_scale=token_scale
        )
    assert_bitwise(got[0].float().cpu(), out.float().cpu())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("T", "S"), [(0, 5), (2, 0)])
def test_no_rows_and_no_keys(path, T, S, accelerator):
    inputs = case(2, 3, 1)
    inputs = replace(inputs, q=inputs.q[:T], sequence=inputs.sequence[:T])
    inputs = replace(inputs, idx=torch.empty(T, S, dtype=torch.int32))
    (out, lse), _, _ = run(path, inputs, accelerator)
    assert out.shape == (T, 3, 256)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_splits_fill_the_device_and_no_more():
    measured = {(2, 640): 10, (64, 640): 2, (128, 640): 1}
    assert {key: num_splits(key[0], 1, key[1], 64) for key in measured} == measured
    assert num_splits(1, 1, 8192, 64) == 64
    assert num_splits(0, 1, 0, 64) == num_splits(1, 1, 1, 64) == num_splits(10_000, 2, 1152, 64) == 1


def test_the_path_is_the_portable_one_where_the_hopper_kernel_cannot_run():
    cpu = torch.device("cpu")
    assert path_of(512, cpu) == "portable"
    inputs = case(1, 1, 1)
    record, q_scale = q_record(inputs.q, inputs.nope)[:2]
    pages, idx = stored(inputs, False)[0], slots(inputs.idx, inputs.sequence)
    with pytest.raises(ValueError, match="no Hopper kernel"):
        sparse_attn_fp8(record, q_scale, pages, idx, inputs.sinks, scale=1.0, path="hopper")


def test_what_does_not_fit_is_refused_by_name(accelerator):
    inputs = case(2, 3, 5)
    pages = stored(inputs, False)[0].to(accelerator)
    q, idx, sinks = (t.to(accelerator) for t in (inputs.q, slots(inputs.idx, inputs.sequence), inputs.sinks))
    for bad, message in (
        ({"q": q.float()}, "q is torch.float32"),
        ({"idx": idx.long()}, "idx is torch.int64"),
        ({"sinks": sinks[:2]}, r"sinks is .*\(2,\)"),
        ({"pages": pages[:, :-16]}, "no page of nope 192"),
        ({"q": q[..., :128]}, "head_dim must be 256 or 512"),
        ({"sequence": inputs.sequence.to(accelerator)}, "page_table and sequence come together"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sparse_attn_widened(**({"q": q, "pages": pages, "idx": idx, "sinks": sinks} | bad), scale=1.0)
