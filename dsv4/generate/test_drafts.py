"""Drafts change no token: with them, without them, right, wrong, and where a text ends inside one."""

from dataclasses import replace

import pytest
import torch

from dsv4.generate._scripted import END, TOKENIZER, Scripted, ask
from dsv4.generate.batch import MOST_UNREAD, generate
from dsv4.generate.drafts import LEAST, LENGTH, MOST, Drafter
from dsv4.generate.sampling import Sampling
from dsv4.model import numerics
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan, change

LINE = b"the cat sat on the mat; the cat sat on the hat; the cat sat."


def pieces(model, requests, drafts):
    heard = [""] * len(requests)

    def hear(index, piece):
        heard[index] += piece

    return generate(model, TOKENIZER, requests, heard=hear, drafts=drafts), heard


# The lookup


def test_a_draft_is_what_followed_the_longest_agreement():
    drafter = Drafter([b"..abcX", b"..zabcY"], b"--zabc")
    assert drafter.propose(9) == [*b"Y"]  # four tokens agree there, three in the first text


def test_the_first_text_wins_a_tie_and_its_last_place():
    assert Drafter([b"abP..abQ", b"abR"], b"--ab").propose(1) == [*b"Q"]


def test_a_text_is_looked_up_in_itself():
    drafter = Drafter([], b"one, two, one,")
    assert bytes(drafter.propose(9)) == b" two, on"
    for token in b" t":
        drafter.push(token)
    assert bytes(drafter.propose(3)) == b"wo,"


def test_a_draft_is_no_longer_than_the_agreement_lets_it():
    likely = bytes(range(200))
    for agreed in (LEAST, 5, MOST, MOST + 20):
        drafter = Drafter([likely], b"\xff" + likely[:agreed])
        assert len(drafter.propose(500)) == LENGTH * min(agreed, MOST)
        assert len(drafter.propose(3)) == 3


@pytest.mark.parametrize("read", [b"", b"a", b"ab", b"never seen"])
def test_nothing_alike_gives_no_draft(read):
    assert Drafter([b"xyxyx"], read).propose(9) == []
    assert Drafter([b"xyxyx"], b"xy").propose(0) == []


# Texts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": 20},
        {"budget": 21},
        {"budget": 1},
        {"stop_ids": ()},
        {"stop_strings": ["hat"]},
        {"stop_strings": ["t; the"]},
        {"stop_ids": (ord(";"), END)},
        {"sampling": Sampling(temperature=1.0, seed=3)},
    ],
)
@pytest.mark.parametrize(
    "drafts", [[], [LINE], [LINE[:30]], [LINE.replace(b"hat", b"rat")], [b"the dog", LINE[10:]], [b"\0" * 90]]
)
def test_drafts_change_no_text(changes, drafts):
    requests = [ask("q", **{"budget": 90} | changes), ask("r", budget=40)]
    scripts = {"q": [*LINE, END], "r": [*LINE[:25], END]}
    plain, heard = pieces(Scripted(scripts), requests, None)
    model = Scripted(scripts)
    drafted, heard_drafted = pieces(model, requests, drafts)
    assert [replace(one, cache=None) for one in drafted] == [replace(one, cache=None) for one in plain]
    assert heard_drafted == heard
    assert [one.cache.read for one in drafted] == [one.cache.read for one in plain]


@pytest.mark.parametrize("positions", [5, 30, 59, 60, 61, 62])
def test_a_draft_ends_at_the_models_last_position(positions):
    scripts = {"q": [*LINE, END]}
    (plain,), _ = pieces(Scripted(scripts, positions), [ask("q", budget=90)], None)
    (drafted,), _ = pieces(Scripted(scripts, positions), [ask("q", budget=90)], [LINE])
    assert (drafted.reason, drafted.tokens) == (plain.reason, plain.tokens)
    assert drafted.cache.length == plain.cache.length <= positions


def test_logits_that_are_not_finite_inside_a_draft_end_the_text_there():
    model = Scripted({"q": [*LINE, END]})
    forward = model.forward

    def broken(caches, chunks, *probe):
        logits = forward(caches, chunks)
        first = caches[0].length - len(chunks[0])
        if first < 40 <= caches[0].length:
            logits[39 - first] = torch.nan
        return logits

    model.forward = broken
    (got,), _ = pieces(model, [ask("q", budget=90)], [LINE])
    assert (got.reason, bytes(got.tokens)) == ("not_finite", LINE[:39])


def test_a_good_draft_saves_passes():
    model = Scripted({"q": [*LINE, END]})
    pieces(model, [ask("q", budget=90)], [LINE])
    assert len(model.batches) < len(LINE) / 4


def test_a_sequence_that_is_behind_is_read_up():
    wrong = b"".join(LINE[: at + 2] + b"!" for at in range(len(LINE)))  # agrees, and is never right
    model = Scripted({"q": [*LINE, END]})
    pieces(model, [ask("q", budget=90)], [wrong])
    assert max(count for (count, *_) in model.batches) <= MOST_UNREAD + 1 + LENGTH * MOST


def test_where_a_row_depends_on_its_pass_nothing_is_drafted():
    model = Scripted({"q": [*LINE, END]})
    model.row_alone = False
    pieces(model, [ask("q", budget=90)], [LINE])
    assert all(counts == [1] for counts in model.batches)


@pytest.mark.parametrize("values", [{}, {"q_format": "fp8", "index_score": "fp8", "residual": "fp32"}])
def test_a_models_texts_and_caches_are_the_same_bits(values):
    config = small_config(seed=5)
    model = Transformer(
        config, random_weights(config, seed=5), numerics.of_plan(change(Plan(), values), config)
    )
    assert model.row_alone
    requests = [ask("q", tokens=[*range(3, 3 + n)], budget=16, stop_ids=()) for n in (2, 9)]
    plain, _ = pieces(model, requests, None)
    spoilt = [token if at % 7 else token ^ 1 for at, token in enumerate(plain[1].tokens)]
    drafted, _ = pieces(model, requests, [plain[0].tokens[2:], spoilt])
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    next_token = [torch.tensor([7])] * 2
    ends = [model.forward([one.cache for one in texts], next_token) for texts in (plain, drafted)]
    assert torch.equal(*ends)


def test_a_launchs_gsa_ties_rows_together():
    config = small_config(seed=5)
    for value, alone in (("fused", True), ("fused_scalar_gsa", False), ("fused_launch_gsa", False)):
        plan = change(Plan(), {"norm_quant": value})
        assert (
            Transformer(config, random_weights(config, seed=5), numerics.of_plan(plan, config)).row_alone
            is alone
        )
