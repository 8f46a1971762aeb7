"""Each rounding point of sparse attention alone, and a whole plan, against the loop over keys."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    Spy,
    assert_bitwise,
    assert_differs,
    assert_stored_once,
    to_bf16,
    to_fp8,
)
from kernels.formats import _oracle, bf16, fp8_block
from kernels.sparse_attn.ref import EQUATIONS, ROWS, AttnRounding, sparse_attn
from kernels.sparse_attn.test_sparse_attn import (
    NOPE,
    ROPE,
    SCALE,
    H,
    assert_same,
    case,
    emulate,
    fp8_probability,
    run,
)


def fp8_row(x):
    return fp8_block.round(x, x.shape[-1])


def uneven(x):
    """A store that shows how often it was applied."""
    return bf16.round(x * 0.75)


EMULATED = {
    bf16.round: to_bf16,
    fp8_row: lambda x: to_fp8(np.ascontiguousarray(x), x.shape[-1]),
    fp8_probability: lambda p: (
        _oracle.e4m3_decode(_oracle.e4m3_encode(p * np.float32(256))) / np.float32(256)
    ),
    uneven: lambda x: to_bf16(x * np.float32(0.75)),
}
POINTS = [
    *((field, store) for field in ("q_nope", "q_rope", "k_nope", "k_rope") for store in (fp8_row, uneven)),
    *((field, store) for field in ("p_nope", "p_rope") for store in (bf16.round, fp8_probability, uneven)),
    ("out", uneven),
]
NAMES = [f"{field}-{store.__name__}" for field, store in POINTS]


@pytest.mark.parametrize(("field", "store"), POINTS, ids=NAMES)
def test_each_point_alone_equals_its_emulation_and_no_other(field, store):
    args = case(70, seed=21, narrow=True)
    rounded = EMULATED[store]
    base = {} if field == "out" else {"out": bf16.round}
    got, got_lse = run(*args, at=replace(EQUATIONS, **base, **{field: store}))
    base = {name: EMULATED[f] for name, f in base.items()}
    want, want_lse = emulate(*args, **base, **{field: rounded})
    assert_bitwise(got, want)
    assert_bitwise(got_lse, want_lse)

    assert_differs(got, emulate(*args, **base)[0])  # dropped
    if store is uneven:
        twice = {field: lambda x: rounded(rounded(x))}
        assert_differs(got, emulate(*args, **base, **twice)[0])  # doubled
    side, part = field.split("_") if "_" in field else (field, "")
    if part:
        other = f"{side}_{'rope' if part == 'nope' else 'nope'}"
        assert_differs(got, emulate(*args, **base, **{other: rounded})[0])  # on the other part
        for other_side in {"q", "k", "p"} - {side}:
            assert_differs(got, emulate(*args, **base, **{f"{other_side}_{part}": rounded})[0])
    moved = {
        "k": "V rounded as K",
        "p": "rounded p in the denominator" if part == "nope" else "",
        "out": "stored before the division",
    }.get(side, "")
    if moved:
        assert_differs(got, emulate(*args, **base, **{field: rounded}, fault=moved)[0])
    if field == "p_nope":
        wrong = emulate(*args, **base, **{field: rounded}, fault="p rounded after normalising")[0]
        assert_differs(got, wrong)


@pytest.mark.parametrize("field", ["q_nope", "q_rope", "k_nope", "k_rope"])
def test_operands_reach_their_point_once_as_they_came(field):
    q, pool, idx, sinks = case(70, seed=23)
    spy = Spy()
    run(q, pool, idx, sinks, at=replace(EQUATIONS, **{field: spy}))
    assert len(spy.given) == 1
    source = q if field[0] == "q" else pool
    assert_bitwise(spy.given[0], source[..., :NOPE] if field.endswith("nope") else source[..., NOPE:])


@pytest.mark.parametrize("field", ["p_nope", "p_rope"])
def test_probabilities_reach_their_point_once_relative_to_the_row_maximum(field):
    args = case(ROWS + 6, seed=25)
    spy = Spy()
    run(*args, at=replace(EQUATIONS, **{field: spy}))
    assert [len(p) for p in spy.given] == [ROWS, 6]
    given = [head for p in spy.given for row in p for head in row]
    for (t, _), p in zip(np.ndindex(ROWS + 6, H), given, strict=True):
        distinct = args[2][t][args[2][t] >= 0].unique()
        assert p.dtype == torch.float32
        assert (p > 0).sum() == len(distinct)
        assert p.max() == (1 if len(distinct) else 0)


def test_out_is_the_last_step_happens_once_and_leaves_lse_alone():
    args = case(129, seed=27)
    assert_stored_once(lambda out: run(*args, at=replace(EQUATIONS, out=out))[0])
    assert_bitwise(run(*args, at=replace(EQUATIONS, out=bf16.round))[1], run(*args)[1])


@pytest.mark.parametrize("T", SIZES)
def test_a_whole_plan_equals_its_emulation(T):
    args = case(T, seed=29, narrow=True)
    names = ("q_nope", "q_rope", "k_rope", "p_nope", "p_rope", "out")
    stores = (fp8_row, bf16.round, bf16.round, fp8_probability, bf16.round, bf16.round)
    at = AttnRounding(**dict(zip(names, stores, strict=True)))
    got, got_lse = run(*args, at=at)
    want, want_lse = emulate(*args, **{n: EMULATED[s] for n, s in zip(names, stores, strict=True)})
    assert_bitwise(got, want)
    assert_bitwise(got_lse, want_lse)


def test_the_defaults_are_the_equations():
    args = case(20, seed=31)
    assert AttnRounding() == EQUATIONS
    assert_same(run(*args), sparse_attn(*args, n_rope=ROPE, scale=SCALE))
