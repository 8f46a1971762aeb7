"""The page of a branch: every kind of commit, in words, in a map, and in a browser without a request."""

import json
import re

import pytest

from dsv4.report.commits import headline, heat, main, render
from dsv4.report.test_browser import Seen, browser  # noqa: F401 - a fixture

SITE = {"stage": "index_q", "layers": [1, 3, 5], "taps": ["index_w"]}
PLACE = {"layer": 5, "stage": "index_topk", "tap": "topk", "kind": "fidelity", "mode": "isolated"}


def verdict(number, status, kind, **more):
    """One commit of ``commits.json``."""
    values = [1 - 10.0 ** -(layer + 3) for layer in range(6)]
    found = {
        "id": f"{number:010x}",
        "commit": f"{number:040x}",
        "subject": f"Commit {number} & <b>its</b> subject",
        "parents": [],
        "against": f"{number - 1:040x}" if number else None,
        "kind": kind,
        "sites": [],
        "plan": {},
        "rung": "P4",
        "change": {},
        "status": status,
        "reasons": [f"reason {number}"],
        "cos": {"min": 0.999, "by_tap": {"attn_out": values, "moe_out": [*values[:-1], None]}},
        "culprit": None,
        "label": "emulated on cpu",
    }
    return found | more


COMMITS = [
    verdict(0, "pass", "base"),
    verdict(1, "pass", "one_site", sites=[SITE], change={"norm_quant": ["unfused", "fused"]}),
    verdict(2, "pass", "no_numerics"),
    verdict(
        3, "fail", "two_sites", sites=[SITE, {"stage": "moe_sum", "layers": [0, 1, 2], "taps": ["moe_out"]}]
    ),
    verdict(4, "pass", "merge"),
    verdict(5, "fail", "one_site", culprit=PLACE, confirmed={"confirmed": True}),
    verdict(6, "blocked", "inherited", culprit=PLACE),
    verdict(7, "cannot_measure", "does_not_run", cos=None, label=None, culprit=None),
]
FOUND = {
    "schema": 1,
    "base": "0" * 40,
    "head": "7" * 40,
    "repo": "/some/repo",
    "rung": "P4",
    "commits": COMMITS,
}


@pytest.mark.parametrize(
    ("chosen", "title", "tone"),
    [
        ([0, 1, 2], "All 2 commits hold", "pass"),
        ([0, 1], "The commit holds", "pass"),
        ([0, 3, 5], "0000000003 fails: two sites, and 1 more", "fail"),
        ([0, 1, 5, 6], "0000000005 fails: layer 5, index_topk (topk)", "fail"),
        ([0, 7], "0000000007 cannot measure: does not run", "cannot_measure"),
    ],
)
def test_the_first_words_are_the_first_failure(chosen, title, tone):
    assert headline([COMMITS[at] for at in chosen]) == (title, tone)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([4], "4"),
        ([4, 5], "4, 5"),
        ([4, 5, 6], "4 to 6"),
        ([1, 3, 5], "1, 3, 5"),
        (["model"], "model"),
        ([0, 1, 2, "model"], "0 to 2, model"),
    ],
)
def test_layers_that_moved_are_all_said(layers, said):
    moved = verdict(1, "fail", "one_site", sites=[{"stage": "logits", "layers": layers, "taps": []}])
    assert f">logits ({said})" in render(FOUND | {"commits": [COMMITS[0], moved]})


def test_the_labels_say_whose_reference_it_was_if_a_foreign_one_was_asked():
    said = {"verdict": "differs", "text": "reference: ours (trained); the foreign one differs"}
    assert '<span class="label">reference: ours (trained); the foreign one differs' in render(
        FOUND | {"reference": said}
    )
    assert "reference: ours" not in render(FOUND | {"reference": said | {"verdict": None}})


def test_every_commit_is_a_row_with_its_kind_and_words():
    page = render(FOUND)
    rows = re.findall(r'<tr class="spine.*?</tr>', page, re.DOTALL)
    kinds = [
        "base",
        "one site",
        "no numerics changed",
        "two sites",
        "merge",
        "one site",
        "inherited",
        "does not run",
    ]
    assert [kind in row for row, kind in zip(rows, kinds, strict=True)] == [True] * 8
    assert "Commit 1 &amp; &lt;b&gt;its&lt;/b&gt; subject" in rows[1]
    assert "norm_quant: unfused → fused" in rows[1]
    assert "index_q (1, 3, 5); moe_sum (0 to 2)" in rows[3]
    assert "(confirmed: repeated, reverted, re-applied)" in rows[5]
    assert "not finite" in rows[1]  # the last layer of moe_out
    assert all(f"reason {number}" in row for number, row in enumerate(rows))


def test_the_map_has_a_row_a_commit_and_no_colour_of_its_own():
    drawn = heat(COMMITS, "attn_out")
    assert (
        len(re.findall(r'fill="var\(--h\d\)"', drawn)) == 7 * 6 + 7
    )  # cells of seven commits, and the legend
    assert all(f"{number:010x}" in drawn for number in range(8))
    assert "✕" in heat(COMMITS, "moe_out")
    assert "✕" not in drawn
    assert heat([COMMITS[7]], "attn_out") is None
    assert not re.findall(r'(?:fill|stroke)="#(?!000|fff)', drawn)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Return the page's address."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "commits.json").write_text(json.dumps(FOUND))
    assert main(["--results", str(folder), "--reports", str(folder)]) == 0
    return (folder / "commits.html").as_uri()


@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_offline_without_a_complaint(browser, address, width):  # noqa: F811
    page = browser.new_page(viewport={"width": width, "height": 844})
    seen = Seen(page)
    page.goto(address)
    assert seen.requests == [address]
    assert seen.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart svg").count() == 2
    page.close()
