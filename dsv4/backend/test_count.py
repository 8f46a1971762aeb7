"""Launches that a plan asks for, over a whole decode step whose launches are counted and not made."""

from collections import Counter

import pytest
import torch

from dsv4.backend import count, sizes
from dsv4.backend.conftest import ROOT
from dsv4.backend.count import TORCH, at_size, site
from dsv4.backend.launches import counted
from dsv4.backend.test_bound import LADDER
from dsv4.backend.values import Fused
from dsv4.judge.kernel_launches import MHC_FUSED, NORM_FUSED, QUANTISE, QUANTISE_LONG, wrong
from dsv4.judge.launches import FLASH, PRO, Sizes
from dsv4.model.config import load_config
from dsv4.plan import flatten
from kernels.rmsnorm.kernel import rmsnorm

COLLAPSE, NORM = "hc.collapse_kernel", "rmsnorm._rmsnorm_kernel"
UNFUSED, P4, P5 = (COLLAPSE, NORM, QUANTISE), (COLLAPSE, NORM_FUSED), (MHC_FUSED,)
BY_TORCH = (COLLAPSE, NORM)  # and torch's own launches: rows under one gsa have no kernel
NANO = load_config(ROOT / "data" / "nano")
LAYERS, COMPRESSED = 8, 6


@pytest.mark.parametrize(
    ("rung", "launched"),
    [("B0_unfused", UNFUSED), ("P4", P4), ("P4_launch_gsa", BY_TORCH), ("P5", P5), ("B0", P5), ("B3", P5)],
)
def test_every_site_of_every_layer_makes_its_plans_launches_and_no_unfused_one_is_left(rung, launched):
    """P4 and P5: at most two a site, two sites a layer."""
    plan = flatten(LADDER[rung].plan)
    found = at_size(NANO, LADDER[rung].plan, context=300)
    for layer in range(LAYERS):
        for which in ("attn", "moe"):
            assert site(found, layer, which) == Counter(launched)
    assert len(launched) <= 2 or rung == "B0_unfused"
    total = sum(found.values(), Counter())
    assert list(wrong(plan, Sizes.of(vars(NANO)), total)) == []
    q_a = plan["q_a_norm"] == "unfused"
    kv = plan["kv_norm"] == "unfused"
    norms, quantised = (2 * LAYERS * (kernel in launched) for kernel in (NORM, QUANTISE))
    assert total[NORM] == norms + LAYERS * (q_a + kv) + COMPRESSED + 1  # compressed rows' norm and the head's
    assert total[QUANTISE] == quantised + LAYERS * (q_a + 2)  # attention's two projections
    assert total[COLLAPSE] == 2 * LAYERS * (launched != P5) + 1


def test_a_fused_result_that_is_not_taken_shows(monkeypatch):
    monkeypatch.setattr(Fused, "take", lambda *_: None)
    found = at_size(NANO, LADDER["P5"].plan, context=300)
    assert site(found, 0, "attn") == Counter((MHC_FUSED, QUANTISE))


@pytest.mark.parametrize(("name", "expected"), [("flash", FLASH), ("pro", PRO)])
def test_the_judge_counts_bytes_of_the_sizes_that_kernels_are_built_for(name, expected):
    assert Sizes.of(vars(sizes.released(name))) == expected


def test_p5_saves_two_launches_a_site_of_pros_61_layers_by_our_counting():
    found = at_size(sizes.released("pro"), LADDER["B3"].plan)
    total = sum(found.values(), Counter())
    assert total[MHC_FUSED] == 2 * 61
    assert total[QUANTISE] == total[QUANTISE_LONG] == 61  # before o_b and o_a
    assert total[COLLAPSE] == 1
    assert all(site(found, layer, which) == Counter(P5) for layer in (0, 30, 60) for which in ("attn", "moe"))


def test_the_page_holds_both_countings(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sizes.RATIOS, "flash", [0, 4, 128])
    monkeypatch.setattr(count, "CONTEXT", 500)
    try:
        assert count.main([str(tmp_path), "--model", "flash", "--rung", "B0_unfused", "--rung", "P5"]) == 0
    finally:
        torch.set_grad_enabled(False)  # as for every test here
    page = (tmp_path / "launches_flash.md").read_text()
    assert "Counted on no device: no launch is made, 20" in page
    assert "P5 at 3 layers, 6 sites: the plan counts 7 launches a site that become 2, 30 saved" in page
    assert "our own unfused kernels make 3, P5's 1, 12 saved" in page


def test_what_is_counted_outside_is_made(accelerator):
    x = torch.ones(1, 16, device=accelerator)
    with counted() as seen:
        made = rmsnorm(x, None, eps=1e-6, dtype=torch.float32)
    assert seen == Counter({NORM: 1})
    assert TORCH not in seen
    assert float(made[0, 0]) == pytest.approx(1, abs=1e-5)
