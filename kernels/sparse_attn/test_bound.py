"""Inputs of attention's kernel tests, and the bound that they are held to, derived from the kernels' roundings.

With A = sum_s p_s |v_s| / denominator: p is rounded once (2^-8 of itself in BF16; E4M3 of 256 p: 2^-4, or 2^-17 where
it is subnormal, p being relative to at most twice the row's largest), a part of a split once more (2^-8), the result
once (2^-8 of itself), and a logit's error d changes p and the denominator by a factor 1 +- d. The ref is taken
without these roundings.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from kernels._check import assert_bitwise, draw
from kernels.formats import aligned_record, bf16, e4m3, fp8_block
from kernels.formats.kv_record import ROPE, RecordLayout
from kernels.gather_dequantise.kernel import gather_dequantise
from kernels.sparse_attn.kernel import room, sparse_attn_fp8, sparse_attn_gathered, sparse_attn_widened
from kernels.sparse_attn.ref import AttnRounding, sparse_attn

PAGE, PAGES = 16, 11
TABLE = torch.tensor([[10, 0, 2, 5, 3, -1], [1, 7, 4, 6, 8, -1]], dtype=torch.int32)
ROWS = PAGE * 5  # of a sequence; every other byte of the pages is 0xff, a NaN
UNIT = 2.0**-13  # of the largest number that an FP8 product instruction adds up


@dataclass(frozen=True)
class Inputs:
    """Tensors of a call; ``x`` (2, ROWS, K) are two sequences' rows, ``idx`` (T, S) rows of the sequence."""

    q: torch.Tensor
    x: torch.Tensor
    idx: torch.Tensor
    sinks: torch.Tensor
    sequence: torch.Tensor

    @property
    def nope(self) -> int:
        return self.q.shape[-1] - ROPE

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def case(T=3, H=3, S=70, *, nope=192, seed=0) -> Inputs:
    """Groups of unequal magnitude, repeated and missing keys, one row without keys."""
    width = nope + ROPE
    power = draw(2, ROWS, width // 64, seed=seed + 2).round()
    x = draw(2, ROWS, width, seed=seed + 1) * torch.exp2(power).repeat_interleave(64, -1)
    generator = torch.Generator().manual_seed(seed + 3)
    idx = torch.randint(-ROWS // 4, ROWS, (T, S), generator=generator).clamp_min(-1).int()
    idx[:, :1] = ROWS - 1
    if T > 1:
        idx[1] = -1
    sequence = (torch.arange(T) % 2).int()
    return Inputs(draw(T, H, width, seed=seed).bfloat16(), x, idx, draw(H, seed=seed + 4), sequence)


def hidden_first(inputs, count):
    """The same with no key among each row's first ``count``, as a window before its first tokens has."""
    idx = inputs.idx.clone()
    idx[:, :count] = -1
    idx[0, count] = ROWS - 1
    return replace(inputs, idx=idx)


def rising(inputs):
    """The same with each row's small keys before its large ones, so that the maximum rises on the way."""
    x = inputs.x.clone()
    x[:, ROWS // 2 :] *= 4
    return replace(inputs, x=x, idx=inputs.idx.sort(-1).values)


def slots(idx, sequence):
    """Physical slot of each row of a sequence, -1 kept."""
    page = TABLE[sequence.long()].gather(1, (idx.clamp_min(0) // PAGE).long())
    return torch.where(idx >= 0, page * PAGE + idx % PAGE, -1).int()


def stored(inputs, aligned):
    """Pages (with the aligned record: data and scales) and the values that they hold, (PAGES * PAGE, K)."""
    layout = RecordLayout(inputs.nope)
    place = (TABLE[:, :-1, None] * PAGE + torch.arange(PAGE)).reshape(-1).long()
    flat = inputs.x.flatten(0, 1)
    pool = torch.zeros(PAGES * PAGE, flat.shape[1])
    if aligned:
        data, scale = aligned_record.encode(flat)
        pages = torch.full((PAGES * PAGE, layout.data_bytes), 0xFF, dtype=torch.uint8)
        scales = torch.full((PAGES * PAGE,), torch.nan)
        pages[place], scales[place], pool[place] = data, scale[:, 0], aligned_record.decode(data, scale)
        return pages.view(PAGES, PAGE, -1), scales.view(PAGES, PAGE), pool
    data, scale = layout.encode(flat)
    pages = torch.full((PAGES, layout.page_bytes(PAGE)), 0xFF, dtype=torch.uint8)
    layout.write(pages, place, data, scale)
    pool[place] = layout.decode(data, scale)
    return pages, None, pool


def q_record(q, nope):
    """Codes and rope (T, H, K + 64) uint8, scale (T, H), residual codes; and the values of one term and of two."""
    wide = q.float()
    codes, scale = fp8_block.quantise(wide[..., :nope], nope)
    first = e4m3.decode(codes)
    residual = e4m3.encode(wide[..., :nope] / scale - first)
    rope = (wide[..., nope:] / scale).bfloat16().view(torch.uint8)
    two = (first + e4m3.decode(residual)) * scale
    record = torch.cat([codes, rope], -1).contiguous()
    return record, scale[..., 0].contiguous(), residual, first * scale, two


def row_fp8(x):
    return fp8_block.round(bf16.round(x), x.shape[-1])


def run(path, inputs, device, *, table=False, splits=1, by=None):
    """A path's (out, lse), poisoned first, and the q and pool that the ref is to take."""
    aligned = "aligned" in path
    pages, token_scale, pool = stored(inputs, aligned)
    idx = inputs.idx if table else slots(inputs.idx, inputs.sequence)
    T, H, width = inputs.q.shape
    into = room(T, H, idx.shape[1], width, torch.device(device), splits=splits)
    for tensor in (into.out, into.lse, into.part, into.part_lse):
        if tensor is not None:
            tensor.fill_(torch.nan)
    on = {"scale": inputs.scale, "into": into}
    paged = {"page_table": TABLE.to(device), "sequence": inputs.sequence.to(device)} if table else {}
    q, pages, idx, sinks = (t.to(device) for t in (inputs.q, pages, idx, inputs.sinks))
    if path == "b0":
        keys = gather_dequantise(pages, idx, nope=inputs.nope, **paged)
        got = sparse_attn_gathered(q, keys, idx, sinks, path=by, **on)
        return got, inputs.q.float(), pool
    if path == "b1a":
        return sparse_attn_widened(q, pages, idx, sinks, **on, **paged), inputs.q.float(), pool
    record, q_scale, residual, one, two = q_record(inputs.q, inputs.nope)
    terms = 2 if "q2" in path else 1
    got = sparse_attn_fp8(
        record.to(device),
        q_scale.to(device),
        pages,
        idx,
        sinks,
        residual=residual.to(device) if terms == 2 else None,
        token_scale=None if token_scale is None else token_scale.to(device),
        rope_fp8="rope_fp8" in path,
        pv_fp8="pv_fp8" in path,
        path=by,
        **on,
        **paged,
    )
    return got, torch.cat([two if terms == 2 else one, inputs.q.float()[..., inputs.nope :]], -1), pool


def cut_sums(q, keys, nope, path):
    """Eight standard deviations of what Hopper's FP8 products lose, (T, H, S): q (T, H, K), keys (T, S, K) FP64.

    A product instruction adds 32 products to the sum so far: all are lined up with the largest and cut to 13 bits
    behind its leading one (DeepSeek-V3, arXiv 2412.19437, section 3.3.2: "around 14 bits"). So 33 numbers lose up
    to a unit u = 2^-13 of the largest each, towards zero: u^2 / 3 in the mean square, of either sign as products
    are; over all instructions the squares add up. With one scale a token all instructions are one chain that starts
    with rope's dots; with seven scales each group's sum starts from zero. Power-of-two scales change no bit of it.
    A simulation of this loses up to 0.016 of a logit in a test's case; an H200 (2026-11-30) moved LSEs by up to 0.0225.
    """
    blocks, terms = nope // 32, 2 if "q2" in path else 1
    left = q[..., :nope].unflatten(-1, (blocks, 32))
    right = keys[..., :nope].unflatten(-1, (blocks, 32))
    dots = torch.einsum("thgk,tsgk->thsg", left, right)
    largest = torch.einsum("thg,tsg->thsg", left.abs().amax(-1), right.abs().amax(-1))
    if "aligned" in path:
        rope = torch.einsum("thk,tsk->ths", q[..., nope:], keys[..., nope:])[..., None]
        sums = torch.cat([rope, rope + dots.cumsum(-1)], -1).abs()
        before = torch.maximum(sums[..., :-1], sums[..., 1:])
    else:
        before = dots.unflatten(-1, (-1, 2)).cumsum(-1).flatten(-2).abs()
    unit = UNIT * torch.maximum(before, largest)
    return 8 * (33 / 3 * terms * unit.square().sum(-1)).sqrt()


def want(path, inputs, q, pool, *, cut=None):
    """The ref's (out, lse) of values as the kernel reads them, and the bounds of both, all on the CPU.

    ``cut``: whether sums are those of Hopper's tensor cores (None: as a GPU is here or not).
    """
    cut = torch.cuda.is_available() if cut is None else cut
    row = row_fp8 if "rope_fp8" in path else bf16.round
    at = AttnRounding(q_rope=row, k_rope=row)
    idx = slots(inputs.idx, inputs.sequence).long()
    out, lse = sparse_attn(q, pool, idx, inputs.sinks, n_rope=ROPE, scale=inputs.scale, at=at)
    turned = torch.cat([q[..., : inputs.nope], row(q[..., inputs.nope :])], -1).double()
    keys = torch.cat([pool[:, : inputs.nope], row(pool[:, inputs.nope :])], -1).double()
    chosen, held = keys[idx.clamp_min(0)], (idx >= 0)[:, None, :]
    logits = torch.einsum("thk,tsk->ths", turned, chosen) * inputs.scale
    size = torch.einsum("thk,tsk->ths", turned.abs(), chosen.abs()) * inputs.scale
    top = torch.where(held, logits, -torch.inf).amax(-1, keepdim=True).clamp_min(-1e30)
    p = torch.where(held, (logits - top).exp(), 0)
    denominator = p.sum(-1, keepdim=True) + (inputs.sinks.double()[None, :, None] - top).exp()
    share = p / denominator
    values = pool[idx.clamp_min(0)].double().abs()
    mean = torch.einsum("ths,tsk->thk", share, values)
    # FP32 sums of K products; on the device tensor cores cut, BF16's by less than 2^-12 of the magnitudes
    error = (2.0**-12 if cut or row is not bf16.round else 512 * 2.0**-24) * size
    if cut and path.startswith("b1") and path != "b1a":
        error = error + cut_sums(turned, chosen, inputs.nope, path) * inputs.scale
    # an LSE moves by the mean of what its logits move by; a mean of V by that of each p, and by that of their sum
    moved = torch.where(held, error, 0) * share
    of_lse = moved.sum(-1) / share.sum(-1).clamp_min(1e-30) + 2.0**-20
    rounded = torch.full_like(mean, 2.0**-8)
    bound = torch.einsum("ths,tsk->thk", moved, values) + mean * (moved.sum(-1, keepdim=True) + 2.0**-19)
    if "pv_fp8" in path:
        rounded[..., : inputs.nope] = 2.0**-4
        flat = torch.where(held[:, 0, :, None], values, 0).sum(1)
        subnormal = 2.0**-17 * flat[:, None] / denominator
        subnormal[..., inputs.nope :] = 0
        bound = bound + subnormal
    bound = bound + mean * (rounded + 2.0**-7)
    return out, lse, bound, of_lse + 2.0**-22 * lse.nan_to_num(0, 0, 0).abs()


def close(got, wanted):
    """Whether :func:`assert_close` holds."""
    try:
        assert_close(got, wanted)
    except AssertionError:
        return False
    return True


def assert_close(got, wanted):
    """Within the bounds everywhere; a row without keys exactly."""
    (out, lse), (ref_out, ref_lse, bound, lse_bound) = (t.cpu() for t in got), wanted
    none = ref_lse == -torch.inf
    assert_bitwise(lse == -torch.inf, none)
    assert (out[none] == 0).all()
    error = (out.double() - ref_out.double()).abs()
    assert (error <= bound).all(), f"out: {(error / bound).max()} of its bound"
    error = (lse.double() - ref_lse.double())[~none].abs()
    assert (error <= lse_bound[~none]).all(), f"lse: {error.max()}"


def faults_of(inputs, q, pool, path):
    """Name -> (inputs, q, pool) of a ref that does something else."""
    nope, group = inputs.nope, slice(inputs.nope - 64, inputs.nope)
    rolled = pool.clone()
    rolled[:, group] = pool.roll(1, 0)[:, group]
    faults = {
        "sink left out": (replace(inputs, sinks=torch.full_like(inputs.sinks, -1e4)), q, pool),
        "last group's codes and scales of the token before": (inputs, q, rolled),
        "rope dot left out": (inputs, torch.cat([q[..., :nope], q[..., nope:] * 0], -1), pool),
        "last key left out": (replace(inputs, idx=inputs.idx[:, :-1]), q, pool),
        "heads swapped": (inputs, q.roll(1, 1), pool),
        "other sequence's pages": (replace(inputs, sequence=1 - inputs.sequence), q, pool),
        "gain": (inputs, q, pool * 1.2),
    }
    if "q2" in path:
        first = torch.cat([q_record(inputs.q, nope)[3], q[..., nope:]], -1)
        faults["second term left out"] = (inputs, first, pool)
    return faults


def assert_faults_leave_the_bound(got, inputs, q, pool, path):
    """Under the bound of the device's sums too, wherever this runs."""
    for name, (other, other_q, other_pool) in faults_of(inputs, q, pool, path).items():
        assert not close(got, want(path, other, other_q, other_pool, cut=True)), f"{name}: within the bound"


def simulated(terms, keys, nope, path):
    """Scores (T, H, S) FP64 as :func:`cut_sums` describes their making: of q's terms, each (T, H, K), and keys."""

    def product(sums, q, k):
        parts = q[:, :, None] * k[:, None]
        top = torch.maximum(parts.abs().amax(-1), sums.abs()).clamp_min(1e-300)
        unit = UNIT * torch.exp2(top.log2().floor())
        return (torch.trunc(parts / unit[..., None]).sum(-1) + torch.trunc(sums / unit)) * unit

    sums = torch.einsum("thk,tsk->ths", terms[0][..., nope:], keys[..., nope:])
    whole = torch.zeros_like(sums)
    blocks = [slice(first, first + 32) for first in range(0, nope, 32)]
    if "aligned" in path:
        for q in terms:
            for block in blocks:
                sums = product(sums, q[..., block], keys[..., block])
        return sums
    for group in zip(blocks[::2], blocks[1::2], strict=True):
        part = torch.zeros_like(sums)
        for q in terms:
            for block in group:
                part = product(part, q[..., block], keys[..., block])
        whole = whole + part
    return whole + sums


@pytest.mark.parametrize("path", ["b1", "b1_q2", "b1_aligned", "b1_aligned_q2"])
def test_cut_sums_of_a_simulation_are_inside_their_bound_and_use_it(path):
    inputs = case(1, 64, 64, nope=448)
    one, two = (q.double() for q in q_record(inputs.q, 448)[3:])
    q_rope = inputs.q.double()[..., 448:]
    q = torch.cat([two if "q2" in path else one, q_rope], -1)
    rest = torch.cat([two - one, torch.zeros_like(q_rope)], -1)
    keys = stored(inputs, "aligned" in path)[2][
        slots(inputs.idx, inputs.sequence).long().clamp_min(0)
    ].double()
    terms = [torch.cat([one, q_rope], -1), rest] if "q2" in path else [q]
    exact = torch.einsum("thk,tsk->ths", q, keys)
    used = (simulated(terms, keys, 448, path) - exact).abs() / cut_sums(q, keys, 448, path)
    assert 0.05 < used.max() < 1
