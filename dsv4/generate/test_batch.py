"""Batches whose sequences end apart, and why each ends; on a model that writes what it is told to."""

import pytest
import torch

from dsv4.generate._scripted import END, EOS, NANO, TOKENIZER, Scripted, ask
from dsv4.generate.accounting import account
from dsv4.generate.batch import Request, generate
from dsv4.generate.chat import Chat, extension
from dsv4.generate.sampling import Sampler, Sampling, draw
from dsv4.generate.stops import stops_of
from dsv4.model import numerics
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer


def test_sequences_end_apart_and_the_others_go_on():
    model = Scripted({"a": [*b"xy", END], "b": [*b"abcdef", EOS], "c": [EOS]})
    a, b, c = generate(model, TOKENIZER, [ask("a"), ask("b"), ask("c")])
    assert [one.text for one in (a, b, c)] == ["xy", "abcdef", ""]
    assert [(one.reason, one.stop) for one in (a, b, c)] == [
        ("stop_id", END),
        ("stop_id", EOS),
        ("stop_id", EOS),
    ]
    assert a.tokens == (*b"xy", END)
    assert model.batches == [[1, 1, 1], [1, 1], [1, 1], [1], [1], [1], [1]]
    assert a.cache.read == [*b"axy"]  # all but the last token


@pytest.mark.parametrize(
    ("changes", "text", "reason", "stop", "tokens"),
    [
        ({"budget": 3}, "one", "budget", None, 3),
        ({"budget": 9}, "one\ntwo.", "stop_id", END, 9),  # the stop id is the budget's last
        ({"budget": 8}, "one\ntwo.", "budget", None, 8),
        ({"stop_strings": ["e\nt"]}, "on", "stop_string", "e\nt", 5),
        ({"budget": 3, "stop_strings": ["e\nt"]}, "one", "budget", None, 3),  # what was held back comes out
        ({"stop_ids": ()}, "one\ntwo.<|end_of_turn|>" + "\0" * 2, "budget", None, 11),
    ],
)
def test_why_a_text_ends(changes, text, reason, stop, tokens):
    heard = []
    (got,) = generate(
        Scripted({"q": [*b"one\ntwo.", END]}),
        TOKENIZER,
        [ask("q", **{"budget": 11} | changes)],
        heard=lambda index, piece: heard.append(piece),
    )
    assert (got.text, got.reason, got.stop, len(got.tokens)) == (text, reason, stop, tokens)
    assert "".join(heard) == text
    assert "" not in heard


def test_a_text_ends_at_the_models_last_position():
    model = Scripted({"q": b"abcdefgh"}, positions=5)
    (got,) = generate(model, TOKENIZER, [ask("q")])
    assert (got.text, got.reason) == ("abcde", "positions")
    assert got.cache.length == 5


def test_logits_that_are_not_finite_end_their_text_alone():
    model = Scripted({"a": b"abcd", "b": [*b"abcd", END]})
    forward = model.forward

    def broken(caches, chunks, *probe):
        logits = forward(caches, chunks)
        if len(caches) > 1 and caches[0].length == 3:
            logits[0, 5] = torch.nan
        return logits

    model.forward = broken
    a, b = generate(model, TOKENIZER, [ask("a"), ask("b")])
    assert (a.text, a.reason) == ("ab", "not_finite")
    assert (b.text, b.reason) == ("abcd", "stop_id")


@pytest.mark.parametrize("wrong", [{"tokens": []}, {"budget": 0}])
def test_a_request_for_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="expected 1 or more of each"):
        ask("a", **wrong)


def test_no_requests_give_nothing():
    assert generate(Scripted({}), TOKENIZER, []) == []


# Sampling


def test_greedy_ties_go_to_the_smaller_id():
    assert Sampler(Sampling())(torch.tensor([0.0, 2.0, 2.0])) == 1


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()  # shares; likeliest first: ids 1, 3, 2, 0


@pytest.mark.parametrize(
    ("number", "top_p", "token"),
    [
        (0.0, 1.0, 1),
        (0.399, 1.0, 1),
        (0.401, 1.0, 3),
        (0.701, 1.0, 2),
        (0.999, 1.0, 0),
        (0.999, 0.39, 1),  # the likeliest reaches it
        (0.999, 0.6, 3),
        (0.57, 0.6, 1),  # of the share that is kept: 0.57 * 0.7
        (0.58, 0.6, 3),
    ],
)
def test_draws_by_hand(number, top_p, token):
    assert draw(LOGITS, Sampling(temperature=1.0, top_p=top_p), number) == token


def test_draws_have_the_models_shares():
    """4000 draws of the exact shares at temperature 2; a count is off by 5 standard deviations once in 1e6 runs."""
    sampler = Sampler(Sampling(temperature=2.0, seed=1))
    counts = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(4000)]), minlength=4).double()
    shares = torch.softmax(LOGITS.double() / 2, dim=-1)
    assert ((counts - 4000 * shares).abs() <= 5 * (4000 * shares * (1 - shares)).sqrt()).all()


def test_equal_logits_are_drawn_by_id():
    assert draw(torch.zeros(4), Sampling(temperature=1.0), 0.6) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
    ],
)
def test_sampling_outside_its_ranges_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**wrong)


# On a small model


@pytest.fixture(scope="module")
def small():
    config = small_config(vocab_size=320, num_hidden_layers=2, compress_ratios=[4, 8])
    return Transformer(config, random_weights(config, 0), numerics.trained(config), page_size=8)


def requests(indices):
    return [
        Request(
            tokens=[256, *range(65, 65 + 3 * i)],
            budget=2 + 5 * i,
            sampling=Sampling(temperature=1.0, top_p=0.9, seed=i),
        )
        for i in indices
    ]


def test_a_text_does_not_depend_on_its_batch(small):
    together = generate(small, TOKENIZER, requests(range(4)), chunk=5)
    for index in range(4):
        (alone,) = generate(small, TOKENIZER, requests([index]))
        assert (alone.tokens, alone.text) == (together[index].tokens, together[index].text)
    assert [len(one.tokens) for one in together] == [2, 7, 12, 17]
    backwards = generate(small, TOKENIZER, requests(range(4))[::-1])[::-1]
    assert [one.tokens for one in backwards] == [one.tokens for one in together]


def test_another_seed_is_another_text(small):
    texts = {
        generate(
            small,
            TOKENIZER,
            [Request(tokens=[256, 70], budget=8, sampling=Sampling(temperature=1.0, seed=seed))],
        )[0].tokens
        for seed in (0, 0, 1)
    }
    assert len(texts) == 2


# Chats


@pytest.mark.parametrize("stop_ids", [(), range(320)], ids=["cut-off", "stopped-at-once"])
def test_a_warm_second_turn_is_a_cold_one(small, stop_ids):
    """The same tokens, and every bit of the next step's logits."""
    warm = Chat(small, TOKENIZER, stop_ids)
    first = warm.ask("Hi", 5)
    read = first.cache.length
    warm.stop_ids = ()
    second = warm.ask("And?", 6)
    assert warm.warm == read == (6 if stop_ids else 10)  # all but the last token that was written
    layout = [256, 258, *b"Hi", END, 259, *_written(first), END, 258, *b"And?", END, 259]
    (cold,) = generate(small, TOKENIZER, [Request(tokens=layout, budget=6)])
    assert cold.tokens == second.tokens
    assert cold.cache.length == second.cache.length
    one, other = (small.forward([it.cache], [torch.tensor([7])]) for it in (second, cold))
    assert torch.equal(one, other)


def _written(answer):
    return answer.tokens[:-1] if answer.reason == "stop_id" else answer.tokens


def test_only_an_extension_is_warm():
    assert extension([1, 2], [1, 2, 3]) == [3]
    assert extension([1, 2], [1, 3, 4]) is None
    assert extension([1, 2], [1, 2]) is None
    assert extension([1, 2], [1]) is None


def test_a_template_that_drops_an_earlier_turn_is_read_cold(small, monkeypatch):
    talk = Chat(small, TOKENIZER, stop_ids=())
    talk.ask("Hi", 2)
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda *rest: [256, *encode(*rest)[5:]])
    answer = talk.ask("And?", 2)
    assert talk.warm == 0
    assert answer.cache.length == len(talk._read)


# A stop id that is dropped on the way from the checkpoint to the loop


def test_a_dropped_stop_id_is_seen_in_the_account():
    stops = stops_of(TOKENIZER, NANO, "chat")
    for kept, ran_past in ((stops.every, None), ((EOS,), 2)):
        (got,) = generate(Scripted({"q": [*b"hi", END, *b"more"]}), TOKENIZER, [ask("q", stop_ids=kept)])
        assert account(got.tokens, got.reason, "chat", stops).ran_past == ran_past
