"""What the audit says of a rung's texts: moved, broken, ended elsewhere, or nothing to read."""

import json

import numpy as np
import pytest

from dsv4.judge import _texts, text_files
from dsv4.judge._texts import OTHER_STOP, STOP, continuation, diverged, generation
from dsv4.judge.gate import write_json
from dsv4.judge.text import Texts


def block(texts, name="P4"):
    judge = Texts(texts.results, texts.config)
    return judge.judged(texts.config.ladder[name])


def at(table, prompt, step):
    """Label of a row."""
    return table.index[(table["prompt"] == prompt) & (table["step"] == step)][0]


def test_means_by_class_and_kind_and_ends_by_kind(texts):
    table = texts.table(kl=0.0)
    table["kl_nats"] = table["kind"].map({"plain": 3e-3, "chat": 1e-3, "second_turn": 2e-3})
    row = at(table, "code", 5)
    table.loc[row, ["kl_nats", "top1", "margin_trained"]] = [0.5, False, 0.1]
    found = block(texts.rung("B0_unfused", table), "B0_unfused")
    size = len(table)
    assert found["kl_nats"] == pytest.approx(table["kl_nats"].sum() / size)
    assert (found["kl_worst"], found["positions"], found["not_finite"]) == (0.5, size, 0)
    assert found["top1"] == pytest.approx(1 - 1 / size)
    assert found["by_kind"]["plain"]["kl_nats"] == pytest.approx((575 * 3e-3 + 0.5) / 576)
    assert found["by_kind"]["second_turn"] == {
        "kl_nats": pytest.approx(2e-3),
        "top1": 1.0,
        "n": 61,
        "not_finite": 0,
    }
    assert sum(group["n"] for group in found["by_class"].values()) == size
    assert found["by_class"]["control"]["n"] == 3  # the turn ends
    assert found["stops"] == {"chat": {"7": 2}, "plain": {"budget": 1}, "second_turn": {"7": 1}}
    assert found["prompts"]["opposites"] == {
        "kind": "chat",
        "stop": STOP,
        "stop_name": "<end>",
        "reason": "stop_id",
        "length": 540,
        "reference_length": 540,
        "reference_reason": "stop_id",
        "stopped_as_reference": True,
        "onset": None,
        "reference_onset": None,
        "divergence_step": None,
        "near_tie": None,
        "distinct_4": pytest.approx(1.0, abs=0.01),
        "ran_past": None,
    }
    assert (found["own"], found["attribution"], found["reasons"], found["broken"]) == (None, None, [], False)


class TestMoved:
    def test_a_shift_is_said_with_its_error(self, texts):
        parent = texts.table(kl=1e-3, noise=1e-5)
        texts.rung("B0_unfused", parent)
        shifted = parent.assign(kl_nats=texts.table(kl=1.2e-3, noise=1e-5, seed=1)["kl_nats"])
        found = block(texts.rung("P4", shifted))
        assert found["own"]["moved"]
        assert found["own"]["kl_change"] == pytest.approx(2e-4, rel=0.02)
        assert found["reasons"] == ["text moved: its KL rises by 0.0002 nats against B0_unfused's, +- 4e-07"]
        assert not found["broken"]

    def test_noise_alone_is_not(self, texts):
        texts.rung("B0_unfused", texts.table(noise=1e-5)).rung("P4", texts.table(noise=1e-5, seed=1))
        found = block(texts)
        assert found["own"]["se"] > 0
        assert (found["own"]["moved"], found["own"]["blocks"], found["reasons"]) == (False, 39, [])

    def test_without_the_parents_text_there_is_no_change_and_why(self, texts):
        found = block(texts.rung("P4"))
        assert found["own"] is None
        assert found["reasons"][0].startswith("not compared with B0_unfused's text: ")
        assert "text/B0_unfused.json: not there" in found["reasons"][0]
        assert found["kl_nats"] == pytest.approx(1e-3)

    def test_a_parent_that_is_refused_is_no_parent(self, texts):
        texts.rung("B0_unfused", schema=2).rung("P4")
        found = block(texts)
        assert found["own"] is None
        assert "text/B0_unfused.json: schema is 2, expected 1" in found["reasons"][0]

    def test_the_attribution_of_a_change_is_taken_and_no_other(self, texts):
        texts.rung("B0_unfused").rung("P4", texts.table(kl=2e-3))
        told = {"schema": 1, "variant": "P4", "words": "layer 5, index_topk: 83% of the KL"}
        path = texts.folder / "attribution" / "P4.json"
        write_json(path, told)
        assert block(texts)["attribution"] == told
        write_json(path, told | {"variant": "P5"})
        assert block(texts)["attribution"] is None
        assert "attribution/P4.json: variant is 'P5', expected 'P4'" in block(texts)["reasons"][-1]
        write_json(path, told)
        texts.rung("P4", texts.table(kl=3e-3))  # a newer text
        assert "older than the text of P4" in block(texts)["reasons"][-1]
        write_json(path, told)
        texts.rung("P4")
        assert block(texts)["attribution"] is None  # nothing moved


class TestEnds:
    def test_a_turn_end_that_was_run_past_its_own_budget_is_told(self, texts):
        free = [*continuation("opposites")[:-1], *[20] * 36]
        texts.rung("B0_unfused", own={"opposites": generation(free, "budget")})
        found = block(texts, "B0_unfused")
        ended = "the reference stops with <end> after 540 tokens, this text ran into its budget of 576"
        assert f"chat `opposites`: {ended}" in found["reasons"]
        assert not found["prompts"]["opposites"]["stopped_as_reference"]
        assert found["stops"]["chat"] == {"7": 1, "budget": 1}

    def test_a_stop_where_the_reference_has_none_and_another_stop_id_are_told(self, texts):
        early = generation([*continuation("code")[:40], STOP])
        other = generation([*continuation("chat")[:-1], OTHER_STOP], stop_name="<other>")
        divergence = {"code": diverged(40), "chat": diverged(60)}
        table = texts.table()
        table.loc[at(table, "code", 40), "top"] = STOP
        table.loc[at(table, "chat", 60), "top"] = OTHER_STOP
        texts.rung("B0_unfused", table, own={"code": early, "chat": other}, divergence=divergence)
        assert block(texts, "B0_unfused")["reasons"] == [
            "plain `code`: the reference ran into its budget of 576, this text stops with <end> after 40 tokens",
            "second turn `chat`: the reference stops with <end> after 60 tokens, this text stops with <other> after"
            " 60 tokens",
        ]

    @pytest.mark.parametrize(
        ("mine", "its", "said"),
        [
            (210, 340, "repetition sets in at step 210, the reference's own at 340"),
            (210, None, "repetition sets in at step 210, the reference's own text has none"),
            (340, 340, None),
            (350, 340, None),
            (None, 340, None),
        ],
    )
    def test_repetition_that_sets_in_earlier_than_the_references(self, texts, mine, its, said):
        loop = lambda onset: {"onset": onset, "period": 3, "copies": 70.0} if onset else None  # noqa: E731
        tokens = continuation("code")
        texts.rung("B0_unfused", own={"code": generation(tokens, "budget", loop=loop(mine))})
        path = texts.folder / "B0_unfused.json"
        account = json.loads(path.read_text())
        account["prompts"]["code"]["reference"]["loop"] = loop(its)
        write_json(path, account)
        found = block(texts, "B0_unfused")
        assert found["reasons"] == ([f"plain `code`: {said}"] if said else [])
        assert (found["prompts"]["code"]["onset"], found["prompts"]["code"]["reference_onset"]) == (mine, its)

    def test_leaving_the_reference_at_more_than_a_near_tie_is_told(self, texts):
        free = continuation("code").copy()
        free[31] = 50
        table = texts.table()
        table.loc[at(table, "code", 31), ["top", "top1"]] = [50, False]
        own = {"code": generation(free, "budget")}
        texts.rung("B0_unfused", table, own=own, divergence={"code": diverged(31, 1.25, near=False)})
        found = block(texts, "B0_unfused")
        said = "it leaves the reference's text at step 31, where that has a margin of 1.2 logits: no near tie"
        assert found["reasons"] == [f"plain `code`: {said}"]
        texts.rung("B0_unfused", table, own=own, divergence={"code": diverged(31)})
        assert block(texts, "B0_unfused")["reasons"] == []

    def test_a_leaf_is_forced_only(self, texts):
        found = block(texts.rung("P4_scalar_gsa", free=False).rung("B0_unfused"), "P4_scalar_gsa")
        assert (found["prompts"], found["stops"], found["free"]) == (None, {}, None)
        assert found["kl_nats"] == pytest.approx(1e-3)
        assert found["own"]["kl_change"] == 0.0
        assert (found["reasons"], found["broken"]) == ([], False)


class TestBroken:
    def broken(self, texts, *rest, **more):
        found = block(texts.rung("B0_unfused", *rest, **more), "B0_unfused")
        assert found["broken"]
        return found

    def test_a_stop_id_that_was_passed_is_a_fault(self, texts):
        free = continuation("code").copy()
        free[12] = STOP
        own = {"code": generation(free, "budget", ran_past=12)}
        table = texts.table()
        table.loc[at(table, "code", 12), "top"] = STOP
        found = self.broken(texts, table, own=own, divergence={"code": diverged(12)})
        said = "plain `code`: a stop id was passed at step 12: the loop that generated it does not stop"
        assert found["faults"] == [said]
        assert found["reasons"][0] == said
        assert found["prompts"]["code"]["ran_past"] == 12

    def test_so_it_is_in_the_references_own_text(self, texts):
        texts.rung("B0_unfused")
        path = texts.folder / "B0_unfused.json"
        account = json.loads(path.read_text())
        account["prompts"]["code"]["reference"]["ran_past"] = 3
        write_json(path, account)
        (said,) = block(texts, "B0_unfused")["faults"]
        assert said.startswith("plain `code`: the reference passed a stop id at step 3: ")

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("column", text_files.VALUES)
    def test_logits_that_are_not_finite_give_no_number_that_they_share_in(self, texts, column, value):
        table = texts.table()
        table.loc[[at(table, "opposites", 9), at(table, "opposites", 300)], column] = value
        found = self.broken(texts, table)
        said = "chat `opposites`: 2 of 541 forced positions are not finite, the first at step 9"
        assert (found["faults"], found["not_finite"], found["positions"]) == ([said], 2, len(table))
        assert (found["kl_nats"], found["kl_worst"], found["top1"]) == (None, None, None)
        assert found["by_kind"]["chat"] == {"kl_nats": None, "top1": None, "n": 575, "not_finite": 2}
        assert found["by_kind"]["plain"]["kl_nats"] == pytest.approx(1e-3)
        child = block(texts.rung("P4"))
        assert child["own"] is None
        assert child["reasons"] == [
            "not compared with B0_unfused's text: 2 positions of B0_unfused are not finite"
        ]
        assert not child["broken"]

    def test_every_row_nan_looks_like_nothing_that_is_fine(self, texts):
        table = texts.table()
        table[["kl_nats", "nll", "margin"]] = np.nan
        table["top1"], table["top"] = False, 0
        own = {name: generation([], "not_finite") for name in ("capital", "code", "chat", "opposites")}
        found = self.broken(texts, table, own=own)
        assert len(found["faults"]) == 8
        assert (
            "plain `code`: the free text ended in logits that are not finite after 0 tokens"
            in found["faults"]
        )
        assert {group["kl_nats"] for group in found["by_class"].values()} == {None}
        json.dumps(found, allow_nan=False)

    def test_a_reference_that_gave_no_token_is_a_fault_and_no_crash(self, texts, monkeypatch):
        tokens = lambda name: np.empty(0, np.int32) if name == "chat" else continuation(name)  # noqa: E731
        monkeypatch.setattr(_texts, "continuation", tokens)
        monkeypatch.setattr(
            _texts,
            "of_reference",
            lambda name: generation(tokens(name), "stop_id" if len(tokens(name)) else "not_finite"),
        )
        texts.reference()
        table = texts.table()
        assert set(table["prompt"]) == {"capital", "code", "opposites"}
        found = self.broken(texts, table)
        said = "ended in logits that are not finite after 0 tokens"
        assert f"second turn `chat`: the reference's own text {said}" in found["faults"]
        assert f"second turn `chat`: the free text {said}" in found["faults"]

    @pytest.mark.parametrize(("margin", "broken"), [(4.7, True), (4.5, False)])
    def test_a_turn_end_that_the_reference_is_sure_of(self, texts, margin, broken):
        table = texts.table()
        table.loc[at(table, "opposites", 540), ["top1", "top", "margin_trained"]] = [False, 21, margin]
        free = [*continuation("opposites")[:-1], 21, *[22] * 35]
        own = {"opposites": generation(free, "budget")}
        texts.rung("B0_unfused", table, own=own, divergence={"opposites": diverged(540)})
        found = block(texts, "B0_unfused")
        assert (found["broken"], found["faults"]) == (broken, [])
        said = "though the reference's margin there is 4.7 logits"
        said = f"chat `opposites`: the turn end after 540 tokens is not this rung's choice, {said}"
        assert (found["reasons"][0] == said) == broken

    @pytest.mark.parametrize(("margin", "broken"), [(9.0, True), (0.001, False)])
    def test_decode_that_is_unlike_the_rungs_own_prefill(self, texts, margin, broken):
        free = continuation("code").copy()
        free[100:] = 50
        table = texts.table()
        table.loc[at(table, "code", 100), "margin"] = margin
        own = {"code": generation(free, "budget")}
        texts.rung("B0_unfused", table, own=own, divergence={"code": diverged(100)})
        found = block(texts, "B0_unfused")
        said = "at step 100 decode takes another token than this rung's own prefill of the same tokens, whose margin is"
        assert found["reasons"] == [f"plain `code`: {said} {margin:.2g} logits"]
        assert (found["broken"], found["faults"]) == (broken, [])
