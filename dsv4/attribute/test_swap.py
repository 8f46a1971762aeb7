"""A swapped op is the reference's and nothing else is; no run repeats what cannot have changed."""

from dataclasses import replace

import pytest
import torch

from dsv4.attribute._small import PLANS, logits, of_plan, tokens, trained
from dsv4.attribute.ops import EMBED, GROUPS, OPS, places
from dsv4.attribute.own_run import own_run, same_bits
from dsv4.attribute.swap import Swapped
from dsv4.faults import Fault
from dsv4.model.cache import next_batch
from dsv4.model.transformer import unchanged
from dsv4.taps import STAGES

ROWS = 28  # over topk * ratio = 24 and over the window of 16
CUTS = (ROWS, 1)


def every_place(model):
    found = places([stages.names for stages in model.stages], model.head.names)
    return [place for at in found.values() for place in at]


def test_every_stage_is_of_one_op():
    assert sorted(stage for stages in OPS.values() for stage in stages) == sorted(STAGES)
    assert {op for op, stages in OPS.items() if not stages} == {EMBED}


@pytest.mark.parametrize("plan", PLANS)
def test_everything_swapped_is_the_reference_and_nothing_the_variant(plan):
    variant, reference = of_plan(plan), trained()
    all_swapped = logits(Swapped(variant, reference, every_place(variant)), *CUTS)
    assert same_bits(all_swapped, logits(reference, *CUTS))
    own = logits(of_plan(plan, wide=False), *CUTS)
    assert same_bits(logits(Swapped(variant, reference, []), *CUTS), own)
    assert not same_bits(own, all_swapped)


def seen(model, layer, name):
    """What a stage of a layer writes along a sequence."""
    found = {}

    def probe(at, tap, value):
        if at == layer:
            found[tap] = value
        return unchanged(at, tap, value)

    model.forward([model.new_cache()], [tokens(ROWS)], probe)
    return found[name]


@pytest.mark.parametrize(("group", "stage"), [(group, stage) for group in GROUPS for stage in group.stages])
def test_a_group_that_is_split_scores_at_random(group, stage):
    """A variant that differs in the indexer alone: whole it is like the reference, split like neither."""
    reference, layer = trained(), 1
    plan = of_plan("lowest").numerics
    own = replace(reference.numerics, index_record=plan.index_record, index_query=plan.index_query)
    variant = replace(reference, numerics=own)
    truth = seen(reference, layer, "index_scores")
    visible = torch.isfinite(truth)

    def likeness(model):
        scores = seen(model, layer, "index_scores")
        return float(torch.corrcoef(torch.stack((scores[visible], truth[visible])))[0, 1])

    split = Swapped(variant, reference, [])
    split._mixed[layer].swapped = frozenset([stage])
    assert likeness(variant) > 0.9
    assert same_bits(seen(Swapped(variant, reference, [(layer, group.name)]), layer, "index_scores"), truth)
    assert abs(likeness(split)) < 0.5


@pytest.mark.parametrize(
    ("stage", "store", "record"),
    [
        ("kv_store", "window", "Fp8Record"),
        ("comp_store", "entries", "Fp8Record"),
        ("index_k_store+index_score", "index", "Fp4Key"),
    ],
)
def test_a_swapped_store_has_the_references_format_in_that_layer_alone(stage, store, record):
    cache = Swapped(of_plan("narrow"), trained(), [(1, stage)]).new_cache()
    formats = [type(getattr(layer, store).record).__name__ for layer in cache.layers if getattr(layer, store)]
    own = of_plan("narrow").new_cache()
    before = [type(getattr(layer, store).record).__name__ for layer in own.layers if getattr(layer, store)]
    changed = [layer for layer, (one, two) in enumerate(zip(formats, before, strict=True)) if one != two]
    assert changed == [1 if store == "window" else 0]
    assert record in formats


def test_a_wide_query_is_refused_beneath_narrow_scores():
    with pytest.raises(
        ValueError, match="index_q: the variant's scores take the reference's query for narrow"
    ):
        Swapped(of_plan("lowest", wide=False), trained(), [(1, "index_q")])


@pytest.fixture(scope="module")
def own():
    torch.set_num_threads(1)
    return own_run(of_plan("lowest"), trained(), [tokens(12), tokens(5, seed=2)])


def whole(own, swap):
    model = Swapped(own.variant, own.reference, swap, own.wrap)
    return model.forward([model.new_cache() for _ in own.sequences], list(own.sequences))


@pytest.mark.parametrize("op", OPS)
def test_a_run_from_the_lowest_swapped_layer_is_the_whole_run(own, op):
    assert same_bits(own.swapped(own.places[op]), whole(own, own.places[op]))


@pytest.mark.parametrize("op", ["attend", "experts", "head"])
def test_what_lies_below_the_lowest_swapped_layer_is_never_read(own, op):
    highest = own.places[op][-1]
    broken = [torch.full_like(streams, torch.nan) for streams in own.streams[:-2]]
    shorter = replace(own, streams=[*broken, *own.streams[-2:]])
    assert same_bits(shorter.swapped([highest]), whole(own, [highest]))


def test_an_op_with_the_same_bits_needs_no_run(own):
    same = {op for op, at in own.places.items() if own.same.issuperset(at)}
    assert {"kv_store", "comp_store", "index_topk", "route_weights", "lm_head"} <= same
    assert not same & {"attn_quant", "q_b", "attend", "experts", "index_k_store+index_score", EMBED}
    for op in sorted(same):
        assert same_bits(whole(own, own.places[op]), own.logits), op


def test_zeros_of_two_signs_are_not_the_same_bits():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


def test_a_fault_goes_with_its_op_at_its_layer():
    reference, variant = trained(), trained()
    fault = Fault(kind="", what="", layer=1, stage="q_b", tap="q", value=lambda q: q.flip(1))
    wrap = fault.install(variant)
    clean = logits(reference, ROWS)
    assert not same_bits(logits(Swapped(variant, reference, [], wrap), ROWS), clean)
    assert same_bits(logits(Swapped(variant, reference, [(1, "q_b")], wrap), ROWS), clean)
    assert not same_bits(logits(Swapped(variant, reference, [(2, "q_b")], wrap), ROWS), clean)
    run = own_run(variant, reference, [tokens(ROWS)], wrap)
    assert set(every_place(variant)) - run.same == {(1, "q_b")}


def test_a_run_of_two_texts_is_each_alone(own):
    batch = next_batch([own.variant.new_cache()], [own.sequences[1]])
    assert same_bits(own.logits[12:], own.variant.run(batch))
