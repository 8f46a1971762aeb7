"""Claims about generation: which texts decide, and what each tree's batched prefill is known to do."""

import pytest

from dsv4.judge import claims_text
from dsv4.judge._texts import STOP, continuation, diverged, generation
from dsv4.judge.claims import judge_claims
from dsv4.judge.evidence import Evidence
from dsv4.judge.gate import write_json

OWN = {"entry_point": "dsv4.model.prefill.prefill", "compared": "bit for bit by its tests"}


def judged(texts, *names, status="pass", batched=OWN):
    for name in names:
        head = {"id": name, "status": status, "guard": {"moe": {}, "linears": {}, "batched_prefill": batched}}
        write_json(texts.results / "gates" / f"{name}.json", head)
    return Evidence(texts.results, texts.config, "cpu")


class TestStops:
    def claim(self, texts, *names, **more):
        return claims_text.stop_512(judged(texts, *names, **more))

    def test_the_references_stop_past_512_tokens_is_reached_by_every_rung(self, texts):
        texts.rung("B0_unfused").rung("P4")
        holds, text = self.claim(texts, "B0_unfused", "P4")
        assert holds
        assert text == (
            "plain `code`: the reference ran into its budget of 576, so do 2 of 2 rungs;"
            " chat `capital`: the reference stops with <end> after 33 tokens, so do 2 of 2 rungs;"
            " chat `opposites`: the reference stops with <end> after 540 tokens, so do 2 of 2 rungs;"
            " second turn `chat`: the reference stops with <end> after 60 tokens, so do 2 of 2 rungs;"
            " no stop id was passed"
        )

    def test_a_long_text_that_does_not_stop_is_against_it(self, texts):
        free = [*continuation("opposites")[:-1], *[20] * 36]
        divergence = {"opposites": diverged(540)}
        texts.rung("B0_unfused")
        texts.rung("P4", own={"opposites": generation(free, "budget")}, divergence=divergence)
        holds, text = self.claim(texts, "B0_unfused", "P4")
        assert holds is False
        said = "after 540 tokens, so do 1 of 2 rungs, but P4 ran into its budget of 576"
        assert f"chat `opposites`: the reference stops with <end> {said}" in text

    def test_so_is_a_short_prompts_text_that_runs_on(self, texts):
        free = [*continuation("chat")[:-1], *[20] * 516]
        own = {"chat": generation(free, "budget")}
        texts.rung("B0_unfused", own=own, divergence={"chat": diverged(60)})
        assert self.claim(texts, "B0_unfused")[0] is False

    def test_a_short_text_that_ends_otherwise_decides_nothing(self, texts):
        own = {"chat": generation([*continuation("chat")[:-1], 8], stop_name="<other>")}
        texts.rung("B0_unfused", own=own, divergence={"chat": diverged(60)})
        holds, text = self.claim(texts, "B0_unfused")
        assert holds
        assert "so do 0 of 1 rungs, but B0_unfused stops with <other> after 60 tokens" in text

    def test_other_lengths_are_said(self, texts):
        own = {"opposites": generation([*continuation("opposites")[:500], STOP])}
        texts.rung("B0_unfused").rung("P4", own=own, divergence={"opposites": diverged(500)})
        assert "so do 2 of 2 rungs (after 500 to 540)" in self.claim(texts, "B0_unfused", "P4")[1]

    def test_a_stop_id_that_was_passed_is_against_it(self, texts):
        texts.rung("B0_unfused", own={"code": generation(continuation("code"), "budget", ran_past=3)})
        holds, text = self.claim(texts, "B0_unfused")
        assert holds is False
        assert text.endswith("a stop id was passed in B0_unfused (code)")

    def test_without_a_long_stop_of_the_reference_it_is_not_measured(self, texts, monkeypatch):
        monkeypatch.setattr(claims_text, "LONG", 550)
        holds, text = self.claim(texts.rung("B0_unfused"), "B0_unfused")
        assert holds is None
        assert text.startswith("no text of the reference stops after 550 tokens or more: plain `code`")

    def test_texts_that_are_not_there_refused_or_of_a_rung_that_failed_do_not_count(self, texts):
        assert "text/B0_unfused.json: not there" in self.claim(texts, "B0_unfused")[1]
        texts.rung("P4_scalar_gsa", free=False).rung("P4")
        assert self.claim(texts, "B0_unfused", status="fail") == (
            None,
            "no rung of this run has generated text",
        )
        judged(texts, "P4_scalar_gsa")
        assert self.claim(texts)[0] is None
        judged(texts, "P4")
        rows = {row["id"]: row for row in judge_claims(Evidence(texts.results, texts.config, "cpu", ["P4"]))}
        assert (rows["stop_512"]["state"], rows["stop_512"]["device"]) == ("holds", "cpu")


class TestBatchedPrefill:
    def claim(self, texts, *names, **more):
        return claims_text.batched_prefill(judged(texts, *names, **more))

    def test_the_own_model_has_one_and_a_batch_is_each_alone(self, texts):
        holds, text = self.claim(texts)
        assert holds
        assert text == (
            "present: dsv4.model.prefill.prefill; 6 prompts of up to 129 tokens in one batch against each alone, on"
            " refs with random weights: of 768 logits after the prompts and after a step on their caches there"
            " differ 0 as trained, 0 as B0_unfused"
        )
        assert "; 4 rungs: bit for bit by its tests" in self.claim(texts, "B0_unfused", "P4", "P5", "B0")[1]

    @pytest.mark.parametrize(
        ("found", "holds", "said"),
        [
            (None, False, "B1, B2: absent"),
            (
                {"entry_point": "e", "bit_equal": True, "rel_l2": 0.0},
                True,
                "B1, B2: present: e, bit-equal to each alone",
            ),
            (
                {"entry_point": "e", "bit_equal": False, "rel_l2": 1e-3},
                True,
                "e, relative L2 0.001 from each alone",
            ),
            (
                {"entry_point": "e", "bit_equal": False, "rel_l2": 0.1},
                False,
                "e, relative L2 0.1 from each alone",
            ),
            (
                OWN | {"compared": "no: ties a row to its launch"},
                True,
                "B1, B2: no: ties a row to its launch",
            ),
        ],
    )
    def test_what_the_guard_found_of_each_rung(self, texts, found, holds, said):
        there, text = self.claim(texts, "B1", "B2", batched=found)
        assert (there, said in text) == (holds, True)

    def test_a_tree_without_the_entry_point_has_none(self, texts, monkeypatch):
        monkeypatch.setattr(claims_text, "OWN", "dsv4.model.prefill.prefill_of_old")
        assert self.claim(texts) == (False, "absent: there is no dsv4.model.prefill.prefill_of_old")
        monkeypatch.setattr(claims_text, "OWN", "dsv4.model.gone.prefill")
        assert self.claim(texts) == (False, "absent: there is no dsv4.model.gone.prefill")

    def test_a_logit_that_differs_is_against_it(self, texts, monkeypatch):
        evidence = judged(texts)
        monkeypatch.setitem(evidence._ops["values"], "batched_prefill.trained", 2.0)
        holds, text = claims_text.batched_prefill(evidence)
        assert not holds
        assert "there differ 2 as trained, 0 as B0_unfused" in text
