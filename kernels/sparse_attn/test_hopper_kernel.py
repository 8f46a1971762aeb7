"""The Hopper kernels against the ref within the portable kernel's bound, on sm_90 alone: Gluon is not interpreted."""

from dataclasses import replace

import pytest
import torch

from kernels._check import assert_bitwise, assert_replay_equals_eager
from kernels.sparse_attn import hopper_launch_kernel as hopper_launch
from kernels.sparse_attn.kernel import path_of, room, sparse_attn_fp8
from kernels.sparse_attn.test_bound import (
    PAGE,
    assert_close,
    assert_faults_leave_the_bound,
    case,
    hidden_first,
    q_record,
    rising,
    run,
    slots,
    stored,
    want,
)
from kernels.sparse_attn.tiles import check_hopper

CUDA = torch.device("cuda")
WHY = hopper_launch.why_not(CUDA) if torch.cuda.is_available() else "there is no GPU"
on_hopper = pytest.mark.skipif(WHY is not None, reason=f"no Hopper kernel here: {WHY}")
FP8_PATHS = ("b1", "b1_q2", "b1_aligned", "b1_aligned_q2")
each_path = pytest.mark.parametrize("path", ["b0", *FP8_PATHS])


@pytest.mark.gpu
@on_hopper
@each_path
@pytest.mark.parametrize(
    ("T", "H", "S", "splits"),
    [
        pytest.param(1, 64, 64, 1, id="one-step"),
        pytest.param(2, 1, 1, 1, id="one-head-one-key"),
        pytest.param(3, 8, 63, 1, id="heads8"),
        pytest.param(3, 40, 65, 2, id="heads40-splits2"),
        pytest.param(3, 64, 640, 10, id="splits10"),
        pytest.param(5, 128, 1152, 1, id="pro"),
        pytest.param(130, 64, 640, 1, id="more-rows-than-multiprocessors"),
        pytest.param(3, 72, 1000, 3, id="ragged"),
    ],
)
def test_within_the_bound_of_its_roundings(path, T, H, S, splits):
    inputs = case(T, H, S, nope=448)
    got, q, pool = run(path, inputs, "cuda", splits=splits, by="hopper")
    assert_close(got, want(path, inputs, q, pool))


@pytest.mark.gpu
@on_hopper
@each_path
@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_without_a_key_before_those_with_some(path, splits):
    inputs = hidden_first(case(2, 40, 300, nope=448), 193)
    got, q, pool = run(path, inputs, "cuda", splits=splits, by="hopper")
    assert_close(got, want(path, inputs, q, pool))


@pytest.mark.gpu
@on_hopper
@each_path
@pytest.mark.parametrize("splits", [1, 2])
def test_scores_that_rise_from_tile_to_tile(path, splits):
    """The sums are rescaled only where a maximum grows by more than 2^8: here it does, in each row with keys."""
    inputs = rising(case(3, 40, 300, nope=448))
    got, q, pool = run(path, inputs, "cuda", splits=splits, by="hopper")
    assert_close(got, want(path, inputs, q, pool))


@pytest.mark.gpu
@on_hopper
@each_path
def test_planted_faults_leave_the_bound(path):
    inputs = case(3, 40, 70, nope=448)
    inputs = replace(inputs, sinks=inputs.sinks + 6)
    got, q, pool = run(path, inputs, "cuda", by="hopper")
    assert_close(got, want(path, inputs, q, pool))
    assert_faults_leave_the_bound(got, inputs, q, pool, path)


@pytest.mark.gpu
@on_hopper
@each_path
def test_launches_repeat_bit_for_bit_and_a_row_does_not_see_its_batch(path):
    inputs = case(33, 64, 640, nope=448)
    (out, lse), _, _ = run(path, inputs, "cuda", splits=2, by="hopper")
    for _ in range(20):
        (again, again_lse), _, _ = run(path, inputs, "cuda", splits=2, by="hopper")
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
    alone = replace(inputs, q=inputs.q[7:8], idx=inputs.idx[7:8], sequence=inputs.sequence[7:8])
    (one, _), _, _ = run(path, alone, "cuda", splits=2, by="hopper")
    assert torch.equal(one, out[7:8])


@pytest.mark.gpu
@on_hopper
@each_path
def test_a_nan_key_stays_with_the_rows_that_name_it(path):
    inputs = case(3, 64, 200, nope=448)
    inputs.idx[2:, 3:][inputs.idx[2:, 3:] == 7] = 8
    inputs.idx[0, 5] = 7
    (clean, _), _, _ = run(path, inputs, "cuda", by="hopper")
    inputs.x[:, 7, 3] = torch.nan
    (out, lse), _, _ = run(path, inputs, "cuda", by="hopper")
    assert out[0, :, :64].isnan().all()
    assert lse[0].isnan().all()
    assert_bitwise(out[1:].float().cpu(), clean[1:].float().cpu())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("path", FP8_PATHS)
def test_a_replayed_graph_equals_eager_on_lists_of_unequal_length(path):
    inputs = case(65, 64, 640, nope=448)
    for row in range(65):
        inputs.idx[row, 640 - 9 * row :] = -1
    (out, lse), _, _ = run(path, inputs, "cuda", by="hopper")
    pages, token_scale, _ = stored(inputs, "aligned" in path)
    record, q_scale, residual, _, _ = (t.cuda() for t in q_record(inputs.q, inputs.nope))
    idx, sinks = slots(inputs.idx, inputs.sequence).cuda(), inputs.sinks.cuda()
    pages, token_scale = pages.cuda(), None if token_scale is None else token_scale.cuda()
    into = room(65, 64, 640, 512, CUDA, splits=1)

    def launch():
        sparse_attn_fp8(
            record,
            q_scale,
            pages,
            idx,
            sinks,
            scale=inputs.scale,
            residual=residual if "q2" in path else None,
            token_scale=token_scale,
            path="hopper",
            into=into,
        )

    launch()
    assert torch.equal(into.out, out)
    assert torch.equal(into.lse, lse)
    assert_replay_equals_eager(launch, (into.out, into.lse), lambda: sinks.add_(1))


@pytest.mark.gpu
@on_hopper
def test_it_is_the_path_that_runs_on_hopper():
    assert path_of(512, CUDA) == "hopper"
    assert (
        path_of(256, CUDA) == path_of(512, CUDA, slots=False) == path_of(512, CUDA, plain=False) == "portable"
    )
    assert PAGE == 16


def test_it_says_why_it_cannot_run():
    assert hopper_launch.why_not(torch.device("cpu")) == "the device is cpu"


def test_another_triton_is_refused(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert hopper_launch.why_not(torch.device("cpu")) == "Triton is 3.9.0, not 3.6.x"


@pytest.mark.parametrize(
    ("dtype", "splits", "num_keys"),
    [
        pytest.param(torch.float32, 1, 64, id="FP32"),
        pytest.param(torch.bfloat16, 1, 0, id="no-keys"),
        pytest.param(torch.bfloat16, 0, 64, id="no-split"),
        pytest.param(torch.bfloat16, 3, 128, id="more-splits-than-tiles"),
    ],
)
def test_what_no_hopper_kernel_writes_is_refused(dtype, splits, num_keys):
    out = torch.empty(1, 64, 512, dtype=dtype)
    with pytest.raises(ValueError, match=rf"^op: .*asked for {dtype}, {splits} splits of {num_keys} keys"):
        check_hopper("op", out, splits, num_keys)


def test_as_many_splits_as_tiles_are_not_refused():
    for splits, num_keys in ((1, 1), (2, 65), (10, 640)):
        check_hopper("op", torch.empty(1, 64, 512, dtype=torch.bfloat16), splits, num_keys)
